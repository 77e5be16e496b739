"""An environment of words behind the interface of token ids: responses to calls, what comes of them to ids."""

from __future__ import annotations

import numpy as np

from rlx.config.chat import ToolsConfig
from rlx.envs.conversation import Conversation
from rlx.envs.env import Env, ToolCall
from rlx.envs.tool_calls import Malformed, parse_calls, without_calls
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason


class ToolSession:
    """An `rlx.rollout.session.Environment` around an `Env`.

    A response with calls is told what came of each; one without is said to the environment, which may answer or end
    the session. A response that a length limit cut ends it: half a call is none.
    """

    def __init__(self, env: Env, conversation: Conversation, limits: ToolsConfig):
        self._env, self._conversation, self._limits = env, conversation, limits
        self._told: list[list[str]] = []  # after each response
        self._seconds = 0.0  # of tools
        self._stop: StopReason | None = None

    async def reset(self) -> np.ndarray:
        return self._conversation.opening(await self._env.reset())

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        chat, form = self._conversation.chat, self._limits.format
        text, tools = chat.decode(response), self._conversation.tools
        if not len(response) or response[-1] not in chat.stop_token_ids:
            await self._env.step(without_calls(form, text, tools))
            return None
        told: list[str] = []
        actions: list[str | ToolCall | Malformed] = [*parse_calls(form, text, tools)]
        for call in actions or [without_calls(form, text, tools)]:
            if isinstance(call, Malformed):
                told.append(f"Error: {call.problem}")
            elif self._seconds >= self._limits.session_seconds:
                told.append("Error: not run, the tools of this session have run long enough")
            else:
                step = await self._env.step(call)
                if step.done:
                    return None
                self._seconds += step.seconds
                told.append(cut(step.observation, self._limits.output_bytes))
        self._told.append(told)
        if len(self._told) >= self._limits.max_turns:
            self._stop = StopReason.TURN_LIMIT
        elif self._seconds >= self._limits.session_seconds:
            self._stop = StopReason.TOOL_LIMIT
        return None if self._stop is not None else self._conversation.following(told, response)

    async def grade(self, transcript: Transcript) -> Verdict:
        grade = await self._env.grade()
        return Verdict(grade, self._written_out(transcript), self._stop)

    async def close(self) -> None:
        await self._env.close()

    def _written_out(self, transcript: Transcript) -> str:
        """Responses and what they were told, for people."""
        parts: list[str] = []
        for i, turn in enumerate(transcript.turns):
            if turn.parts:
                parts.append(self._conversation.chat.decode(turn.response()).strip())
                if i < len(self._told):
                    parts += [f"[{i + 1}] {text}" for text in self._told[i]]
        return "\n\n".join(parts)


def cut(text: str, most: int) -> str:
    """At most about `most` bytes of a text: where it is longer, its beginning and its end."""
    data = text.encode()
    if len(data) <= most:
        return text
    half = most // 2
    head, tail = (part.decode(errors="ignore") for part in (data[: most - half], data[len(data) - half :]))
    return f"{head}\n... {len(data) - most} bytes left out ...\n{tail}"

"""An environment of words behind the interface of token ids: responses to calls, what comes of them to ids."""

from __future__ import annotations

import numpy as np

from rlx.config.chat import ToolsConfig
from rlx.envs.conversation import Conversation
from rlx.envs.env import Env, Step, ToolCall
from rlx.envs.tool_calls import Malformed, as_characters, parse_calls, without_calls
from rlx.rollout.transcript import Transcript, Verdict
from rlx.sandbox.base import PathError, WorkspaceError
from rlx.types import StopReason


class ToolSession:
    """An `rlx.rollout.session.Environment` around an `Env`.

    A response with calls is told what came of each; one without is said to the environment, which may answer or end
    the session. A response that a length limit cut ends it: half a call is none.
    """

    def __init__(self, env: Env, conversation: Conversation, limits: ToolsConfig):
        self._env, self._conversation, self._limits = env, conversation, limits
        self._shown: list[list[str]] = []  # to people, after each response
        self._seconds = 0.0  # of tools
        self._stop: StopReason | None = None

    async def reset(self) -> np.ndarray:
        return self._conversation.opening(await self._env.reset())

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        said, actions = self._read(response)
        if not len(response) or response[-1] not in self._conversation.chat.stop_token_ids:
            await self._env.step(said)
            return None
        told, shown = [], []
        for action in actions or [said]:
            step = await self._act(action)
            if step.done:
                return None
            self._seconds += step.seconds
            told.append(as_characters(step.observation))
            shown.append(told[-1] + (f" (reward {step.reward:g})" if step.reward else ""))
        self._shown.append(shown)
        if len(self._shown) >= self._limits.max_turns:
            self._stop = StopReason.TURN_LIMIT
        elif self._seconds >= self._limits.session_seconds:
            self._stop = StopReason.TOOL_LIMIT
        return None if self._stop is not None else self._conversation.following(told, response)

    def _read(self, response: np.ndarray) -> tuple[str, list[str | ToolCall | Malformed]]:
        """What is said beside the calls, and the calls."""
        known, form = self._conversation, self._limits.format
        text = known.chat.decode(response)
        said = without_calls(form, text, known.tools, thinking=known.thinking)
        return said, [*parse_calls(form, text, known.tools, thinking=known.thinking)]

    async def _act(self, action: str | ToolCall | Malformed) -> Step:
        """What came of it. What a call cannot do with the workspace as the policy has made it is told, too."""
        if isinstance(action, Malformed):
            return Step(f"Error: {action.problem}")
        if self._seconds >= self._limits.session_seconds:
            return Step("Error: not run, the tools of this session have run long enough")
        try:
            step = await self._env.step(action)
            return step._replace(observation=in_bytes(step.observation, self._limits.output_bytes))
        except (PathError, WorkspaceError) as error:
            return Step(f"Error: {error}")

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
                if i < len(self._shown):
                    parts += [f"[{i + 1}] {text}" for text in self._shown[i]]
        return "\n\n".join(parts)


def in_bytes(text: str, most: int) -> str:
    """At most about `most` bytes of a text: where it is longer, its beginning and its end."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return text
    half = most // 2
    head, tail = (part.decode(errors="ignore") for part in (data[: most - half], data[len(data) - half :]))
    return f"{head}\n... {len(data) - most} bytes left out ...\n{tail}"

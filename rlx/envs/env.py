"""What a session acts in, in words: an environment says what there is to do, takes what is said and done, and judges.

`rlx.rollout.tool_session` puts one behind the interface of token ids that engines and the producer know; environments
of people's own need nothing of tokens, templates and formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rlx.envs.grading import Grade


@dataclasses.dataclass(frozen=True)
class Tool:
    """What the policy may call. Every parameter is a text and must be given."""

    name: str
    description: str
    parameters: Mapping[str, str]  # name -> what it is

    def schema(self) -> dict[str, Any]:
        """As chat templates take it: a function with a JSON schema of its parameters."""
        properties = {name: {"type": "string", "description": text} for name, text in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call; its tool and arguments are those that `Env.tools` describes."""

    tool: str
    arguments: Mapping[str, str]


class Step(NamedTuple):
    """What follows an action."""

    observation: str  # what the policy is told next; not read where the session is over
    reward: float = 0.0  # of this action, shown to people in the session's text: `Env.grade` judges the session
    done: bool = False
    seconds: float = 0.0  # that a tool ran, without waiting for its turn


class Env(Protocol):
    """Made for one session, used once. What it raises ends the session as a failure of the environment."""

    @property
    def tools(self) -> tuple[Tool, ...]: ...

    async def reset(self) -> str:
        """The first observation: the task."""
        ...

    async def step(self, action: str | ToolCall) -> Step:
        """A tool call, or a text without any. A response with several calls is so many steps, in their order."""
        ...

    async def grade(self) -> Grade:
        """The verdict on the work so far: the session is over, or a limit has ended it. May be asked again."""
        ...

    async def close(self) -> None:
        """Releases what it holds; called once, whatever happened before."""
        ...

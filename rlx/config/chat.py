"""How conversations are written, and what their tools may do: the sections `chat` and `tools`."""

from __future__ import annotations

import dataclasses
from typing import Literal

Thinking = Literal["off", "low", "high", "max"]
ToolFormatName = Literal["hermes", "plain"]


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    template: Literal["checkpoint", "chatml"]
    thinking: Thinking  # effort that the template asks for; off: an empty think block


@dataclasses.dataclass(frozen=True)
class ToolsConfig:
    format: ToolFormatName
    max_turns: int  # responses of a session
    call_seconds: float  # of one call
    session_seconds: float  # of all calls of a session
    output_bytes: int  # of a call's output that the policy is shown

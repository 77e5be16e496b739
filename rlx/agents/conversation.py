"""The words of a session as a client tells them, beside its token ids: does a request go on from where the session is?

Clients send the whole conversation with every request. Only what is new in it is rendered and appended to the ids, so
that the ids of one request are a prefix of the next one's by construction. A client that tells the past otherwise than
it was (it summarises, drops a turn, or changes its tools) has rewritten history, and a prefix no longer exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlx.agents.openai import ChatRequest, Message, RequestInvalid, same_message

Tools = Sequence[Mapping[str, Any]]


class Format(Protocol):
    """How words become token ids and back; `rlx.agents.chat_format.ChatFormat`."""

    def begin(self, messages: Sequence[Message], tools: Tools) -> np.ndarray:
        """int32 [P]: a whole conversation up to where the assistant writes."""
        ...

    def follow(self, messages: Sequence[Message], response: np.ndarray) -> np.ndarray:
        """int32 [M]: what comes after the response, int32 [W], up to where the assistant writes again."""
        ...

    def read(self, response: np.ndarray, tools: Tools, turn: int) -> Message:
        """The assistant's message in a response, int32 [W]."""
        ...

    def ended(self, response: np.ndarray) -> bool:
        """Whether the policy ended its turn by itself; a limit has cut it otherwise."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
    """What the policy is told next. rewritten: index of the first message told otherwise than before; None: it goes on.

    A conversation that is rewritten begins anew: `tokens` are then all of it.
    """

    tokens: np.ndarray  # int32 [M]
    rewritten: int | None


class ClientConversation:
    """A session's words so far. A request counts once it is answered: one that failed can be made again."""

    def __init__(self, form: Format):
        self._form = form
        self._messages: list[Message] = []
        self._tools: list[Mapping[str, Any]] = []
        self._response = np.zeros(0, np.int32)  # the policy's last one
        self._turns = 0

    def told(self, request: ChatRequest) -> Observation:
        """What the request tells the policy.

        Raises RequestInvalid for a conversation that ends with the assistant's own words.
        """
        if request.messages[-1]["role"] == "assistant":
            raise RequestInvalid("the last message is the assistant's own: prefilled answers are not supported")
        rewritten = self._rewritten(request)
        if not self._messages or rewritten is not None:
            return Observation(self._form.begin(request.messages, request.tools), rewritten)
        return Observation(self._form.follow(request.messages[len(self._messages) :], self._response), None)

    def said(self, request: ChatRequest, response: np.ndarray) -> Message:
        """The policy's response to it, int32 [W], as the client gets it."""
        message = self._form.read(response, request.tools, self._turns)
        self._messages, self._tools = [*request.messages, message], list(request.tools)
        self._response = response
        self._turns += 1
        return message

    def _rewritten(self, request: ChatRequest) -> int | None:
        if not self._messages:
            return None
        if list(request.tools) != self._tools:
            return 0
        for i, (mine, theirs) in enumerate(zip(self._messages, request.messages)):
            if not same_message(mine, theirs):
                return i
        new = request.messages[len(self._messages) :]
        # Words of the assistant that it has not said, or nothing new at all.
        others = any(message["role"] == "assistant" for message in new)
        return min(len(self._messages), len(request.messages)) if others or not new else None

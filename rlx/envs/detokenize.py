"""Token ids to the text of each token, for people: the pieces joined are the decoded whole.

A character may be spread over several tokens; its bytes are shown at the token that completes it, and the tokens before
have no text of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no whole character yet
LONGEST = 8  # tokens that one character may be spread over


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text of each token. `decode` gives the text of a sequence of ids, special tokens written out."""
    stream = TextStream(decode)
    pieces = [stream.add(token) for token in ids]
    if pieces:
        pieces[-1] += stream.rest()
    return pieces


class TextStream:
    """Text of tokens that come one by one.

    A token's text may depend on the one before it (a leading space), so each is decoded behind the last whole piece.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []  # the last tokens whose text is complete
        self._open: list[int] = []  # tokens that end inside a character

    def add(self, token: int) -> str:
        """The text that is complete with this token."""
        self._open.append(int(token))
        text = self._text()
        if text.endswith(UNFINISHED) and len(self._open) < LONGEST:
            return ""
        self._before, self._open = self._open, []
        return text

    def rest(self) -> str:
        """The text of what is still open: an unfinished character, as the decoder writes it."""
        text = self._text() if self._open else ""
        self._before, self._open = self._open or self._before, []
        return text

    def _text(self) -> str:
        return self._decode([*self._before, *self._open])[len(self._decode(self._before)) :]

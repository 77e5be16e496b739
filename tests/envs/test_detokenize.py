"""The texts of single tokens."""

from hypothesis import given
from hypothesis import strategies as st

from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.detokenize import TextStream, token_texts
from tests import tiny_tokenizer


def bytes_decode(ids):
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=20))
def test_the_pieces_are_the_whole(text):
    pieces = token_texts(bytes_decode, list(text.encode()))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())


def test_a_character_is_at_the_token_that_completes_it():
    assert token_texts(bytes_decode, list("aé!".encode())) == ["a", "", "é", "!"]


def test_bytes_that_are_no_character_do_not_hold_up_the_rest():
    ids = [*b"a", *[0xFF] * 9, *b"bc"]
    pieces = token_texts(bytes_decode, ids)
    assert "".join(pieces) == bytes_decode(ids)
    assert pieces[-2:] == ["\ufffdb", "c"], "at most a few are held back"
    assert token_texts(bytes_decode, []) == []


def test_an_unfinished_character_is_shown_at_the_end():
    stream = TextStream(bytes_decode)
    assert [stream.add(byte) for byte in "é".encode()[:1]] == [""]
    assert stream.rest() == "\ufffd"
    assert stream.rest() == ""


def test_special_tokens_and_spaces_of_a_real_tokenizer(tmp_path):
    tokenizer = load_chat_tokenizer(tiny_tokenizer.build(tmp_path), "", "").tokenizer
    ids = tokenizer.encode("x y<|im_end|>", add_special_tokens=False)
    assert token_texts(lambda ids: tokenizer.decode(list(ids)), ids) == ["x", " ", "y", "<|im_end|>"]

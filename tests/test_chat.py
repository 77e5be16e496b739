"""`rlx chat`: on a Hugging Face directory, a run and one of its checkpoints; over several turns; cut and refused."""

import asyncio
import io
import re
import signal
import sys

import jax
import numpy as np
import pytest

from rlx import chat, cli
from rlx.chat import Conversation, Options, answer, encode, make_engine, open_checkpoint
from rlx.envs.detokenize import token_texts
from rlx.rollout.engine import Request
from rlx.train import train
from tests import tiny_run

OPTIONS = Options(context=128, max_new_tokens=40, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def speaker(recipe):
    return open_checkpoint(recipe.parent / "model", "float32")


@pytest.fixture(scope="module")
def trained(recipe):
    """A run of three updates, each with a checkpoint."""
    config = tiny_run.config(recipe, run__name="chat", checkpoint__keep=3, tasks__held_out=2)
    train(config)
    return config.run.path


def say(conversation, question):
    """The pieces of an answer."""

    async def collect():
        return [piece async for piece in conversation.ask(question)]

    return asyncio.run(collect())


def rlx(monkeypatch, capsys, *words, lines=""):
    """(status, stdout, stderr) of `rlx chat WORDS` with `lines` in its pipe."""
    monkeypatch.setattr(sys, "argv", ["rlx", "chat", *map(str, words), "--context=128", "--compilation-cache="])
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status = cli.main()
    return status, *capsys.readouterr()


def test_a_line_is_a_question_and_an_answer_a_line(recipe, monkeypatch, capsys):
    words = (recipe.parent / "model", "--seed=1", "--max-new-tokens=12")
    status, text, note = rlx(monkeypatch, capsys, *words, lines="Digit 1?\n\nDigit 2?\n")
    assert status == 0
    assert len(text.splitlines()) == 2
    assert set(text) <= set("37\n") | set(map(chr, range(32, 127))) | {"\ufffd"}
    assert str(recipe.parent / "model") in note
    assert rlx(monkeypatch, capsys, *words, lines="Digit 1?\n\nDigit 2?\n")[1] == text, "the same seed"


def test_a_run_speaks_with_its_newest_checkpoint(trained, monkeypatch, capsys):
    assert open_checkpoint(trained, "float32").name == f"{trained}, version 3"
    assert open_checkpoint(trained / "checkpoints" / "1", "float32").name == f"{trained}, version 1"
    question = ("--seed=1", "--max-new-tokens=12")
    status, text, _ = rlx(monkeypatch, capsys, trained, *question, lines="Digit 1?\n")
    assert status == 0
    assert text == rlx(monkeypatch, capsys, trained / "checkpoints" / "3", *question, lines="Digit 1?\n")[1]


def test_the_weights_are_those_of_the_checkpoint(trained, speaker):
    first, last, newest = (
        jax.tree.leaves(open_checkpoint(trained / path, "float32").params)
        for path in ("checkpoints/1", "checkpoints/3", "")
    )

    def same(some, others):
        return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))

    assert not same(first, last)
    assert not same(first, jax.tree.leaves(speaker.params))
    assert same(last, newest)


@pytest.mark.parametrize(
    "path, said",
    [
        ("checkpoints/9", r"chat has no checkpoint 9; it has 1, 2, 3"),
        ("events", "is no directory of a run"),
        ("../chatt", r"does not exist; the nearest run is .*chat"),
    ],
)
def test_what_is_no_checkpoint(trained, monkeypatch, capsys, path, said):

    status, text, error = rlx(monkeypatch, capsys, trained / path)
    assert (status, text) == (1, "")
    assert re.search(said, error)


@pytest.mark.parametrize(
    "option, said", [("--temperature=-1", "0 (greedy) or more"), ("--max-new-tokens=0", "at least 1")]
)
def test_a_wrong_option(recipe, monkeypatch, capsys, option, said):
    with pytest.raises(SystemExit) as left:
        rlx(monkeypatch, capsys, recipe.parent / "model", option)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_greedy_pieces_are_one_completion(speaker):
    """An answer asked for in pieces is what the engine writes at once."""
    options = OPTIONS._replace(temperature=0.0, max_new_tokens=30)
    engine, prompt = make_engine(speaker, options), encode(speaker.tokenizer, [{"role": "user", "content": "Hi"}])

    async def pieces():
        return [piece async for piece in answer(engine, speaker.tokenizer, prompt, options, turn=1)]

    async def whole():
        return await engine.generate(Request("whole", prompt, (0,), 30, 0.0))

    [completion] = asyncio.run(whole())
    expected = "".join(token_texts(lambda ids: speaker.tokenizer.decode(np.array(ids)), completion.tokens.tolist()))
    assert "".join(asyncio.run(pieces())) == expected


def test_the_model_sees_what_was_said_before(speaker, monkeypatch):
    seen = []
    monkeypatch.setattr(
        chat, "encode", lambda tokenizer, messages: seen.append(list(messages)) or encode(tokenizer, messages)
    )
    conversation = Conversation(speaker, OPTIONS, system="Digits.")
    first = "".join(say(conversation, "Digit 1?"))
    say(conversation, "Digit 2?")
    assert [(m["role"], m["content"]) for m in seen[-1]] == [
        ("system", "Digits."),
        ("user", "Digit 1?"),
        ("assistant", first),
        ("user", "Digit 2?"),
    ]
    conversation.restart()
    say(conversation, "Digit 3?")
    assert [m["content"] for m in seen[-1]] == ["Digits.", "Digit 3?"]


def test_the_oldest_exchange_is_forgotten_where_the_context_is_full(speaker, monkeypatch):
    seen = []
    monkeypatch.setattr(
        chat, "encode", lambda tokenizer, messages: seen.append(list(messages)) or encode(tokenizer, messages)
    )
    conversation = Conversation(speaker, OPTIONS, system="")
    for i in range(4):
        say(conversation, f"Digit {i}, and a long question?")
    assert seen[-1][-1]["content"] == "Digit 3, and a long question?"
    assert seen[-1][0]["role"] == "user"
    assert len(seen[-1]) < 7


def test_a_question_that_does_not_fit_is_refused_and_the_talk_goes_on(recipe, monkeypatch, capsys):
    words = (recipe.parent / "model", "--max-new-tokens=20")
    status, text, error = rlx(monkeypatch, capsys, *words, lines=f"{'x' * 200}\nDigit 1?\n")
    assert status == 0
    assert error.count("rlx chat:") == 1
    assert "rlx chat: the question has 2" in error
    assert text.count("\n") == 2, "the second was answered"


def test_a_refused_question_leaves_the_conversation_as_it_was(speaker, monkeypatch):
    conversation = Conversation(speaker, OPTIONS, system="")
    say(conversation, "Digit 1?")
    before = list(conversation._messages)
    with pytest.raises(ValueError, match="the question has"):
        say(conversation, "x" * 200)
    assert conversation._messages == before


@pytest.fixture
def interruptible():
    """Ctrl-C as on a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_an_answer_and_not_the_talk(speaker, interruptible, monkeypatch, capsys):
    conversation = Conversation(speaker, OPTIONS._replace(max_new_tokens=60), system="")
    asked = []
    ask = conversation.ask

    async def interrupted(question):
        asked.append(question)
        async for piece in ask(question):
            yield piece
            if len(asked) == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation, "ask", interrupted)
    chat.talk(conversation, iter(["Digit 1?", "Digit 2?"]))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(" [stopped]")
    assert not second.endswith(" [stopped]")


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_ctrl_d_and_ctrl_c_at_the_prompt_end_the_program(monkeypatch, end):
    lines = iter(["Hello"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise end from None

    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", read)
    assert list(chat.questions()) == ["Hello"]

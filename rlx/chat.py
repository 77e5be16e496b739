"""Talk to a checkpoint, on the embedded engine.

    rlx chat models/smollm2-135m-instruct          a Hugging Face directory
    rlx chat runs/quickstart                       the newest checkpoint of a run
    rlx chat runs/quickstart/checkpoints/10        one of its checkpoints
    echo 'What is 7 + 8?' | rlx chat runs/quickstart

A line is a question; the conversation goes on until /new starts another. Ctrl-C ends an answer, Ctrl-D the program.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx import assemble, cli
from rlx.checkpoint import Checkpoints
from rlx.config.parse import parse
from rlx.config.schema import EngineConfig
from rlx.envs.chat import ChatTokenizer, load_chat_tokenizer
from rlx.envs.detokenize import TextStream
from rlx.export import newest
from rlx.metrics.view import NotARun, read_run
from rlx.models import hf
from rlx.models.spec import Architecture, Params
from rlx.parallel import runtime
from rlx.rollout.engine import Engine, Request
from rlx.rollout.local import LocalEngine
from rlx.types import StopReason

FIRST, LARGEST = 8, 64  # tokens of an answer's first and of its largest piece
SHORTEST_PREFILL = 64  # tokens

Message = dict[str, str]


class Speaker(NamedTuple):
    """A policy to talk to."""

    arch: Architecture
    params: Params
    tokenizer: ChatTokenizer
    name: str


class Options(NamedTuple):
    context: int  # tokens of the whole conversation
    max_new_tokens: int  # of an answer
    temperature: float
    seed: int


def open_checkpoint(path: Path, dtype: str) -> Speaker:
    """The policy in a Hugging Face directory, in a run's newest checkpoint or in one of its checkpoints.

    Raises:
      NotARun: there is nothing of the kind in `path`.
      ValueError, OSError: files that are damaged or of an unsupported model.
      CheckpointError: a checkpoint that cannot be read or does not fit the run.
    """
    if (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file():
        arch = hf.read_architecture(str(path))
        params = jax.tree.map(jnp.asarray, hf.load_params(str(path), arch, dtype))
        return Speaker(arch, params, load_chat_tokenizer(str(path), "", ""), str(path))
    if path.parent.name == "checkpoints" and path.name.isdigit():
        return _of_run(path.parent.parent, int(path.name))
    return _of_run(path, None)


def _of_run(path: Path, step: int | None) -> Speaker:
    view = read_run(path)
    config = parse(view.config)
    run = dataclasses.replace(config.run, directory=str(path.parent), name=path.name)
    config = dataclasses.replace(config, run=run)
    model = assemble.load_model(config)
    if step is None:
        restored = newest(config, model)
        if restored is None:
            raise NotARun(f"{path} has no checkpoint yet; to talk to the model it began with: {config.model.path}")
    else:
        _check_step(path, step)
        checkpoints = Checkpoints(path / "checkpoints", keep=None)
        try:
            restored = checkpoints.restore(assemble.fresh_state(config, model), step)
        finally:
            checkpoints.close()
    params = assemble.policy_params(config, model, restored.state.trainable)
    return Speaker(model.arch, params, model.tokenizer, f"{path}, version {int(restored.state.version)}")


def _check_step(path: Path, step: int) -> None:
    there = sorted(int(entry.name) for entry in (path / "checkpoints").glob("*") if entry.name.isdigit())
    if step not in there:
        raise NotARun(f"{path} has no checkpoint {step}; it has {', '.join(map(str, there)) or 'none'}")


def make_engine(speaker: Speaker, options: Options) -> LocalEngine:
    """An engine of one slot."""
    sizes = [SHORTEST_PREFILL * 4**i for i in range(12)]
    buckets = (*(size for size in sizes if size < options.context), options.context)
    config = EngineConfig(
        kind="local",
        slots=1,
        context=options.context,
        prefill_buckets=buckets,
        prefill_rows=1,
        steps_per_dispatch=FIRST,
        lanes=1,
    )
    return LocalEngine(
        speaker.arch,
        config,
        speaker.params,
        version=0,
        head_size=0,
        stop_ids=tuple(speaker.tokenizer.stop_token_ids),
    )


def encode(tokenizer: ChatTokenizer, messages: list[Message]) -> np.ndarray:
    """Token ids of a conversation up to where the next answer begins."""
    text = tokenizer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return np.array(tokenizer.tokenizer.encode(text, add_special_tokens=False), np.int32)


async def answer(
    engine: Engine, tokenizer: ChatTokenizer, prompt: np.ndarray, options: Options, turn: int
) -> AsyncIterator[str]:
    """The text of an answer, piece by piece.

    An engine gives whole completions, so the answer is asked for in pieces of growing length, each with what was
    written before it as its prompt.
    """
    stream = TextStream(lambda ids: tokenizer.decode(np.asarray(ids, np.int32)))
    most = min(options.max_new_tokens, options.context - len(prompt))
    written, size, ended = np.zeros(0, np.int32), FIRST, False
    while len(written) < most and not ended:
        seed = int(np.random.SeedSequence([options.seed, turn, len(written)]).generate_state(1, np.uint32)[0])
        request = Request(
            id=f"turn {turn}",
            prompt=np.concatenate([prompt, written]).astype(np.int32),
            seeds=(seed,),
            max_new_tokens=min(size, most - len(written)),
            temperature=options.temperature,
        )
        [completion] = await engine.generate(request)
        ended = completion.stop_reason is StopReason.STOP
        written = np.concatenate([written, completion.tokens])
        size = min(2 * size, LARGEST)
        yield "".join(stream.add(token) for token in completion.tokens.tolist())
    yield stream.rest()


class Conversation:
    """The messages so far. The oldest exchange is forgotten where the next answer would not fit any more."""

    def __init__(self, speaker: Speaker, options: Options, system: str) -> None:
        self._engine, self._tokenizer, self._options = make_engine(speaker, options), speaker.tokenizer, options
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages: list[Message] = []
        self._turns = 0

    def restart(self) -> None:
        self._messages = []

    async def ask(self, question: str) -> AsyncIterator[str]:
        """The answer in pieces; what was said until it is cancelled stays in the conversation.

        Raises ValueError for a question that leaves no room for an answer.
        """
        self._messages, prompt = self._with(question)
        self._turns += 1
        said: list[str] = []
        try:
            async for piece in answer(self._engine, self._tokenizer, prompt, self._options, self._turns):
                said.append(piece)
                yield piece
        finally:
            self._messages.append({"role": "assistant", "content": "".join(said)})

    def _with(self, question: str) -> tuple[list[Message], np.ndarray]:
        """The messages with one more, less the oldest exchanges where an answer would not fit, and their token ids."""
        messages = [*self._messages, {"role": "user", "content": question}]
        room = self._options.context - min(self._options.max_new_tokens, self._options.context // 2)
        while True:
            prompt = encode(self._tokenizer, [*self._system, *messages])
            if len(prompt) <= room:
                return messages, prompt
            if len(messages) == 1:
                raise ValueError(f"the question has {len(prompt)} tokens; {room} fit (--context, --max-new-tokens)")
            messages = messages[2:]


def talk(conversation: Conversation, questions: Iterator[str]) -> None:
    """Answers every question on stdout as it is written. Ctrl-C ends an answer."""
    with asyncio.Runner() as runner:
        for question in questions:
            if question.strip() == "/new":
                conversation.restart()
                print("(a new conversation)", file=sys.stderr)
            elif question.strip():
                _print_answer(runner, conversation, question.strip())


def _print_answer(runner: asyncio.Runner, conversation: Conversation, question: str) -> None:
    async def write() -> None:
        async for piece in conversation.ask(question):
            print(piece, end="", flush=True)

    try:
        runner.run(write())
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ValueError as error:
        print(f"rlx chat: {error}", file=sys.stderr)
    print(flush=True)


def questions() -> Iterator[str]:
    """Lines of stdin, with a prompt on a terminal, until Ctrl-D, or Ctrl-C where nothing is being answered."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  line editing and history of input()

    while True:
        try:
            yield input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def main(argv: list[str] | None = None) -> int:
    """`rlx chat`: 0 at the end of the questions, 1 where the checkpoint cannot be used."""
    given = _parser().parse_args(argv)
    runtime.use_compilation_cache(given.compilation_cache)
    speaker = open_checkpoint(given.checkpoint, given.dtype)
    options = Options(
        min(given.context, speaker.arch.max_positions), given.max_new_tokens, given.temperature, given.seed
    )
    print(f"{speaker.name}; /new starts over, Ctrl-D ends. The first answer waits for compilation.", file=sys.stderr)
    talk(Conversation(speaker, options, given.system), questions())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlx chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    least_one = _number(int, lambda value: value >= 1, "at least 1")
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face directory, a run, or RUN/checkpoints/N")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument(
        "--temperature",
        default=0.7,
        type=_number(float, lambda v: v >= 0, "0 (greedy) or more"),
        help="0 = greedy (0.7)",
    )
    parser.add_argument("--max-new-tokens", default=256, type=least_one, metavar="N", help="of an answer (256)")
    parser.add_argument("--context", default=2048, type=least_one, metavar="N", help="tokens of a conversation (2048)")
    parser.add_argument("--seed", default=secrets.randbits(32), type=int, help="the same seed, the same answers")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of a Hugging Face model")
    parser.add_argument("--compilation-cache", default=".cache/jax", metavar="DIR", help='"" = none (.cache/jax)')
    return parser


def _number(kind: type, holds: Any, demand: str) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {demand}")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


if __name__ == "__main__":
    sys.exit(cli.run("chat", sys.argv[1:]))

"""`rlx serve` as a process: the embedded engine behind OpenAI's own client, records that hold up to the model."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import urllib.request

import numpy as np
import openai
import pytest

from rlx import assemble
from rlx.agents.chat_format import ChatFormat
from rlx.agents.openai import RequestInvalid
from rlx.agents.recorder import Limits
from rlx.rollout.engine import Request
from rlx.serve import Sessions, limits_of
from tests import tiny_run

KEYS = {"engine__context": 256, "rollout__max_new_tokens": 8, "learner__row_tokens": 256}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("serve"))


@contextlib.contextmanager
def served(recipe, directory, **changes):
    """OPENAI_BASE_URL of a server."""
    words = tiny_run.arguments(recipe, **KEYS | changes)
    process = tiny_run.start("rlx.serve", *words, "--port=0", f"--to={directory}")
    try:
        line = process.stdout.readline()
        assert line.startswith("OPENAI_BASE_URL="), process.communicate()[1]
        yield line.strip().partition("=")[2]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def ask(url, key, *rounds):
    """The last answer of a conversation over several turns."""

    async def main():
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
            messages = []
            for question in rounds:
                messages.append({"role": "user", "content": question})
                answer = await api.chat.completions.create(model="any", messages=messages)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True) | {"role": "assistant"})
            return answer

    return asyncio.run(main())


@pytest.mark.slow
def test_a_session_over_http_is_what_the_engine_saw(recipe, tmp_path):
    with served(recipe, tmp_path / "sessions") as url:
        ask(url, "one", "Digit 1?", "Digit 2?")
        shown = json.load(urllib.request.urlopen(f"{url.removesuffix('/v1')}/sessions/one"))
    record = json.loads((tmp_path / "sessions" / "one.json").read_text())
    assert record == shown
    [segment] = record["segments"]
    tokens, mask = np.array(segment["tokens"], np.int32), np.array(segment["mask"])
    logprobs = np.array(segment["logprobs"], np.float32)
    starts = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
    assert len(starts) == 2
    config = tiny_run.config(recipe, **KEYS)
    model = assemble.load_model(config)
    state = assemble.fresh_state(config, model)
    engine = assemble.make_engine(config, model, assemble.policy_params(config, model, state.trainable), 0)

    async def again():
        """The engine, asked for the same by ids."""
        return [
            await engine.generate(Request("again", tokens[:start], (seed,), 8, config.rollout.temperature))
            for start, seed in zip(starts, seeds)
        ]

    seeds = [int(np.random.SeedSequence([config.run.seed, 0, i]).generate_state(1, np.uint32)[0]) for i in range(2)]
    for start, [answer] in zip(starts, asyncio.run(again())):
        end = start + len(answer.tokens)
        np.testing.assert_array_equal(tokens[start:end], answer.tokens)
        np.testing.assert_allclose(logprobs[start:end], answer.logprobs, atol=1e-4)


def test_names_that_are_no_files_and_names_that_are_taken_are_refused(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    sessions = Sessions(None, None, Limits(10, 5, 1.0, 0), tmp_path)
    for name, said in [("../x", "cannot name"), (".hidden", "cannot name"), ("a" * 200, "cannot"), ("old", "earlier")]:
        with pytest.raises(RequestInvalid, match=said):
            sessions.begin(name)


def test_limits_are_those_of_the_recipe(recipe):
    config = tiny_run.config(recipe, **KEYS, rollout__temperature=0.5)
    assert dataclasses.astuple(limits_of(config)) == (256, 8, 0.5, config.run.seed)


def test_the_chat_format_is_the_checkpoints(recipe):
    config = tiny_run.config(recipe)
    tokenizer = assemble.load_model(config).tokenizer
    ids = ChatFormat(tokenizer).begin([{"role": "user", "content": "Digit 1?"}], ())
    np.testing.assert_array_equal(ids, tokenizer.encode_prompt("Digit 1?"))

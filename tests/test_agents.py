"""Runs whose sessions are an outside agent's: a program that asks twice and prints what it was told last."""

import asyncio
import dataclasses
import sys

import numpy as np
import pytest

from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.graders import GraderPool
from rlx.envs.sources import check_source
from rlx.envs.tasks import build_tasks
from rlx.rollout.collect import Sampling, collect
from rlx.sessions.environments import Environments
from rlx.train import train
from tests import tiny_run
from tests.agents.speaking import Speaking
from tests.agents.test_outside import PROGRAM

KEYS = {
    "producer__session_token_limit": 200,
    "engine__context": 256,
    "learner__row_tokens": 256,
    "learner__row_targets": 0,
    "rollout__max_new_tokens": 4,
    "tasks__held_out": 2,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents")
    path = tiny_run.write(directory)
    text = path.read_text()
    source = (
        f'path={str(directory / "tasks.jsonl")!r}, environment="agent", agent=({sys.executable!r}, "-c", {PROGRAM!r})'
    )
    before = f"path={str(directory / 'tasks.jsonl')!r}"
    assert before in text
    text = text.replace("    return c", "    c.engine.prefill_buckets = (256,)\n    return c")
    path.write_text(text.replace(before, source))
    return path


def test_an_agents_result_is_graded_as_a_response(recipe):
    config = tiny_run.config(recipe, **KEYS)
    chat = load_chat_tokenizer(config.model.path, "", "", config.chat)
    task = build_tasks(config.tasks)[0][0]
    wrong = str(9 - int(task.answer))
    engine = Speaking(chat, ["hm", task.answer, "hm", wrong])

    async def main():
        with GraderPool(config.grader, ("number",)) as graders:
            async with Environments(config, chat, graders) as environments:
                sampling = Sampling(1, 20, 1.0, False, 0, 200, 60.0)
                return [g for n in range(2) for g in await collect(engine, environments, [(n, task)], sampling)]

    samples = [group.samples[0] for group in asyncio.run(main())]
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    for sample, request in zip(samples, engine.requests[1::2]):
        np.testing.assert_array_equal(sample.tokens[: len(request.prompt)], request.prompt)
    assert chat.written_out(samples[0].tokens[samples[0].mask]) == f"hm<|im_end|>{task.answer}<|im_end|>"


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_a_policy_is_trained_through_an_agent(recipe, lag):
    keys = KEYS | {"run__name": f"agent{lag}", "producer__max_policy_lag": lag, "learner__updates": 2}
    config = tiny_run.config(recipe, **keys, rollout__tasks_per_update=1, rollout__group_size=4)
    train(config)
    samples = tiny_run.records(config.run.path / "samples.jsonl")
    assert samples
    assert all(sample["grade"]["outcome"] == "graded" for sample in samples)


@pytest.mark.parametrize("environment, agent", [("agent", ()), ("", ("python", "agent.py"))])
def test_the_environment_and_its_command_go_together(recipe, environment, agent):
    source = tiny_run.config(recipe, **KEYS).tasks.sources["digits"]
    with pytest.raises(ValueError, match=r"tasks\.sources\.digits\.agent"):
        check_source("digits", dataclasses.replace(source, environment=environment, agent=agent))

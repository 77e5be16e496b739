"""Tasks in, graded groups out, with an engine and graders of fixed answers."""

import asyncio
import dataclasses
import itertools
from concurrent.futures import Future

import numpy as np
import pytest

from rlx.envs.grading import Grade, Outcome
from rlx.rollout import virtual
from rlx.rollout.collect import Sampling, check_begun, collect, sample_seeds
from rlx.rollout.engine import Completion, EngineError
from rlx.rollout.session import EnvironmentFailed, questions
from rlx.types import StopReason, Task, TopK, VersionSpan
from tests.rollout.scripted import Conversation, ScriptedEngine

SAMPLING = Sampling(group_size=3, max_new_tokens=8, temperature=0.7, zero_reward_truncated=False, seed=11)
TASKS = [(40 + i, Task(f"sums/{i}", "sums", question="?" * (i + 1), answer=str(i), grader="number")) for i in range(4)]


class Tokenizer:
    """A character is its code."""

    def encode_prompt(self, question):
        return np.array([ord(c) for c in question], np.int32)

    def decode(self, ids):
        return "".join(map(chr, ids))


class Graders:
    """The reward is the number of letters a; longer texts are graded sooner."""

    def __init__(self):
        self.graded = []

    def grade(self, task, text):
        future = Future()
        self.graded.append((task.id, text))
        grade = Grade(float(text.count("a")), text, "", 0.5, Outcome.GRADED)
        asyncio.get_running_loop().call_later(0.002 / len(text), future.set_result, grade)
        return future


class Engine:
    """The first sample is "a", the second "ab" and cut, the third "aba". The last request is answered first."""

    def __init__(self, fail_at=None):
        self.requests, self.fail_at, self.cancelled = [], fail_at, []
        self.answered = [asyncio.Event() for _ in TASKS]

    async def generate(self, request):
        self.requests.append(request)
        number = len(self.requests)
        try:
            for event in self.answered[number:]:
                await event.wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if number == self.fail_at:
            raise EngineError(f"request {request.id}: cannot be served")
        self.answered[number - 1].set()
        return [self.completion(i) for i in range(len(request.seeds))]

    def completion(self, i):
        tokens = np.array([ord(c) for c in "abab"[: i + 1]], np.int32)
        logprobs = -np.arange(1, i + 2, dtype=np.float32)
        head = TopK(np.stack([tokens, tokens + 1], axis=1), np.stack([logprobs, logprobs - 1], axis=1))
        spans = (VersionSpan(5, 0, 1),) + ((VersionSpan(6, 1, i + 1),) if i else ())
        stop = StopReason.LENGTH if i == 1 else StopReason.STOP
        return Completion(tokens, logprobs, head, spans, stop)


def run(sampling=SAMPLING, engine=None):
    engine = engine or Engine()
    return asyncio.run(collect(engine, questions(Graders(), Tokenizer()), TASKS, sampling)), engine


def test_groups_and_samples_are_in_the_order_asked_for():
    """Though the engine answers the last first, and graders the longest."""
    groups, engine = run()
    assert [g.task for g in groups] == [task for _, task in TASKS]
    assert [[s.group for s in g.samples] for g in groups] == [[number] * 3 for number, _ in TASKS]
    assert all([s.index for s in g.samples] == [0, 1, 2] for g in groups)
    assert all([s.text for s in g.samples] == ["a", "ab", "aba"] for g in groups)
    assert all([s.reward for s in g.samples] == [1, 1, 2] for g in groups)
    assert [r.id for r in engine.requests] == [f"{number}:{task.id}" for number, task in TASKS]


def test_requests_carry_the_sampling_and_seeds_of_their_own():
    _, engine = run()
    assert {(r.max_new_tokens, r.temperature) for r in engine.requests} == {(8, 0.7)}
    assert [r.seeds for r in engine.requests] == [sample_seeds(11, number, 3) for number, _ in TASKS]


def test_what_the_engine_said_is_at_the_tokens_own_places():
    (_, second, _) = run()[0][1].samples
    np.testing.assert_array_equal(second.tokens, [63, 63, 97, 98])
    np.testing.assert_array_equal(second.mask, [False, False, True, True])
    np.testing.assert_array_equal(second.logprobs, [0, 0, -1, -2])
    assert second.tokens.dtype == np.int32
    assert second.logprobs.dtype == np.float32
    assert second.version_spans == (VersionSpan(5, 2, 3), VersionSpan(6, 3, 4))
    assert second.oldest_version == 5
    assert second.head.ids.shape == (2, 2)
    assert second.grade == {"reward": 1.0, "extracted": "ab", "detail": "", "seconds": 0.5, "outcome": "graded"}


@pytest.mark.parametrize("zeroed, rewards", [(False, [1, 1, 2]), (True, [1, 0, 2])])
def test_truncated_responses_may_count_as_failed(zeroed, rewards):
    """The grade itself stays as it was."""
    groups, _ = run(dataclasses.replace(SAMPLING, zero_reward_truncated=zeroed))
    assert [s.reward for s in groups[0].samples] == rewards
    assert groups[0].samples[1].grade["reward"] == 1


def test_seeds_are_stable_and_all_different():
    """The same in every process and on every machine; a longer group begins with the seeds of a shorter."""
    assert sample_seeds(0, 0, 3) == (2968811710, 3677149159, 745650761)
    assert sample_seeds(0, 0, 8)[:3] == sample_seeds(0, 0, 3)
    every = [s for seed in range(5) for group in range(50) for s in sample_seeds(seed, group, 8)]
    assert len(set(every)) == len(every)
    assert all(0 <= s < 2**32 for s in every)


def test_an_engines_error_comes_as_it_is_and_ends_the_others():
    engine = Engine(fail_at=2)
    with pytest.raises(EngineError, match="41:sums/1: cannot be served"):
        run(engine=engine)
    assert engine.cancelled == [1]  # 3 and 4 were answered before


def test_a_cancelled_collection_is_cancelled_whatever_its_engine_says_of_it():
    """Not failed: a signal to stop is no error."""

    class Says:
        async def generate(self, request):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as cancelled:
                raise EngineError("cancelled", reason="cancelled") from cancelled

    async def work():
        job = asyncio.create_task(collect(Says(), questions(Graders(), Tokenizer()), TASKS, SAMPLING))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(work())


def test_cancelling_a_collection_cancels_its_requests():
    engine = Engine()
    engine.answered.append(asyncio.Event())  # of a fifth request that nobody asks

    async def work():
        job = asyncio.create_task(collect(engine, questions(Graders(), Tokenizer()), TASKS, SAMPLING))
        while len(engine.requests) < 4:
            await asyncio.sleep(0)
        job.cancel()
        await job

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert sorted(engine.cancelled) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"logprobs": np.array([np.nan], np.float32)}, "not 1 finite numbers"),
        ({"tokens": np.zeros(0, np.int32)}, "0 tokens"),
        ({"version_spans": (VersionSpan(5, 0, 2),)}, "do not cover"),
        ({"head": TopK(np.array([[97, 97]], np.int32), np.array([[-1, -2]], np.float32))}, "an id twice"),
        ({"head": TopK(np.array([[97, 98]], np.int32), np.array([[-0.5, -2]], np.float32))}, "a shift by a token"),
    ],
)
def test_an_answer_that_is_not_consistent_stops_here(change, words):
    class Broken(Engine):
        def completion(self, i):
            return dataclasses.replace(super().completion(0), **change)

    with pytest.raises(EngineError, match=words):
        run(engine=Broken())


# ---------------------------------------------------------------------------------------------------- several turns


class Slow(Conversation):
    """The later a sample's number, the sooner its environment answers."""

    made = 0

    def __init__(self, task, turns):
        Slow.made += 1
        super().__init__(task, turns=turns, seconds=0.1 / Slow.made)
        self.closed = 0

    async def close(self):
        self.closed += 1


def talk(sampling, turns=lambda number: 3):
    """(groups, engine, environments) of sessions on virtual time."""
    Slow.made, environments, engine = 0, [], ScriptedEngine(lengths=(2, 4), admission=100)

    def make(task):
        environments.append(Slow(task, turns(len(environments))))
        return environments[-1]

    return virtual.run(collect(engine, make, TASKS, sampling)), engine, environments


def test_later_responses_are_asked_for_in_a_fixed_order_however_long_environments_take():
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=8)
    _, engine, environments = talk(sampling)
    later = [r.id for r in engine.requests[len(TASKS) :]]
    assert later == [f"{n}:{t.id}:{i}:{turn}:0" for turn in (1, 2) for n, t in TASKS for i in range(3)]
    assert len({r.seeds for r in engine.requests}) == len(engine.requests)
    assert all(e.closed == 1 for e in environments)


def test_sessions_that_end_early_do_not_hold_the_others_up():
    groups, engine, _ = talk(SAMPLING, turns=lambda number: 1 + number % 4)
    assert [len(s.version_spans) for g in groups for s in g.samples] == [1 + n % 4 for n in range(12)]
    assert len(engine.requests) == len(TASKS) + sum(n % 4 for n in range(12))


def test_a_session_limit_ends_sessions_that_are_graded():
    groups, engine, _ = talk(dataclasses.replace(SAMPLING, session_token_limit=6))
    stops = {s.stop_reason for g in groups for s in g.samples}
    assert stops == {StopReason.SESSION_LIMIT}
    assert all(s.grade["outcome"] == "graded" for g in groups for s in g.samples)
    assert len(engine.requests) == len(TASKS)


@pytest.mark.parametrize("at_once, waves", [(0, 1), (3, 4), (7, 2), (1, 4)])
def test_no_more_sessions_are_open_than_there_is_room_for(at_once, waves):
    sampling = dataclasses.replace(SAMPLING, sessions_at_once=at_once)
    groups, engine, _ = talk(sampling)
    assert [g.task for g in groups] == [task for _, task in TASKS]
    first = [i for i, r in enumerate(engine.requests) if r.id.count(":") == 1]
    assert 1 + sum(b - a > 1 for a, b in itertools.pairwise(first)) == waves
    alone, _, _ = talk(SAMPLING)
    for group, other in zip(groups, alone, strict=True):
        for a, b in zip(group.samples, other.samples, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)


def test_a_sample_whose_environment_fails_is_no_verdict():
    class Fails(Slow):
        async def step(self, response):
            raise OSError("broken")

    engine = ScriptedEngine(lengths=(2, 4), admission=100)
    groups = virtual.run(collect(engine, lambda task: Fails(task, 2), TASKS[:1], SAMPLING))
    for sample in groups[0].samples:
        assert sample.grade["outcome"] == Outcome.ERROR
        assert "environment_error: environment: OSError: broken" in sample.grade["detail"]
        assert sample.num_written


class Unwilling(Slow):
    """Where it `fails`, it does not begin."""

    def __init__(self, task, fails):
        super().__init__(task, 2)
        self.fails = fails

    async def reset(self):
        if self.fails:
            raise OSError("no place")
        return await super().reset()


def begin(fails, tasks=1, **changes):
    """(groups, engine, environments) where the n-th environment that is made fails if `fails(n)`."""
    made, engine = [], ScriptedEngine(lengths=(2, 4), admission=100)

    def make(task):
        made.append(Unwilling(task, fails(len(made))))
        return made[-1]

    sampling = dataclasses.replace(SAMPLING, **changes)
    return virtual.run(collect(engine, make, TASKS[:tasks], sampling)), engine, made


def test_a_session_whose_environment_begins_at_last_is_as_any():
    groups, _, made = begin(lambda n: n in (0, 4, 5), tasks=2)
    well, _, _ = begin(lambda n: False, tasks=2)
    assert len(made) == 9
    assert all(environment.closed == 1 for environment in made)
    for sample, other in zip([s for g in groups for s in g.samples], [s for g in well for s in g.samples], strict=True):
        np.testing.assert_array_equal(sample.tokens, other.tokens)


def test_a_session_whose_environment_never_begins_is_no_verdict_and_the_others_go_on():
    groups, _, made = begin(lambda n: n in (1, 5), tasks=3, retries=0)
    well, _, _ = begin(lambda n: False, tasks=3)
    samples, others = ([s for g in groups for s in g.samples] for groups in (groups, well))
    assert [s.index for s in samples] == [0, 1, 2] * 3
    assert all(environment.closed == 1 for environment in made)
    for n, (sample, other) in enumerate(zip(samples, others, strict=True)):
        assert (sample.grade["outcome"] == Outcome.ERROR) == (n in (1, 5))
        assert len(sample.tokens) == (0 if n in (1, 5) else len(other.tokens))
        np.testing.assert_array_equal(sample.tokens, other.tokens[: len(sample.tokens)])
    assert "environment_error: environment: OSError: no place" in samples[1].grade["detail"]
    check_begun(groups)


def test_where_nothing_begins_it_is_said():
    groups, engine, made = begin(lambda n: True, tasks=2, retries=2)
    assert (len(engine.requests), len(made)) == (0, 2 * 3 * 3)
    with pytest.raises(
        EnvironmentFailed, match="no session of 6 began: environment_error: environment: OSError: no pl"
    ):
        check_begun(groups)


def test_no_more_gradings_run_than_there_are_graders_and_their_limit_is_their_own():
    running, most = 0, 0

    class Judged(Slow):
        async def grade(self, transcript):
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            await asyncio.sleep(4.0)
            running -= 1
            return await super().grade(transcript)

    sampling = dataclasses.replace(SAMPLING, gradings=2, environment_timeout_s=10.0)
    engine = ScriptedEngine(lengths=(2, 4), admission=100)
    groups = virtual.run(collect(engine, lambda task: Judged(task, 2), TASKS, sampling))
    assert most == 2
    assert {s.grade["outcome"] for g in groups for s in g.samples} == {Outcome.GRADED}

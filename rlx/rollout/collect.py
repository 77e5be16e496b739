"""Tasks in, graded groups out: every sample of every task is asked of the engine and judged.

The synchronous form: all requests of a collection are sent at once and in a fixed order, and it returns when the last
is graded. Each request's seed is a function of the run's seed, the group and the sample, so the same run asks for the
same samples whatever was interrupted in between.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from rlx.envs.grading import Grade
from rlx.rollout.engine import Completion, Engine, EngineError, Request, check_completion, raise_if_cancelled
from rlx.rollout.session import Graders, Tokenizer
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import Group, Sample, Task


@dataclasses.dataclass(frozen=True)
class Sampling:
    group_size: int
    max_new_tokens: int
    temperature: float
    zero_reward_truncated: bool
    seed: int


def sample_seeds(seed: int, group: int, count: int) -> tuple[int, ...]:
    """uint32 seeds of a group's samples, a hash of (seed, group, index)."""
    return tuple(int(s) for s in np.random.SeedSequence([seed, group]).generate_state(count, np.uint32))


async def collect(
    engine: Engine,
    graders: Graders,
    tokenizer: Tokenizer,
    tasks: Sequence[tuple[int, Task]],
    sampling: Sampling,
) -> list[Group]:
    """One group for each (group number, task). Raises EngineError where the engine cannot serve."""
    try:
        async with asyncio.TaskGroup() as running:
            jobs = [
                running.create_task(_group(engine, graders, tokenizer, task, number, sampling))
                for number, task in tasks
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [job.result() for job in jobs]


async def _group(
    engine: Engine, graders: Graders, tokenizer: Tokenizer, task: Task, group: int, sampling: Sampling
) -> Group:
    prompt = tokenizer.encode_prompt(task.question)
    request = Request(
        id=f"{group}:{task.id}",
        prompt=prompt,
        seeds=sample_seeds(sampling.seed, group, sampling.group_size),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
    )
    try:
        completions = await engine.generate(request)
    except EngineError as error:
        raise_if_cancelled(error)  # a resumed run asks for the same samples again
        raise
    if len(completions) != sampling.group_size:
        raise EngineError(
            f"request {request.id}: {len(completions)} samples came, {sampling.group_size} were asked for"
        )
    for completion in completions:
        check_completion(request, completion)
    texts = [tokenizer.decode(c.tokens) for c in completions]
    grades = await asyncio.gather(*(asyncio.wrap_future(graders.grade(task, text)) for text in texts))
    samples = [
        make_sample(task, group, i, prompt, *judged, sampling=sampling)
        for i, judged in enumerate(zip(completions, texts, grades, strict=True))
    ]
    return Group(task, tuple(samples))


def make_sample(
    task: Task,
    group: int,
    index: int,
    prompt: np.ndarray,
    completion: Completion,
    text: str,
    grade: Grade,
    *,
    sampling: Sampling,
) -> Sample:
    """Prompt and response as one sequence; what the engine said of the response moves to its tokens' own indices."""
    transcript = Transcript()
    transcript.observe(prompt)
    transcript.write(completion)
    return transcript.sample(
        task,
        group,
        index,
        Verdict(grade, text),
        completion.stop_reason,
        zero_truncated=sampling.zero_reward_truncated,
    )

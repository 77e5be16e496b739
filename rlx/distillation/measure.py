"""How large and how sharp a signal is, on states that a target visits: its own attempts at its tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx import assemble
from rlx.config.schema import Config
from rlx.data.trajectories import trajectories
from rlx.distillation.cache import ScoreCache
from rlx.distillation.frozen import Pair
from rlx.distillation.policies import Policies
from rlx.envs.graders import GraderPool
from rlx.envs.tasks import build_tasks
from rlx.parallel import runtime
from rlx.prompt_checks import check_prompts
from rlx.proxy.signal import Signal
from rlx.rollout.collect import collect
from rlx.rollout.fates import graded
from rlx.sessions.environments import Environments
from rlx.types import Group

CARRIES = 0.1  # nats: a token whose |alpha log ratio| is above carries the signal
OWN_SEED = 5  # beside those of training, evaluation and `rlx edge`


def measure(config: Config, signal: Signal, tasks: int) -> dict[str, Any]:
    """Attempts of config's model at its first `tasks` tasks, scored under the signal: what `figures` makes of them.

    Raises VocabularyError for a conflicting token id, ValueError or OSError for models or tasks that cannot be used.
    """
    runtime.use_compilation_cache(config.run.compilation_cache)
    chosen = build_tasks(config.tasks)[0][:tasks]
    model = assemble.load_model(config)
    check_prompts(config, model.tokenizer, chosen)
    count = len(chosen) * config.rollout.group_size
    step = assemble.step_config(config, model.arch, count)
    packing = assemble.packing_config(config, count, head=0)
    policies = Policies(model, step, packing, config.model.dtype, ScoreCache(config.frozen.cache))
    # Before anything is generated: what cannot be scored is refused.
    pair = Pair(policies.add(signal.expert), policies.add(signal.base), signal.alpha)
    state = assemble.fresh_state(config, model)
    engine = assemble.make_engine(config, model, assemble.policy_params(config, model, state.trainable), 0)
    sampling = dataclasses.replace(assemble.sampling(config), seed=2 * config.run.seed + OWN_SEED)

    async def job(environments: Environments) -> list[Group]:
        async with environments:
            return await collect(engine, environments, list(enumerate(chosen)), sampling)

    with GraderPool(config.grader, sorted({t.grader for t in chosen})) as graders:
        groups = asyncio.run(job(Environments(config, model.tokenizer, graders)))
    samples = [s for g in groups for s in graded(g).samples if s.mask.any()]
    every = trajectories(samples, {(s.group, s.index): 0.0 for s in samples}, 0, with_head=False)
    with contextlib.closing(policies.cache):
        scored = pair.deltas(lambda policy: policies.score(policy, every), "logprobs")
    deltas = [np.where(policies.usable(t), d, 0.0) for t, d in zip(every, scored, strict=True)]
    return figures(deltas, [s.reward for s in samples], [s.group for s in samples])


def figures(deltas: Sequence[np.ndarray], rewards: Sequence[float], groups: Sequence[int]) -> dict[str, Any]:
    """Of log expert - log base at each written token of each sample, times alpha.

    abs_mean: mean |Δ|, nats a token. carrying_share: tokens with |Δ| above 0.1 nats. agreement: over pairs of samples
    of one task with different rewards, how often the sum of Δ is larger for the better one (ties count a half): 0.5 is
    chance, None where there is no such pair.
    """
    flat = np.concatenate(list(deltas)) if deltas else np.zeros(0)
    totals = [float(d.sum()) for d in deltas]
    wins = []
    for i, j in itertools.combinations(range(len(totals)), 2):
        if groups[i] == groups[j] and rewards[i] != rewards[j]:
            better, worse = (i, j) if rewards[i] > rewards[j] else (j, i)
            wins.append(0.5 * (np.sign(totals[better] - totals[worse]) + 1))
    return {
        "samples": len(totals),
        "tokens": int(flat.size),
        "abs_mean": float(np.abs(flat).mean()) if flat.size else 0.0,
        "carrying_share": float((np.abs(flat) > CARRIES).mean()) if flat.size else 0.0,
        "largest": float(np.abs(flat).max()) if flat.size else 0.0,
        "agreement": float(np.mean(wins)) if wins else None,
        "pairs": len(wins),
        "pass_rate": float(np.mean(rewards)) if rewards else 0.0,
    }

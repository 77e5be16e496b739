"""Random trajectories of the tiny model's vocabulary, layouts to pack them in, and configurations of an update."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlx.assemble import device_batch
from rlx.config.schema import LearnerConfig, LoraConfig
from rlx.data.packing import PackedBatch, PackingConfig, Trajectory, pack
from rlx.learner.step import Batch, StepConfig
from rlx.types import TopK
from tests.oracle_adapter import base_objective
from tests.tiny_model import ARCH

HEAD = 4
SIZES = [(10, 5), (20, 11), (6, 2), (14, 9), (3, 2), (11, 1), (5, 0)]  # (tokens, targets)
GROUP, SHARED = (0, 1, 3), 4  # of these trajectories, and how many tokens they begin with
LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
LEARNER = LearnerConfig(
    updates=10,
    learning_rate=1e-2,
    schedule="constant",
    warmup_updates=0,
    final_learning_rate_fraction=0.0,
    b1=0.9,
    b2=0.99,
    eps=1e-6,
    weight_decay=0.1,
    max_grad_norm=1.0,
    row_tokens=24,
    row_targets=12,
    micro_batch_rows=2,
    prefix_sharing=True,
    row_samples=0,
    row_prefix=0,
    nonfinite_limit=3,
    logprob_implementation="auto",
    head_precision="auto",
)
CENTRED = StepConfig(
    arch=ARCH,
    objective=base_objective(
        loss="tis",
        tis_cap=2.0,
        centering="tis",
        aggregation="sequence_mean_token_mean",
        entropy_coefficient=0.01,
    ),
    adapter_scale=2.0,
    temperature=0.8,
    remat="products",
    dtype="float32",
    logprob_implementation=None,
    num_sequences=16,
)
PLAIN = dataclasses.replace(
    CENTRED,
    objective=base_objective(loss="reinforce", aggregation="token_mean"),
    adapter_scale=None,
    temperature=1.0,
    remat="none",
)


def trajectory(i: int, size: tuple[int, int]) -> Trajectory:
    """Targets anywhere but at the first token; a sampler whose heads hold the written token every second time."""
    tokens, targets = size
    rng = np.random.default_rng(100 + i)
    ids = rng.integers(0, ARCH.vocab_size, tokens).astype(np.int32)
    mask = np.zeros(tokens, bool)
    mask[1 + rng.choice(tokens - 1, targets, replace=False)] = True
    candidates = np.stack([rng.choice(ARCH.vocab_size, HEAD, replace=False) for _ in ids])
    candidates = np.sort(rng.uniform(-6, -2, (tokens, HEAD)))[:, ::-1], candidates
    logprobs = rng.uniform(-7, -3, tokens)
    hit = rng.random(tokens) < 0.5
    candidates[1][hit, 0], logprobs[hit] = ids[hit], candidates[0][hit, 0]
    return Trajectory(
        tokens=ids,
        mask=mask,
        advantage=float(rng.normal()),
        logprobs=logprobs.astype(np.float32),
        ages=rng.integers(0, 5, tokens).astype(np.int32),
        head=TopK(candidates[1][mask].astype(np.int32), candidates[0][mask].astype(np.float32)),
    )


def with_prefix(chosen: list[Trajectory], tokens: np.ndarray, group: int) -> list[Trajectory]:
    """The trajectories behind a prompt that they share."""
    blank = np.zeros(len(tokens))
    return [
        dataclasses.replace(
            t,
            tokens=np.concatenate([tokens, t.tokens]).astype(np.int32),
            mask=np.concatenate([blank, t.mask]).astype(bool),
            logprobs=np.concatenate([blank, t.logprobs]).astype(np.float32),
            ages=np.concatenate([blank, t.ages]).astype(np.int32),
            group=group,
        )
        for t in chosen
    ]


def _trajectories() -> list[Trajectory]:
    found = [trajectory(i, (n - SHARED if i in GROUP else n, k)) for i, (n, k) in enumerate(SIZES)]
    prompt = np.random.default_rng(0).integers(0, ARCH.vocab_size, SHARED)
    behind = iter(with_prefix([found[i] for i in GROUP], prompt, group=7))
    return [next(behind) if i in GROUP else t for i, t in enumerate(found)]


TRAJECTORIES = _trajectories()
LAYOUTS = {
    "narrow": PackingConfig(row_tokens=24, row_targets=12, rows=2, capacity=5, head_size=HEAD),
    "one row": PackingConfig(row_tokens=80, row_targets=40, rows=1, capacity=2, head_size=HEAD),
    "at once": PackingConfig(row_tokens=32, row_targets=32, rows=8, capacity=1, head_size=HEAD),
}


def packed(chosen: list[Trajectory], layout: str = "narrow", head: bool = True) -> PackedBatch:
    config = LAYOUTS[layout]
    return pack(chosen, config if head else dataclasses.replace(config, head_size=0))


def batch(chosen: list[Trajectory] = TRAJECTORIES, layout: str = "narrow", head: bool = True) -> Batch:
    return device_batch(packed(chosen, layout, head))

"""What an update learns from beside rewards: the scores of its samples under a reference, teachers or signals.

    reference   the policy that the run begins with; with LoRA it is the base, which is in memory anyway
    teacher     log teacher (OPD)
    signal      log expert - log base, one or several (Proxy OPD)

A trained token costs one forward pass of each of these policies that differs from the others: at most two a signal, and
one for the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from rlx import assemble
from rlx.algos.distill import combine_signals
from rlx.algos.kl import penalised_rewards
from rlx.config.errors import ConfigError
from rlx.config.schema import Config
from rlx.data.packing import FrozenArray, PackingConfig, Trajectory
from rlx.data.trajectories import trajectories
from rlx.distillation.cache import ScoreCache, Scores
from rlx.distillation.policies import Policies, Policy, current
from rlx.learner.step import StepConfig
from rlx.models.spec import Params
from rlx.proxy.signal import check_models, read_part, read_signal
from rlx.rollout.fates import graded
from rlx.types import Group

FULL_BYTES = 2 << 30  # that log-probs of all ids at the targets of a micro-batch may take
LEAST_PADDED = 256

Scoring = Callable[[Policy], list[Scores]]


class Pair(NamedTuple):
    """A signal in memory. base None: a teacher, whose log-prob is the signal itself."""

    expert: Policy
    base: Policy | None
    alpha: float

    def deltas(self, of: Scoring, name: str) -> list[np.ndarray]:
        """alpha (log expert - log base) by trajectory; name: of the scores, "logprobs" or "candidates"."""
        experts = [s[name] for s in of(self.expert)]
        if self.base is None:
            return [self.alpha * expert for expert in experts]
        return [self.alpha * (expert - s[name]) for expert, s in zip(experts, of(self.base), strict=True)]


@dataclasses.dataclass(eq=False)
class Frozen:
    """The policies of a run that do not move."""

    config: Config
    policies: Policies
    reference: Policy | None
    pairs: tuple[Pair, ...]

    @property
    def forwards_per_token(self) -> int:
        """Policies that score each trained token."""
        used = [self.reference] if self.reference else []
        used += [policy for pair in self.pairs for policy in (pair.expert, pair.base) if policy]
        return len({policy.hash for policy in used})

    def arrays(self) -> tuple[FrozenArray, ...]:
        """What `scored` gives every trajectory."""
        distill, size = self.config.objective.distill, self.policies.model.arch.vocab_size
        found = [FrozenArray("reference_logprobs", 0, "float32")] if self.reference else []
        if distill.form == "off":
            return tuple(found)
        found.append(FrozenArray("signal", 0, "float32"))
        if distill.filter == "agreeing":
            found.append(FrozenArray("teacher_logprobs", 0, "float32"))
        if distill.calibration == "overlap":
            found.append(FrozenArray("overlap", 0, "float32"))
        partly = self.policies.known is not None
        found += [FrozenArray("known", 0, "bool")] if partly else []
        width = {"sampled": 0, "top_k": self.config.rollout.head_size, "full": size}[distill.form]
        if width:
            names = ["head_signal", *(["head_reference_logprobs"] if self.reference else [])]
            found += [FrozenArray(name, width, "float32") for name in names]
            found += [FrozenArray("head_known", width, "bool")] if partly else []
        return tuple(found)

    def scored(self, chosen: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories of an update with what frozen policies say of their targets."""
        distill = self.config.objective.distill
        # A penalty on the KL is on every token.
        penalised = self.config.objective.kl_coefficient > 0
        only_rewarded = distill.form != "off" and distill.filter == "rewarded" and not penalised
        needed = [t for t in chosen if t.mask.any() and (t.advantage > 0 or not only_rewarded)]
        by_policy: dict[str, list[Scores]] = {}

        def of(policy: Policy) -> list[Scores]:
            if policy.hash not in by_policy:
                by_policy[policy.hash] = self.policies.score(policy, needed)
            return by_policy[policy.hash]

        parts: dict[str, list[np.ndarray]] = {}
        if self.reference is not None:
            parts["reference_logprobs"] = [s["logprobs"] for s in of(self.reference)]
        if self.pairs:
            parts |= self._signals(of, needed)
        names = self.arrays()
        by_trajectory = {id(t): {a.name: parts[a.name][i] for a in names} for i, t in enumerate(needed)}
        return [
            dataclasses.replace(t, frozen=by_trajectory.get(id(t)) or _zeros(names, int(t.mask.sum()))) for t in chosen
        ]

    def _signals(self, of: Scoring, needed: list[Trajectory]) -> dict[str, list[np.ndarray]]:
        distill, known = self.config.objective.distill, self.policies.known
        lengths = [int(t.mask.sum()) for t in needed]
        experts = of(self.pairs[0].expert)
        parts = {
            "signal": self._combined(of, "logprobs", lengths),
            "teacher_logprobs": [s["logprobs"] for s in experts],
        }
        if distill.form in ("top_k", "full"):
            parts["head_signal"] = self._combined(of, "candidates", lengths)
            if self.reference is not None:
                parts["head_reference_logprobs"] = [s["candidates"] for s in of(self.reference)]
        if distill.calibration == "overlap":
            parts["overlap"] = [_overlap(t, s["likeliest"]) for t, s in zip(needed, experts)]
        if known is not None:
            parts["known"] = [self.policies.usable(t) for t in needed]
            if distill.form != "sampled":
                heads = [known[None] if distill.form == "full" else known[_head_ids(t)] for t in needed]
                parts["head_known"] = [head & usable[:, None] for head, usable in zip(heads, parts["known"])]
        return parts

    def _combined(self, of: Scoring, name: str, lengths: list[int]) -> list[np.ndarray]:
        """All signals as one, by trajectory."""
        each = [np.concatenate(pair.deltas(of, name) or [np.zeros(0)]) for pair in self.pairs]
        flat = np.stack(each).astype(np.float32)
        total = flat[0] * self.config.objective.distill.weights[0]
        if len(self.pairs) > 1:
            total = np.asarray(_combine(self.config.objective.distill, _padded(flat, 1)))[: flat.shape[1]]
        return np.split(total, np.cumsum(lengths)[:-1]) if lengths else []

    def penalised(
        self, groups: Sequence[Group], rewards: np.ndarray, trainable: Params, step: StepConfig
    ) -> np.ndarray:
        """Rewards, in the order of `advantage_inputs`, less the KL of each sample to the reference: kl_placement =
        'reward'. The policy is `trainable`, as it is before the update."""
        assert self.reference is not None
        samples = [s for g in groups for s in graded(g).samples]
        every = trajectories(samples, {(s.group, s.index): 0.0 for s in samples}, 0, with_head=False)
        fitting = {i: t for i, t in enumerate(every) if len(t.tokens) <= self.policies.packing.row_tokens}
        policy = current(self.reference, trainable, self.policies.model.params, step)
        own, reference = (self.policies.score(p, list(fitting.values())) for p in (policy, self.reference))
        owners = np.repeat(np.array(list(fitting), np.int32), [int(t.mask.sum()) for t in fitting.values()])
        flat = [np.concatenate([s["logprobs"] for s in scores] or [np.zeros(0)]) for scores in (own, reference)]
        arrays = [_padded(x, 0) for x in (*flat, np.ones(len(owners), bool), owners)]
        return np.asarray(_penalise(self.config.objective, rewards, *arrays))

    def scalars(self, trained_tokens: int) -> dict[str, float]:
        """Metrics since the last call. Each trained token was scored by no policy twice."""
        scored, self.policies.forwards = self.policies.forwards, 0
        most = self.forwards_per_token * trained_tokens
        # A KL in the reward asks for all graded samples, and of the policy itself too.
        if not self.config.objective.penalises_rewards and scored > most:
            raise AssertionError(f"{scored} tokens were scored, {trained_tokens} trained ones need at most {most}")
        return {"distill/forwards_per_token": scored / trained_tokens if trained_tokens else 0.0}

    def close(self) -> None:
        self.policies.cache.close()


def open_frozen(config: Config, model: assemble.Model, step: StepConfig, packing: PackingConfig) -> Frozen | None:
    """The frozen policies that `config` asks for, None where it asks for none.

    Raises:
      ConfigError: a combination that is not run. SignalError: a signal that is damaged or whose models have changed.
      VocabularyError: a conflicting token id. ValueError, OSError: models that cannot be used.
    """
    objective = config.objective
    distill = objective.distill
    if distill.form == "off" and not objective.needs_reference:
        return None
    _refuse(config, model, packing)
    candidates = packing.head_size if distill.form == "top_k" else 0
    scoring = dataclasses.replace(packing, head_size=candidates, routes=None, balance_experts=False, frozen=())
    top = config.rollout.head_size if distill.form != "off" and distill.calibration == "overlap" else 0
    policies = Policies(model, step, scoring, config.model.dtype, ScoreCache(config.frozen.cache), top)
    # Before anything else: whoever has the same weights shares these arrays.
    reference = policies.add_target(read_part(config.model.path)) if objective.needs_reference else None
    pairs: list[Pair] = []
    if distill.form != "off" and distill.signal == "teacher":
        pairs = [Pair(policies.add(read_part(path)), None, 1.0) for path in config.frozen.teachers]
    elif distill.form != "off":
        for path in config.frozen.signals:
            signal = read_signal(path)
            check_models(signal)
            pairs.append(Pair(policies.add(signal.expert), policies.add(signal.base), signal.alpha))
    if reference is None:
        policies.model = dataclasses.replace(model, params={})
    return Frozen(config, policies, reference, tuple(pairs))


def _refuse(config: Config, model: assemble.Model, packing: PackingConfig) -> None:
    if config.objective.needs_reference and config.sft.steps:
        raise ConfigError(
            f"config.sft.steps = {config.sft.steps}: the reference is the policy that the run begins with, model.path; "
            "run `rlx sft` first, begin with what it has written, and set this to 0"
        )
    if jax.process_count() > 1:
        raise ConfigError(
            f"config.objective: {jax.process_count()} processes train, and frozen policies score in one; train in one "
            "process, or without kl_coefficient and distill.form"
        )
    size = packing.rows * packing.row_targets * model.arch.vocab_size * 4
    if config.objective.distill.form == "full" and size > FULL_BYTES:
        raise ConfigError(
            f"config.objective.distill.form = 'full': log-probs of all {model.arch.vocab_size} ids at "
            f"{packing.rows * packing.row_targets} targets take {size / 2**30:.1f} GiB a policy; set 'top_k'"
        )


_combine = jax.jit(combine_signals, static_argnums=0)
_penalise = jax.jit(penalised_rewards, static_argnums=0)


def _padded(x: np.ndarray, axis: int) -> np.ndarray:
    """With zeros up to a power of two, so that few shapes are compiled."""
    size = max(LEAST_PADDED, 1 << max(x.shape[axis] - 1, 0).bit_length())
    widths = [(0, size - x.shape[axis]) if i == axis else (0, 0) for i in range(x.ndim)]
    return np.pad(x, widths)


def _overlap(trajectory: Trajectory, likeliest: np.ndarray) -> np.ndarray:
    """|top-K of the expert ∩ the sampler's top-K| / K of each target."""
    return (likeliest[:, :, None] == _head_ids(trajectory)[:, None, :]).any(-1).mean(-1).astype(np.float32)


def _head_ids(trajectory: Trajectory) -> np.ndarray:
    assert trajectory.head is not None
    return trajectory.head.ids


def _zeros(arrays: Sequence[FrozenArray], targets: int) -> dict[str, np.ndarray]:
    return {a.name: np.zeros((targets, a.candidates) if a.candidates else targets, a.dtype) for a in arrays}

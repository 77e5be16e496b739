"""Frozen policies in memory, and what they say of trajectories. The same weights are held, and asked, once.

A policy is a model, or an adapter beside one. Base and expert that differ by an adapter share the model's arrays; two
roles whose weights are equal by content (a proxy's base that is the reference, several signals of one base) are one
policy.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx import assemble
from rlx.config.errors import ConfigError
from rlx.data.packing import PackingConfig, Trajectory, pack
from rlx.distillation.cache import ScoreCache, Scores
from rlx.envs.vocabulary import read_vocabulary
from rlx.learner.frozen import SharedIds, frozen_stats, scoring_config
from rlx.learner.step import StepConfig
from rlx.models import hf, peft
from rlx.models.lora import adapter_scale, adapter_specs
from rlx.models.placed import shardings
from rlx.models.sharded import load_sharded
from rlx.models.spec import Architecture, Params, param_specs
from rlx.models.transformer import prefix_sharing_unsupported_reason
from rlx.proxy.signal import Part
from rlx.proxy.vocabulary import shared_ids, vocabulary_hash


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A frozen policy as `frozen_stats` takes it."""

    hash: str  # "" = of weights that change, which nothing may be kept of
    step: StepConfig
    trainable: Params  # the adapter, or every parameter where there is none
    frozen: Params  # the parameters below an adapter
    shared: SharedIds | None
    ids_hash: str  # of `shared`, "" = None
    packing: PackingConfig


@dataclasses.dataclass(eq=False)
class Policies:
    """Loads policies for scoring beside a target, and scores.

    Args:
      model: the target.
      step, packing: of its update; `packing` with the candidates that are to be scored, head_size 0 for none.
      top: likeliest ids to look for at each target, 0 = none.
    """

    model: assemble.Model
    step: StepConfig
    packing: PackingConfig
    dtype: str
    cache: ScoreCache
    top: int = 0
    forwards: int = 0  # tokens scored, summed over policies, since `reset`
    models: dict[str, tuple[Architecture, Params]] = dataclasses.field(default_factory=dict)
    policies: dict[str, Policy] = dataclasses.field(default_factory=dict)
    known: np.ndarray | None = None  # bool [V]: ids of the target that every policy has; None = all
    narrowest: int = 1 << 31  # every policy embeds ids below it

    def __post_init__(self) -> None:
        self.vocabulary: dict[str, int] = self.model.tokenizer.tokenizer.get_vocab()

    def add_target(self, part: Part) -> Policy:
        """The target's own model, which is in memory, as it is before the first update."""
        self.models.setdefault(part.model_hash, (self.model.arch, self.model.params))
        return self.add(part)

    def add(self, part: Part) -> Policy:
        """The policy of these weights, loaded where it is not there.

        Raises VocabularyError for a conflicting id, ValueError or OSError for files that cannot be used.
        """
        if part.hash not in self.policies:
            self.policies[part.hash] = self._load(part)
        return self.policies[part.hash]

    def _load(self, part: Part) -> Policy:
        if part.model_hash not in self.models:
            self.models[part.model_hash] = self._load_model(part.path)
        arch, params = self.models[part.model_hash]
        trainable, frozen, scale = params, params, None
        if part.adapter:
            adapter, lora = peft.load_adapter(part.adapter, arch)
            scale, trainable = adapter_scale(lora), self._placed(adapter, adapter_specs(arch, lora), arch)
        shared = self._share(part, arch)
        together = self.packing.share_prefixes and not prefix_sharing_unsupported_reason(arch)
        packing = dataclasses.replace(
            self.packing, share_prefixes=together, row_shape=self.packing.row_shape if together else None
        )
        return Policy(
            part.hash, scoring_config(self.step, arch, scale), trainable, frozen, shared, _ids_hash(shared), packing
        )

    def _load_model(self, path: str) -> tuple[Architecture, Params]:
        arch, placement = hf.read_architecture(path), self.step.placement
        if placement is None:
            return arch, jax.tree.map(jnp.asarray, hf.load_params(path, arch, self.dtype))
        return arch, load_sharded(path, arch, self.dtype, shardings(param_specs(arch), arch, placement))

    def _placed(self, tree: Params, specs: Params, arch: Architecture) -> Params:
        if self.step.placement is None:
            return jax.tree.map(jnp.asarray, tree)
        return jax.device_put(tree, shardings(specs, arch, self.step.placement))

    def _share(self, part: Part, arch: Architecture) -> SharedIds | None:
        """What the policy's vocabulary has in common with the target's; None where they are the same."""
        own, size = read_vocabulary(part.path), self.model.arch.vocab_size
        ids = shared_ids(own, self.vocabulary, (part.path, "the target"))
        if arch.vocab_size == size and vocabulary_hash(own) == vocabulary_hash(self.vocabulary):
            return None
        if self.step.placement is not None and self.step.placement.layout.tp > 1:
            raise ConfigError(
                f"config.cluster.trainer_layout: {part.path} has a vocabulary of {arch.vocab_size} ids, the target one "
                f"of {size}; such a pair is not scored with TP above 1, set TP to 1"
            )
        ids = ids[ids < min(size, arch.vocab_size)]
        places, known = np.zeros(size, np.int32), np.zeros(size, bool)
        places[ids], known[ids] = np.arange(len(ids)), True
        self.narrowest = min(self.narrowest, arch.vocab_size)
        self.known = known if self.known is None else self.known & known
        return SharedIds(jnp.asarray(ids), jnp.asarray(places), jnp.asarray(arch.vocab_size, jnp.int32))

    def score(self, policy: Policy, trajectories: Sequence[Trajectory]) -> list[Scores]:
        """What it says of each trajectory's W targets: logprobs [W], candidates [W, K] and likeliest [W, top] where
        they are asked for. Raises what `pack` does."""
        keys = [self._key(policy, t) for t in trajectories]
        found = self.cache.find(keys) if policy.hash else {}
        left = {key: t for key, t in zip(keys, trajectories) if key not in found and t.mask.any()}
        fresh = dict(zip(left, self._forward(policy, list(left.values()))))
        if policy.hash:
            self.cache.keep(fresh)
        self.forwards += sum(int(t.mask.sum()) for t in left.values())
        nothing = self._nothing()
        return [found.get(key) or fresh.get(key) or nothing for key in keys]

    def _forward(self, policy: Policy, trajectories: list[Trajectory]) -> list[Scores]:
        if not trajectories:
            return []
        packed = pack(trajectories, policy.packing)
        parts: list[list[Scores]] = [[] for _ in trajectories]
        for m, batch in enumerate(assemble.device_batch(packed, self.step.placement)):
            stats = frozen_stats(policy.step, self.top, policy.trainable, policy.frozen, policy.shared, batch)
            arrays = {name: np.asarray(x) for name, x in stats._asdict().items() if x is not None}
            for i in set(packed.sequences[m][packed.mask[m]].tolist()):
                at = packed.sequences[m] == i  # a sequence's targets lie in order in one row
                parts[i - 1].append({name: x[at] for name, x in arrays.items()})
        return [part for (part,) in parts]

    def usable(self, trajectory: Trajectory) -> np.ndarray:
        """bool [W]: targets that every policy knows, before which there is no token that one could not even embed."""
        if self.known is None:
            return np.ones(int(trajectory.mask.sum()), bool)
        beyond = np.cumsum(trajectory.tokens >= self.narrowest) > 0
        return (self.known[trajectory.tokens] & ~np.concatenate([[False], beyond[:-1]]))[trajectory.mask]

    def _nothing(self) -> Scores:
        width = self.model.arch.vocab_size if self.every_token else self.packing.head_size
        shapes = {"logprobs": (0,)} | ({"candidates": (0, width)} if width else {})
        shapes |= {"likeliest": (0, self.top)} if self.top else {}
        return {
            name: np.zeros(shape, np.int32 if name == "likeliest" else np.float32) for name, shape in shapes.items()
        }

    @property
    def every_token(self) -> bool:
        return self.step.objective.distill.form == "full"

    def _key(self, policy: Policy, trajectory: Trajectory) -> bytes:
        digest = hashlib.sha256(policy.hash.encode())
        step = policy.step
        about: tuple[Any, ...] = (step.temperature, step.dtype, step.head_precision, step.logprob_implementation)
        about += (self.every_token, self.top, self.packing.head_size)
        digest.update(repr((*about, policy.ids_hash)).encode())
        parts = [trajectory.tokens, trajectory.mask]
        parts += [trajectory.head.ids] if self.packing.head_size and trajectory.head is not None else []
        for array in parts:
            digest.update(np.ascontiguousarray(array).tobytes() + b"|")
        return digest.digest()


def _ids_hash(shared: SharedIds | None) -> str:
    return "" if shared is None else hashlib.sha256(np.asarray(shared.ids).tobytes()).hexdigest()


def current(policy: Policy, trainable: Params, frozen: Params, step: StepConfig) -> Policy:
    """The policy that is trained, as it is now: `policy` is one of the same model."""
    scored = scoring_config(step, policy.step.arch, step.adapter_scale)
    return dataclasses.replace(policy, hash="", step=scored, trainable=trainable, frozen=frozen)

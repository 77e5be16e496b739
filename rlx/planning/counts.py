"""Parameters of a model and of its adapter, counted from the description."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from flax import traverse_util

from rlx.config.schema import Config
from rlx.models.description import Architecture, Experts, ParamSpec, slots
from rlx.models.hf_config import read_config
from rlx.models.lora import adapter_specs
from rlx.models.spec import count_parameters, layer_specs


@dataclasses.dataclass(frozen=True)
class Counts:
    total_parameters: int  # of the language model, without the adapter
    trainable_parameters: int  # of the adapter, or all
    active_parameters: int  # that a token passes through, the output head left out
    adapted: dict[str, int]  # trainable parameters by linear layer, where there is an adapter

    @property
    def trainable_share(self) -> float:
        return self.trainable_parameters / self.total_parameters


def count(config: Config) -> Counts:
    """Raises ValueError or OSError where config.model.path cannot be read, or has no such layers as lora.targets."""
    arch = read_config(config.model.path)
    total = count_parameters(arch)
    adapted = adapter_parameters(arch, config) if config.lora.rank else {}
    return Counts(total, sum(adapted.values()) if config.lora.rank else total, active_parameters(arch), adapted)


def adapter_parameters(arch: Architecture, config: Config) -> dict[str, int]:
    """Of each kind of linear layer, by its module's path in a layer."""
    counts: Counter[str] = Counter()
    for path, spec in traverse_util.flatten_dict(adapter_specs(arch, config.lora)).items():
        module = path[1:4] if path[1:3] == ("mlp", "experts") else path[1:3]
        counts[".".join(module)] += math.prod(spec.shape)
    return dict(counts)


def active_parameters(arch: Architecture) -> int:
    """Of routed experts only those that a token is sent to; embedding and norms count, the output head does not."""
    total = count_parameters(arch)
    for slot in slots(arch):
        feed = slot.layer.mlp
        if isinstance(feed, Experts):
            routed = traverse_util.flatten_dict(layer_specs(arch, slot.layer)["mlp"]["experts"]).values()
            each = sum(_size(spec) for spec in routed) // feed.count
            total -= len(slot.numbers) * each * (feed.count - feed.top_k)
    return total if arch.tied else total - arch.vocab_size * arch.hidden_size


def _size(spec: ParamSpec) -> int:
    return math.prod(spec.shape)

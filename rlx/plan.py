"""What a model has to train before hardware is asked for: parameters in all, trainable ones and their share.

    rlx plan --config=configs/k31_target.py
    rlx plan --config=configs/full_size.py:kimi_k2 --config.lora.targets="('self_attn.*',)" --json
Counted from the description alone: config.model.path needs a config.json and no weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from typing import Any

from absl import flags
from flax import traverse_util

from rlx import cli
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.models.description import Architecture, Experts, ParamSpec, slots
from rlx.models.hf_config import read_config
from rlx.models.lora import adapter_specs
from rlx.models.spec import count_parameters, layer_specs


@dataclasses.dataclass(frozen=True)
class Plan:
    total_parameters: int  # of the language model, without the adapter
    trainable_parameters: int  # of the adapter, or all
    active_parameters: int  # that a token passes through, the output head left out
    adapted: dict[str, int]  # trainable parameters by linear layer, where there is an adapter

    @property
    def trainable_share(self) -> float:
        return self.trainable_parameters / self.total_parameters


def plan(config: Config) -> Plan:
    """Raises ValueError or OSError where config.model.path cannot be read, or has no such layers as lora.targets."""
    arch = read_config(config.model.path)
    total = count_parameters(arch)
    adapted = adapter_parameters(arch, config) if config.lora.rank else {}
    return Plan(total, sum(adapted.values()) if config.lora.rank else total, active_parameters(arch), adapted)


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


def lines(config: Config, found: Plan) -> list[str]:
    """For people."""
    arch = read_config(config.model.path)
    rank = config.lora.rank
    total, active = (_short(n) for n in (found.total_parameters, found.active_parameters))
    said = [
        f"{config.model.path}: {arch.model_type}, {arch.num_layers} layers, {total} parameters, {active} of them "
        "active for a token, the output head left out",
        f"trainable: {_short(found.trainable_parameters)}, {found.trainable_share:.2%} of it"
        + (f" (LoRA of rank {rank}, routed experts {config.lora.experts})" if rank else " (every parameter)"),
    ]
    width = max((len(name) for name in found.adapted), default=0)
    return said + [f"  {name:<{width}}  {_short(count):>9}" for name, count in sorted(found.adapted.items())]


def _short(count: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


def to_json(found: Plan) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"trainable_share": found.trainable_share}


def main(argv: list[str] | None = None) -> int:
    """`rlx plan`: 0 when planned, 2 for a wrong configuration or a model that cannot be read."""
    argv = sys.argv if argv is None else argv
    own = flags.FlagValues()
    as_json = flags.DEFINE_bool("json", False, "one line of JSON instead of text", flag_values=own)
    config = config_or_exit(argv, own, __doc__ or "", simulated=True)
    try:
        found = plan(config)
    except (ValueError, OSError) as error:
        key = "" if str(error).startswith("lora.") else f"model.path = {config.model.path!r}: "
        raise ConfigError(f"config.{key}{error}") from error
    print(json.dumps(to_json(found)) if as_json.value else "\n".join(lines(config, found)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("plan", sys.argv[1:]))

"""What a recipe needs before hardware is asked for: parameters, memory of a device, FLOPs, bytes over links, seconds.

    rlx plan --config=configs/k31_target.py
    rlx plan --config=configs/full_size.py:kimi_k2 --config.plan.device=B300 \
        --config.cluster.trainer_layout="TP8 PP4 EP8" --json
Counted from the description alone: config.model.path needs a config.json and no weights. docs/plan.md says what is
counted, what is estimated, and how far off it was.
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
from rlx.parallel.layout import LayoutError
from rlx.planning import engine, report
from rlx.planning.case import Case, case_of
from rlx.planning.costs import Costs, costs
from rlx.planning.estimate import Memory, memory
from rlx.planning.hardware import DEVICES, Device
from rlx.planning.memory import held
from rlx.planning.search import Change, changes


@dataclasses.dataclass(frozen=True)
class Counts:
    total_parameters: int  # of the language model, without the adapter
    trainable_parameters: int  # of the adapter, or all
    active_parameters: int  # that a token passes through, the output head left out
    adapted: dict[str, int]  # trainable parameters by linear layer, where there is an adapter

    @property
    def trainable_share(self) -> float:
        return self.trainable_parameters / self.total_parameters


@dataclasses.dataclass(frozen=True)
class Plan:
    counts: Counts
    case: Case
    device: Device
    memory: Memory
    costs: Costs
    cache: engine.Cache
    changes: list[Change]  # that would make it fit, where it does not

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device.usable


def count(config: Config) -> Counts:
    """Raises ValueError or OSError where config.model.path cannot be read, or has no such layers as lora.targets."""
    arch = read_config(config.model.path)
    total = count_parameters(arch)
    adapted = adapter_parameters(arch, config) if config.lora.rank else {}
    return Counts(total, sum(adapted.values()) if config.lora.rank else total, active_parameters(arch), adapted)


def plan(config: Config) -> Plan:
    """Raises ValueError (LayoutError for a layout that the model or a batch does not allow) or OSError."""
    arch = read_config(config.model.path)
    case, device = case_of(config, arch).checked(), DEVICES[config.plan.device]
    state, served = engine.embedded(config, arch)
    return Plan(
        counts=count(config),
        case=case,
        device=device,
        memory=memory(case, engine=state, served=served),
        costs=costs(case, device, held(case)),
        cache=engine.cache(arch, config.model.dtype),
        changes=changes(case, device, state, served),
    )


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


def lines(found: Plan) -> list[str]:
    """For people."""
    return [
        *report.parameters(found.counts, found.case),
        *report.memory_table(found.memory, found.device, found.case),
        *report.fit(found.fits, found.changes, found.memory, found.device),
        *report.cost_table(found.costs, found.device, found.case),
        *report.engines(found.cache, found.case.config),
    ]


def to_json(found: Plan) -> dict[str, Any]:
    case, spent = found.case, found.costs
    return dataclasses.asdict(found.counts) | {
        "trainable_share": found.counts.trainable_share,
        "layout": str(case.layout),
        "devices": case.layout.devices,
        "device": found.device.name,
        "bytes_per_device": found.memory._asdict(),
        "bytes_in_all": found.memory.total,
        "usable_bytes": found.device.usable,
        "fits": found.fits,
        "changes": [change._asdict() for change in found.changes],
        "micro_batches": spent.micro_batches,
        "flops": spent.flops,
        "bytes_sent_per_device": spent.sent,
        "links": spent.links,
        "bubble": spent.bubble,
        "seconds": spent.seconds,
        "update_seconds": spent.update_seconds,
        "mfu": spent.mfu(found.device, case.layout.devices, case.config.model.dtype),
        "engine_bytes": found.cache._asdict(),
    }


def main(argv: list[str] | None = None) -> int:
    """`rlx plan`: 0 when planned, fitting or not; 2 for a wrong configuration or a model that cannot be read."""
    argv = sys.argv if argv is None else argv
    own = flags.FlagValues()
    as_json = flags.DEFINE_bool("json", False, "one line of JSON instead of text", flag_values=own)
    config = config_or_exit(argv, own, __doc__ or "", simulated=True)
    try:
        found = plan(config)
    except LayoutError as error:
        raise ConfigError(f"config.cluster.trainer_layout = {config.cluster.trainer_layout!r}: {error}") from error
    except (ValueError, OSError) as error:
        key = "" if str(error).startswith("lora.") else f"model.path = {config.model.path!r}: "
        raise ConfigError(f"config.{key}{error}") from error
    print(json.dumps(to_json(found)) if as_json.value else "\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("plan", sys.argv[1:]))

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
import sys
from typing import Any

from absl import flags

from rlx import cli
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.models.hf_config import read_config
from rlx.parallel.layout import LayoutError, parse_layout
from rlx.planning import engine, report, scoring
from rlx.planning.case import Case, case_of
from rlx.planning.costs import Costs, costs
from rlx.planning.counts import Counts, count
from rlx.planning.estimate import Memory, memory
from rlx.planning.hardware import DEVICES, Device
from rlx.planning.memory import held
from rlx.planning.search import Change, changes


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


def plan(config: Config) -> Plan:
    """Raises ValueError (LayoutError for a layout that the model or a batch does not allow) or OSError."""
    arch = read_config(config.model.path)
    _engine_layout(config.cluster.engine_layout)
    case, device = case_of(config, arch).checked(), DEVICES[config.plan.device]
    state, served = engine.embedded(config, arch)
    return Plan(
        counts=count(config),
        case=case,
        device=device,
        memory=memory(case, engine=state, served=served),
        costs=costs(case, device, held(case)),
        cache=engine.cache(arch, config.model.dtype),
        changes=changes(case, device),
    )


def _engine_layout(text: str) -> None:
    """Raises ConfigError for one that cannot be read."""
    try:
        _ = parse_layout(text) if text else None
    except LayoutError as error:
        raise ConfigError(f"config.cluster.engine_layout = {text!r}: {error}") from error


def lines(found: Plan) -> list[str]:
    """For people."""
    return [
        *report.parameters(found.counts, found.case),
        *report.memory_table(found.memory, found.device, found.case),
        *scoring.said(found.case),
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
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        key = "" if str(error).startswith("lora.") else f"model.path = {config.model.path!r}: "
        raise ConfigError(f"config.{key}{error}") from error
    print(json.dumps(to_json(found)) if as_json.value else "\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("plan", sys.argv[1:]))

"""What can be said of `config.cluster` before any device is looked at, for programs that run."""

from __future__ import annotations

from rlx.config.schema import Config


def cluster_problems(config: Config) -> list[str]:
    """What is there to be planned, compared and simulated, and is not run."""
    several = config.cluster.trainer_nodes > 1
    return [*_engines(config), *(_processes(config) if several else [])]


def _engines(config: Config) -> list[str]:
    cluster = config.cluster
    planned = {
        "inference_nodes": cluster.inference_nodes,
        "engines": cluster.engines,
        "engine_layout": cluster.engine_layout,
    }
    if not any(planned.values()) or (config.engine.kind == "sglang" and config.inference.addresses):
        return []
    shown = ", ".join(f"{key} = {value!r}" for key, value in planned.items() if value)
    return [
        f"config.cluster: engines on machines of their own are planned ({shown}), which this program does not start; "
        "`rlx diff`, `rlx plan` and `rlx simulate` read them. To train give engine.kind = 'sglang' and "
        "inference.addresses of servers that run there, or start from configs/base.py"
    ]


def _processes(config: Config) -> list[str]:
    """Of several processes, one for each node of the trainer."""
    nodes = config.cluster.trainer_nodes
    problems = []
    if not config.cluster.trainer_layout:
        problems.append(
            f"config.cluster.trainer_nodes = {nodes}: config.cluster.trainer_layout must say how a trainer of several "
            "processes lies on its devices, for instance 'DP8'"
        )
    if config.sft.steps:
        problems.append(
            f"config.sft.steps = {config.sft.steps}: supervised steps run in one process and cluster.trainer_nodes is "
            f"{nodes}; run `rlx sft` on one, then give config.model.path its model and set this to 0"
        )
    audits = {"every": config.audit.every, "at_start": config.audit.at_start}
    if config.engine.kind == "sglang" and any(audits.values()):
        shown = ", ".join(f"audit.{key} = {value}" for key, value in audits.items() if value)
        problems.append(f"config.{shown}: one process cannot compute what {nodes} hold; set them to 0 and False")
    return problems

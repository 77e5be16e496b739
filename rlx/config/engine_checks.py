"""What the section `engine` must not say."""

from __future__ import annotations

from rlx.config.errors import said
from rlx.config.schema import Config, EngineConfig

FULL_SUPPORT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def engine_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    rollout, engine = config.rollout, config.engine
    buckets = engine.prefill_buckets
    problems = []
    for name, off in FULL_SUPPORT.items():
        if (value := getattr(rollout, name)) != off:
            why = f"the {engine.kind} engine samples from the full distribution only; set it to {off}"
            problems.append(said(f"rollout.{name}", value, why))
    if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
        problems.append(said("engine.prefill_buckets", buckets, "must be ascending lengths in tokens, e.g. (64, 128)"))
    elif buckets[-1] > engine.context:
        why = f"the largest must be at most config.engine.context = {engine.context}"
        problems.append(said("engine.prefill_buckets", buckets, why))
    return problems + _slots(engine)


def _slots(engine: EngineConfig) -> list[str]:
    slots, lanes, rows = engine.slots, engine.lanes, engine.prefill_rows
    if lanes < 1:
        return []  # and said so
    if lanes > 1 and engine.kind != "local":
        return [said("engine.lanes", lanes, f"the {engine.kind} engine has no lanes, only the local one; set it to 1")]
    if slots % lanes:
        return [said("engine.lanes", lanes, f"must divide config.engine.slots = {slots}")]
    if rows > slots // lanes:
        of_each = f" / lanes = {slots // lanes}" if lanes > 1 else f" = {slots}"
        return [said("engine.prefill_rows", rows, f"must be at most config.engine.slots{of_each}")]
    return []

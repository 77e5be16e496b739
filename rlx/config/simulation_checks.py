"""What the section `simulate` must not say."""

from __future__ import annotations

import dataclasses
import itertools
import math

from rlx.config.simulation import DistributionConfig, SimulateConfig

POSITIVE = ("engines.step_seconds", "engines.prefill_tokens_per_s")
AT_LEAST_ONE = ("token_grain", "engines.count", "sessions.tasks", "trainer.engine_slowdown", "trainer.own_slowdown")
NOT_NEGATIVE = (
    "engines.start_seconds",
    "engines.step_seconds_per_request",
    "engines.request_seconds",
    "engines.load_seconds",
    "sessions.task_cv",
    "trainer.update_seconds",
    "trainer.seconds_per_token",
    "trainer.publish_seconds",
    "trainer.other_seconds",
    "faults.engine_failures_per_hour",
    "faults.engine_down_seconds",
)


def simulation_problems(simulate: SimulateConfig) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    values = _leaves(simulate)
    rules = (
        (POSITIVE, lambda v: v > 0, "must be above 0"),
        (AT_LEAST_ONE, lambda v: v >= 1, "must be at least 1"),
        (NOT_NEGATIVE, lambda v: v >= 0, "must be 0 or more"),
        (("faults.failed_gradings",), lambda v: 0 <= v < 1, "must be in [0, 1)"),
    )
    problems = [
        f"config.simulate.{key} = {values[key]!r}: {demand}"
        for keys, holds, demand in rules
        for key in keys
        if not holds(values[key])
    ]
    for field in dataclasses.fields(simulate.sessions):
        value = getattr(simulate.sessions, field.name)
        if isinstance(value, DistributionConfig):
            key = f"config.simulate.sessions.{field.name}"
            problems += _distribution(key, value, within_one=field.name == "pass_rate")
    if simulate.faults.engine_failures_per_hour and not simulate.faults.engine_down_seconds:
        key = "config.simulate.faults.engine_down_seconds"
        problems.append(f"{key} = 0.0: an engine that fails comes back after some seconds; set them above 0")
    return problems


def _leaves(record: object, prefix: str = "") -> dict[str, float]:
    values: dict[str, float] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            values |= _leaves(value, f"{prefix}{field.name}.")
        else:
            values[prefix + field.name] = value
    return values


def _distribution(key: str, d: DistributionConfig, within_one: bool) -> list[str]:
    problems = []
    if d.kind == "quantiles":
        pairs = itertools.pairwise((0.0, *d.quantiles))
        if len(d.quantiles) < 2 or not all(a <= b < math.inf for a, b in pairs):
            why = "must be at least two ascending values of 0 or more, evenly spaced in probability"
            problems.append(f"{key}.quantiles = {d.quantiles!r}: {why}")
    elif d.quantiles:
        why = f"only kind 'quantiles' uses them, not {d.kind!r}; set that kind, or ()"
        problems.append(f"{key}.quantiles = {d.quantiles!r}: {why}")
    elif not d.mean >= 0:
        problems.append(f"{key}.mean = {d.mean!r}: must be 0 or more")
    elif not d.cv >= 0:
        problems.append(f"{key}.cv = {d.cv!r}: must be 0 or more")
    elif d.kind == "beta" and d.cv > 0 and not d.cv**2 * d.mean < 1 - d.mean:
        why = f"a beta distribution of mean {d.mean:g} in [0, 1] has a cv below sqrt((1 - mean) / mean)"
        problems.append(f"{key}.cv = {d.cv!r}: {why}")
    largest = d.quantiles[-1] if d.kind == "quantiles" and d.quantiles else d.mean
    if within_one and (d.kind in ("lognormal", "gamma") or largest > 1):
        return [f"{key}: pass rates are in [0, 1]; use kind 'beta', 'constant' or 'quantiles' up to 1"]
    return problems

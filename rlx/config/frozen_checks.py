"""What the objective must not say together with the sections `frozen` and `collapse`."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.objective_checks import refusals
from rlx.config.schema import Config


def objective_problems(config: Config) -> Iterator[str]:
    """A line a problem: the key, its value and the way out."""
    yield from refusals(config.objective, config.rollout)
    yield from _collapse(config)
    yield from _frozen(config)


def _frozen(config: Config) -> Iterator[str]:
    distill, frozen = config.objective.distill, config.frozen
    if distill.form == "off":
        yield from _unused(config)
        return
    used, unused = ("teachers", "signals") if distill.signal == "teacher" else ("signals", "teachers")
    given = frozen.teachers if used == "teachers" else frozen.signals
    if len(given) != len(distill.weights):
        yield (
            f"config.frozen.{used} = {given!r}: config.objective.distill.weights = {distill.weights!r} has one entry "
            f"for each; config.objective.distill.signal = {distill.signal!r} learns from these"
        )
    if frozen.signals and frozen.teachers:
        yield (
            f"config.frozen.{unused}: config.objective.distill.signal = {distill.signal!r} does not read it; set it to "
            "()"
        )


def _unused(config: Config) -> Iterator[str]:
    for name, value in (("teachers", config.frozen.teachers), ("signals", config.frozen.signals)):
        if value:
            yield (
                f"config.frozen.{name} = {value!r}: config.objective.distill.form = 'off' learns from none; set form "
                "to 'sampled', or this to ()"
            )


def _collapse(config: Config) -> Iterator[str]:
    guard = config.collapse
    values = {name: getattr(guard, name) for name in ("entropy_low", "repetition", "reward_drop")}
    for name, value in values.items():
        if value < 0 or (name != "entropy_low" and value > 1):
            yield f"config.collapse.{name} = {value!r}: must be in [0, 1], 0 = off"
    for name, value in (("entropy_growth", guard.entropy_growth), ("length_factor", guard.length_factor)):
        if value and value <= 1:
            yield f"config.collapse.{name} = {value!r}: a multiple above 1 is expected, e.g. 4.0; 0 = off"
    if guard.patience < 1:
        yield f"config.collapse.patience = {guard.patience!r}: must be at least 1"
    if guard.reward_drop and not config.eval.every:
        yield (
            f"config.collapse.reward_drop = {guard.reward_drop!r}: looks at evaluations during the run; set "
            "config.eval.every, e.g. 10, or this to 0"
        )

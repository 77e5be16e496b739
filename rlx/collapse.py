"""Has a run collapsed? Bounds on what shows it: the held-out pass rate, entropy, repetition and length.

Loss and gradient norm are not looked at: under distillation they look healthy at every lambda, also at those at which
the policy falls to nothing (arXiv 2607.11505).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.config.frozen import CollapseConfig

WAY_OUT = "With distillation raise objective.distill.lam, else lower learner.learning_rate; 0 switches the bound off"
LOOKED_AT = ("policy/entropy", "response/length_mean", "response/repetition_fraction")


def observe(config: CollapseConfig, seen: dict[str, Any], scalars: Mapping[str, float]) -> None:
    """Notes what an update shows.

    Args:
      seen: what is remembered between updates, empty before the first; changed here.
      scalars: of the update: policy/entropy (an update without a sample has none), response/length_mean,
        response/repetition_fraction.
    """
    if not config.watches or "policy/entropy" not in scalars:
        return
    seen.setdefault("entropy", scalars["policy/entropy"])
    seen.setdefault("length", scalars["response/length_mean"])
    seen["last"] = {name: scalars[name] for name in LOOKED_AT}
    seen["streak"] = seen.get("streak", 0) + 1 if any(_broken(config, seen, scalars)) else 0


def reason(config: CollapseConfig, seen: Mapping[str, Any], evals: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why the run should stop, None where it should go on. evals: by label, in their order."""
    # A run that is resumed with another bound is judged by that.
    broken = list(_broken(config, seen, seen["last"])) if seen.get("streak", 0) >= config.patience else []
    if broken:
        in_row = f"{seen['streak']} updates in a row (collapse.patience = {config.patience})"
        return f"the run has collapsed, {in_row}: {broken[0]}. {WAY_OUT}."
    return _lower_reward(config, evals)


def _broken(config: CollapseConfig, seen: Mapping[str, Any], scalars: Mapping[str, float]) -> Iterator[str]:
    entropy, length = scalars["policy/entropy"], scalars["response/length_mean"]
    if config.entropy_low and entropy < config.entropy_low:
        yield f"the policy's entropy is {entropy:.4f} nats, below {config.entropy_low} (collapse.entropy_low)"
    if config.entropy_growth and entropy > config.entropy_growth * seen["entropy"]:
        yield (
            f"the policy's entropy is {entropy:.3f} nats, more than {config.entropy_growth} times the "
            f"{seen['entropy']:.3f} of the first update (collapse.entropy_growth)"
        )
    repetition = scalars["response/repetition_fraction"]
    if config.repetition and repetition > config.repetition:
        yield f"{repetition:.2f} of the 4-grams are repeated, above {config.repetition} (collapse.repetition)"
    factor = config.length_factor
    if factor and not seen["length"] / factor <= length <= seen["length"] * factor:
        yield (
            f"responses have {length:.1f} tokens, {seen['length']:.1f} at the first update, more than a factor of "
            f"{factor} apart (collapse.length_factor)"
        )


def _lower_reward(config: CollapseConfig, evals: Mapping[str, Mapping[str, Any]]) -> str | None:
    if not config.reward_drop or "before" not in evals:
        return None
    label, newest = list(evals.items())[-1]
    before, now = evals["before"]["pass_rate"], newest["pass_rate"]
    if now >= before - config.reward_drop:
        return None
    return (
        f"the run has collapsed: at {label} the held-out pass rate is {now:.3f}, {before:.3f} before the first update, "
        f"a drop of more than {config.reward_drop} (collapse.reward_drop). {WAY_OUT}."
    )

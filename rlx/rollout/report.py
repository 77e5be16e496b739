"""How full every stage of the path was and how long things stayed in it, as metrics."""

from __future__ import annotations

from rlx.rollout.producer import Producer
from rlx.types import AGE_BINS, bin_labels


def take_scalars(producer: Producer) -> dict[str, float]:
    """Metrics of the groups `producer/`, `engine/` and `offpolicy/` since the last call."""
    fleet, buffer = producer.fleet, producer.buffer
    places = {
        "sessions": producer.sessions,
        "samples": producer.samples,
        "permits": fleet.permits,
        "queue": fleet.queued,
        "ungraded": producer.ungraded,
        "grading": producer.grading,
        "buffer": buffer.gauge,
    }
    values = {f"producer/{name}_{what}": v for name, gauge in places.items() for what, v in gauge.take().items()}
    values["engine/occupancy"] = fleet.busy.take()["occupancy"] / fleet.slots
    values["engine/in_service"] = float(len(fleet.in_service))
    values |= {f"engine/ejections_{reason}": float(n) for reason, n in fleet.ejected.items()}
    values |= {f"producer/failures_{kind}": float(n) for kind, n in producer.failures.items()}
    return values | age_shares(buffer.consumed_ages)


def age_shares(tokens: dict[int, int]) -> dict[str, float]:
    """Shares of the trained tokens by age, from tokens by age in updates."""
    total = sum(tokens.values())
    bounds = zip(AGE_BINS, [*AGE_BINS[1:], None])
    held = [sum(n for age, n in tokens.items() if low <= age and (high is None or age < high)) for low, high in bounds]
    return {f"offpolicy/age_share_{label}": n / total for label, n in zip(bin_labels(AGE_BINS), held) if total}

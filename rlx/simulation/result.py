"""What a simulated run did, as figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlx.config.schema import Config
from rlx.metrics.ledger import BINS, Ledger
from rlx.simulation.observe import Timeline, Update


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures leave out the first `config.metrics.skip_updates` updates, in which everything starts empty; counts of
    tokens and groups are those of the whole run. Lengths are in tokens of the configuration."""

    config: Config  # in tokens of the simulation
    updates: Sequence[Update]
    timeline: Timeline
    update_minutes: float
    trainer_wait_share: float  # of the time, without a batch to train on
    train_minutes: float  # of an update
    publish_minutes: float
    age_mean: float  # updates, over trained tokens
    age_max: int
    ages: dict[int, float]  # share of the trained tokens
    engine_occupancy: float  # mean share of the slots that held a request
    session_minutes: float  # from opening to the last response
    trained_tokens_per_update: float
    samples_per_update: float
    generated_tokens_per_s: float
    stale_share: float  # of the tokens that came to an end
    no_signal_share: float
    tokens: dict[str, int]  # by bin of the ledger
    groups: dict[str, int]
    hours: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, rounded to what can be told apart."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("config", "updates", "timeline"):
            del own[name]
        rounded = {name: round(v, 6) if isinstance(v, float) else v for name, v in own.items()}
        rounded["ages"] = {str(age): round(share, 6) for age, share in self.ages.items()}
        return {"updates": len(self.updates), **rounded}

    def lines(self) -> list[str]:
        """For a terminal."""
        rows = [
            ("an update", f"{self.update_minutes:.2f} min"),
            ("  the trainer waits", f"{self.trainer_wait_share:.1%} of it"),
            ("  trains", f"{self.train_minutes:.2f} min"),
            ("  publishes", f"{self.publish_minutes:.2f} min"),
            ("age of trained tokens", f"{self.age_mean:.2f} updates, at most {self.age_max}"),
            ("engines' slots in use", f"{self.engine_occupancy:.1%}"),
            ("a session", f"{self.session_minutes:.1f} min"),
            ("tokens generated", f"{self.generated_tokens_per_s:,.0f}/s"),
            ("discarded as stale", f"{self.stale_share:.1%} of the tokens that came to an end"),
            ("without signal", f"{self.no_signal_share:.1%}"),
            ("simulated", f"{len(self.updates)} updates, {self.hours:.1f} h"),
        ]
        return [f"{name:<24}{value}" for name, value in rows]


def summarise(
    config: Config,
    updates: Sequence[Update],
    ledger: Ledger,
    timeline: Timeline,
    *,
    occupancy: float,
    session_seconds: float,
) -> Result:
    """config: in tokens of the simulation, as the ledger is."""
    counted = updates[config.metrics.skip_updates :]
    seconds = counted[-1].ended - counted[0].began
    by_age: Counter[int] = sum((u.ages for u in counted), Counter())
    trained = max(by_age.total(), 1)
    grain = config.simulate.token_grain
    reasons = sorted(name for name in ledger.get_state()["bins"] if name.startswith("failed/"))
    names = [key for name in BINS for key in (reasons or [name] if name == "failed" else [name])]
    tokens = {name: ledger[name].tokens * grain for name in names}
    ended = sum(n for name, n in tokens.items() if name not in ("in_flight", "buffered", "evaluated")) or 1
    minutes = len(counted) * 60.0
    return Result(
        config=config,
        updates=updates,
        timeline=timeline,
        update_minutes=seconds / minutes,
        trainer_wait_share=sum(u.taken - u.began for u in counted) / seconds,
        train_minutes=sum(u.trained - u.taken for u in counted) / minutes,
        publish_minutes=sum(u.published - u.trained for u in counted) / minutes,
        age_mean=sum(age * n for age, n in by_age.items()) / trained,
        age_max=max((age for u in updates for age in u.ages), default=0),
        ages={age: by_age[age] / trained for age in sorted(by_age)},
        engine_occupancy=occupancy,
        session_minutes=session_seconds / 60,
        trained_tokens_per_update=by_age.total() * grain / len(counted),
        samples_per_update=sum(u.samples for u in counted) / len(counted),
        generated_tokens_per_s=ledger.total.tokens * grain / updates[-1].ended,
        stale_share=tokens["stale"] / ended,
        no_signal_share=tokens["no_signal"] / ended,
        tokens=tokens,
        groups={name: ledger[name].groups for name in names if ledger[name].groups},
        hours=updates[-1].ended / 3600,
    )

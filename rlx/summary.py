"""What a run that came to its end says of itself: summary.json, and the same in a few lines."""

from __future__ import annotations

from typing import Any

from rlx.parallel import runtime
from rlx.run import Run


def summarise(run: Run) -> dict[str, Any]:
    """What `summary.json` says of a run that came to its end."""
    evals = run.progress.evals
    summary: dict[str, Any] = {"updates": run.progress.update, "version": run.version}
    for label in ("base", "before", "after"):
        result = evals[label]
        summary[f"eval/pass_rate_{label}"] = result["pass_rate"]
        summary[f"eval/interval_{label}"] = [result["pass_rate_low"], result["pass_rate_high"]]
        summary[f"eval/by_source_{label}"] = result["by_source"]
    return summary | {
        "eval/attempts": evals["after"]["attempts"],
        "eval/evaluations": evals,
        "ledger": run.ledger.get_state(),
        "skipped_updates": int(run.state.skipped),
        "seconds": run.seconds,
        "seconds_by_phase": run.timers.totals,
        "peak_memory_gib": runtime.peak_host_memory_gib(),
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    lines, evals = [], summary["eval/evaluations"]
    # Without a cold start training begins at the base model: one evaluation, one line.
    for label in ("before", "after") if evals["base"] == evals["before"] else ("base", "before", "after"):
        low, high = summary[f"eval/interval_{label}"]
        lines.append(
            f"held-out pass rate {label:>7}: {summary[f'eval/pass_rate_{label}']:.3f}  [{low:.3f}, {high:.3f}]"
        )
    lines.append(
        f"{summary['eval/attempts']} attempts each; {summary['updates']} updates in {summary['seconds']:.0f} s, "
        f"{summary['peak_memory_gib']:.1f} GiB; trained policy in {summary['policy']}"
    )
    return "\n".join(lines)

"""The study's page and figures, from the scores in experiments/study/results: docs/proxy_study.md.

python -m experiments.study.report
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from experiments.study import models
from experiments.study.run import CONFIGURATIONS, RESULTS, SEEDS
from rlx.models.spec import count_parameters
from rlx.proxy import figures
from rlx.proxy.agreement import Agreement, agree
from rlx.proxy.ranking import Ranked, read_study
from rlx.proxy.report import Table, markdown_table

PAGE, FIGURES = Path("docs/proxy_study.md"), Path("docs/figures")
PROXIES = ("small", "other")
SUBSETS = {
    "all configurations": tuple(CONFIGURATIONS),
    "learning rates alone": tuple(name for name in CONFIGURATIONS if name == "base" or name.startswith("learning")),
    "all but the learning rates": tuple(name for name in CONFIGURATIONS if not name.startswith("learning")),
}
HEAD = """# A study at small scale: how far does a cheap model predict a dearer one?

Ten configurations, three seeds each, on a target and on two proxies that this project trains itself: `small` is of the
target's family (Qwen3's), `other` of another one (Qwen2's). A question is five digits, the answer the largest and then
the smallest of them; the base models come from supervised steps on answers of which each digit is wrong in a third of
the cases, so they know the answer and often write another. A run makes 24 updates of 64 samples; its score is the pass
rate on 60 held-out questions, 4 attempts at each, so one score is known to about ± {spread:.3f}. The page is written by
`python -m experiments.study.report` from the scores in `experiments/study/results`, which
`python -m experiments.study.run` makes, run by run.
"""


def studies() -> dict[str, Ranked]:
    return {model: read_study(RESULTS / f"{model}.csv", None, "") for model in models.SIZES}


def compared(target: Ranked, proxy: Ranked, names: tuple[str, ...]) -> Agreement:
    """Over the configurations that both have by now."""
    shared = [n for n in names if n in target.scores and n in proxy.scores]
    return agree({n: target.scores[n] for n in shared}, {n: proxy.scores[n] for n in shared})


def scores_table(found: dict[str, Ranked]) -> Table:
    rows = [[name, *(_cell(of.scores.get(name, [])) for of in found.values())] for name in CONFIGURATIONS]
    sizes = {model: f"{model}, {count_parameters(models.architecture(model)):,} parameters" for model in found}
    return Table("Scores", ["configuration", *sizes.values()], rows)


def _cell(scores: list[float]) -> str:
    return f"{np.mean(scores):.3f} ({', '.join(f'{s:.3f}' for s in scores)})" if scores else "–"


def agreement_table(found: dict[str, Ranked]) -> Table:
    rows = []
    for proxy in PROXIES:
        for title, names in SUBSETS.items():
            shared = [n for n in names if n in found["target"].scores and n in found[proxy].scores]
            if len(shared) < 2:
                continue
            a = compared(found["target"], found[proxy], names)
            low, high = a.kendall_interval
            decided = [p for p in a.pairs if p.verdict != "not decided"]
            rows.append(
                [
                    proxy,
                    title,
                    f"{a.kendall_tau:.2f} [{low:.2f}, {high:.2f}]",
                    f"{a.spearman:.2f}",
                    f"{a.pairwise_agreement:.0%}",
                    f"{sum(p.verdict == 'agree' for p in decided)} of {len(decided)} decided ({len(a.pairs)} in all)",
                    "yes" if a.top1_agreement else "no",
                ]
            )
    header = [
        "proxy",
        "over",
        "Kendall's tau-b",
        "Spearman",
        "pairs ordered alike",
        "decided pairs that agree",
        "same best",
    ]
    return Table("Agreement with the target", header, rows)


def cost_lines(found: dict[str, Ranked]) -> list[str]:
    target = found["target"]
    total = sum(of.seconds for of in found.values())
    lines = [f"All runs took {total / 60:.0f} CPU-minutes."]
    for proxy in PROXIES:
        of = found[proxy]
        share = (of.seconds / of.runs) / (target.seconds / target.runs)
        lines.append(f"A run of `{proxy}` costs {of.seconds / of.runs:.1f} CPU-seconds, {share:.0%} of the target's.")
    return lines


def misleading(found: dict[str, Ranked]) -> list[str]:
    """Where a proxy is decidedly wrong, and where following it would have led."""
    lines = []
    target = found["target"]
    means = {name: float(np.mean(scores)) for name, scores in target.scores.items()}
    for proxy in PROXIES:
        a = compared(target, found[proxy], tuple(CONFIGURATIONS))
        wrong = [p for p in a.pairs if p.verdict == "disagree"]
        best = a.configurations[int(np.argmax(a.proxy_means))]
        top = max(means, key=lambda name: means[name])
        lines.append(
            f"* `{proxy}` would choose *{best}*, which has {means[best]:.3f} on the target; the target's own best, "
            f"*{top}*, has {means[top]:.3f}."
        )
        lines += [
            f"* `{proxy}` is decidedly wrong about *{p.first}* and *{p.second}*: {p.proxy_difference:+.3f} "
            f"[{p.proxy_interval[0]:+.3f}, {p.proxy_interval[1]:+.3f}] on it, {p.target_difference:+.3f} "
            f"[{p.target_interval[0]:+.3f}, {p.target_interval[1]:+.3f}] on the target."
            for p in wrong
        ]
        if not wrong:
            lines.append(f"* No decided pair of `{proxy}` is the other way round on the target.")
    return lines


def page(found: dict[str, Ranked], remarks: str) -> str:
    spread = float(np.mean([of.spread for of in found.values()]))
    parts = [HEAD.format(spread=spread)]
    done, all_runs = sum(of.runs for of in found.values()), len(CONFIGURATIONS) * len(SEEDS) * len(models.SIZES)
    if done < all_runs:
        parts.append(f"{done} of {all_runs} runs are done; what follows is of these.\n")
    for table in (scores_table(found), agreement_table(found)):
        parts.append(f"## {table.title}\n\n" + "\n".join(markdown_table(table)) + "\n")
    for proxy in PROXIES:
        parts.append(f"![{proxy} against the target](figures/study_{proxy}.png)\n")
    parts.append("## What it cost\n\n" + " ".join(cost_lines(found)) + "\n")
    parts.append("## Where a proxy misleads\n\n" + "\n".join(misleading(found)) + "\n")
    return "\n".join(parts) + remarks


def main() -> int:
    found = studies()
    missing = [f"{model} ({of.runs})" for model, of in found.items() if of.runs < len(CONFIGURATIONS) * len(SEEDS)]
    for proxy in PROXIES:
        picture = figures.agreement(compared(found["target"], found[proxy], tuple(CONFIGURATIONS)))
        figures.write(picture, FIGURES / f"study_{proxy}.png")
    file = Path(__file__).with_name("remarks.md")
    PAGE.write_text(page(found, "\n" + file.read_text() if file.is_file() else ""), encoding="utf-8")
    print(f"wrote {PAGE}" + (f"; runs are missing of {', '.join(missing)}" if missing else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())

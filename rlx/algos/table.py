"""docs/algorithms.md, written from the docstrings of the functions that choose, and from the rules that refuse.

python -m rlx.algos.table [docs/algorithms.md]
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rlx.algos import advantages, aggregation, centering, distill, importance, kl, policy_gradient
from rlx.config.objective_checks import RULES, Rule

HEAD = """# Algorithms

Written by `python -m rlx.algos.table` from the code: change the docstrings in `rlx/algos` and the rules in
`rlx/config/objective_checks.py`. q is the distribution that sampled a token, p (or π) the
one being trained, R a reward, A an advantage; sg stops the gradient. The loss of an update is

    Σ_t weight_t · [policy_t + centering_t + kl_coefficient · KL_t - entropy_coefficient · H_t]

over all trained tokens of the optimizer batch, with the weights of the aggregation. `refuses` names the keys whose
values can contradict a choice; the reasons are below each table.
"""


class Topic(NamedTuple):
    """One choice of the objective: title, key below `config.objective`, the function whose docstring lists it."""

    title: str
    key: str
    chooses: Callable[..., object]


class Choice(NamedTuple):
    name: str
    formula: str
    source: str


TOPICS = (
    Topic("Advantages", "advantage", advantages.advantages),
    Topic("Token losses", "loss", policy_gradient.surrogate),
    Topic("Level of the importance weight", "importance_level", importance.at_level),
    Topic("Sequence mask", "sequence_mask", policy_gradient.sequence_keep),
    Topic("Score centering", "centering", centering.center),
    Topic("Aggregation", "aggregation", aggregation.aggregation_weights),
    Topic("KL to a reference", "kl_estimator", kl.kl),
    Topic("Distillation: where the utility is summed", "distill.form", distill.utility_loss),
    Topic("Distillation: the signal", "distill.signal", distill.utility),
    Topic("Distillation: calibration of λ", "distill.calibration", distill.calibrated_lam),
    Topic("Distillation: filter on rewards", "distill.filter", distill.kept),
    Topic("Distillation: several signals", "distill.combine", distill.combine_signals),
)


def choices(function: Callable[..., object]) -> list[Choice]:
    """The table in a docstring: indented lines of three columns, two or more spaces apart."""
    rows = re.findall(r"^ *(\w+) {2,}(\S.*?) {2,}(\S.*)$", inspect.getdoc(function) or "", re.MULTILINE)
    return [Choice(*row) for row in rows]


def page() -> str:
    """The Markdown page."""
    return HEAD + "".join(_section(topic) for topic in TOPICS)


def _section(topic: Topic) -> str:
    rows = choices(topic.chooses)
    lines = [_row(topic, row) for row in rows]
    concerned = dict.fromkeys(rule for row in rows for rule in _rules(topic, row))
    reasons = "".join(f"- `config.{rule.key}`{_only(topic, rule)}: {_plain(rule.demand)}.\n" for rule in concerned)
    table = "| name | formula | source | selected by | refuses |\n| --- | --- | --- | --- | --- |\n" + "".join(lines)
    return f"\n## {topic.title}\n\n{table}" + (f"\n{reasons}" if reasons else "")


def _row(topic: Topic, choice: Choice) -> str:
    refused = ", ".join(f"`{key}`" for key in dict.fromkeys(rule.key for rule in _rules(topic, choice)))
    formula, source = (text.replace("|", "\\|") for text in (choice.formula, choice.source))
    return f"| {choice.name} | {formula} | {source} | `config.objective.{topic.key} = {choice.name!r}` | {refused} |\n"


def _rules(topic: Topic, choice: Choice) -> list[Rule]:
    return [rule for rule in RULES if {topic.key, f"{topic.key}={choice.name}"} & set(rule.concerns)]


def _only(topic: Topic, rule: Rule) -> str:
    names = [concern.partition("=")[2] for concern in rule.concerns if concern.partition("=")[0] == topic.key]
    return f" ({', '.join(names)})" if all(names) else ""


def _plain(demand: str) -> str:
    """A demand without the values that a configuration would fill in."""
    return re.sub(r"\{[\w.]+(![rs])?\}", "…", demand)


def main(argv: list[str]) -> None:
    Path(argv[0] if argv else "docs/algorithms.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""A run in the terminal: what became of it, how it went, its ledger, its best and worst samples.

rlx show runs/quickstart                       while it runs or after
rlx show runs/quickstart --html                a page of its samples: runs/quickstart/samples.html
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlx import cli
from rlx.config.chat import ChatConfig
from rlx.envs.chat import ChatTokenizer, load_chat_tokenizer
from rlx.metrics.sample_page import choose, write_page
from rlx.metrics.shown import extremes, num_turns
from rlx.metrics.view import Record, RunView, number, read_run, read_samples, setting

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 28  # characters
GUARD = "TrainingStopped"  # the kind of error of `rlx.train` that a bound on the run raises
LONGEST = 600  # characters of a response that are printed


def percent(value: float) -> str:
    return f"{value:.1%}"


def plain(value: float) -> str:
    return f"{value:.3g}"


# What a person asks first: (metric, what it is called, how it is written).
TRENDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/pass_rate", "pass rate", percent),
    ("reward/mean", "mean reward", plain),
    ("reward/no_signal_fraction", "groups without signal", percent),
    ("response/length_mean", "response, tokens", plain),
    ("response/truncated_fraction", "cut by a limit", percent),
    ("policy/entropy", "entropy, nats", plain),
    ("offpolicy/kl_k3", "KL sampler to trainer, nats", plain),
    ("offpolicy/ess", "effective sample size", percent),
    ("offpolicy/age_mean", "age, updates", plain),
    ("optimizer/grad_norm", "gradient norm", plain),
    ("time/total_seconds", "seconds an update", plain),
    ("throughput/generated_tokens_per_second", "generated tokens/s", plain),
)
SUPERVISED_TRENDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("sft/loss", "loss, nats", plain),
    ("sft/validation_loss", "validation loss, nats", plain),
    ("sft/grad_norm", "gradient norm", plain),
    ("sft/tokens_per_second", "tokens/s", plain),
)


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Bars between the least and the largest value; of more values than `width` the mean of neighbours."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return BARS[0] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def summary(view: RunView) -> RenderableType:
    """Name, state, model, and what was trained how."""
    colour = {"complete": "green", "running": "cyan", "stopped": "yellow"}[view.state]
    head = Text.assemble((str(setting(view.config, "run.name")), "bold"), "  ", (view.state, colour))
    head.append(f", {_progress(view)}" + (f" ({view.writer})" if view.state == "running" else ""))
    rank = setting(view.config, "lora.rank")
    trained = f"LoRA of rank {rank}" if rank else "every parameter"
    if _is_supervised(view):
        how = f"{setting(view.config, 'sft.path')}, learning rate {setting(view.config, 'sft.learning_rate')}"
    else:
        loss, rate = (setting(view.config, key) for key in ("objective.loss", "learner.learning_rate"))
        how = f"loss {loss}, learning rate {rate}"
    lines: list[RenderableType] = [head, Text(f"{setting(view.config, 'model.path')}, {trained}, {how}")]
    if view.summary is not None:
        known = {"seconds": "{:.0f} s", "peak_memory_gib": "{:.1f} GiB", "policy": "policy in {}"}
        lines.append(Text(", ".join(f.format(view.summary[k]) for k, f in known.items() if k in view.summary)))
    if view.state == "stopped":
        lines.append(Text(_why_stopped(view), "yellow"))
    return Group(*lines)


def _why_stopped(view: RunView) -> str:
    if view.stopped is None:
        return "No process writes it: the same command as before continues it."
    if view.stopped["kind"] == GUARD:
        return f"A guard stopped it: {view.stopped['reason']} Started again with the same settings it ends so again."
    return (
        f"It ended with {view.stopped['kind']}: {view.stopped['reason']}\n"
        "Once that is mended the same command as before continues it."
    )


def _progress(view: RunView) -> str:
    if _is_supervised(view):
        return f"{view.supervised[-1]['step']} of {setting(view.config, 'sft.steps')} supervised steps"
    done = view.updates[-1]["update"] if view.updates else 0
    return f"{done} of {setting(view.config, 'learner.updates')} updates"


def _is_supervised(view: RunView) -> bool:
    """Whether it is a run of `rlx sft`, and not a cold start before RL."""
    return bool(view.supervised) and not view.updates and not view.evaluations


def evaluations(view: RunView) -> RenderableType | None:
    """Held-out pass rates with their intervals; None before the first evaluation."""
    if not view.evaluations:
        return None
    table = Table("held-out tasks", "update", "pass rate", "interval", "attempts", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, record in view.evaluations.items():
        rate, low, high, attempts = (
            number(record.get(f"eval/{name}")) for name in ("pass_rate", "pass_rate_low", "pass_rate_high", "attempts")
        )
        table.add_row(label, str(record["update"]), f"{rate:.3f}", f"[{low:.3f}, {high:.3f}]", f"{attempts:.0f}")
    return table


def trends(rows: Sequence[Record], wanted: Sequence[tuple[str, str, Callable[[float], str]]]) -> RenderableType | None:
    """First and last value of each metric, and its course; None where there are no records."""
    table = Table("", "first", "", "last", box=box.SIMPLE_HEAD)
    for i in (1, 3):
        table.columns[i].justify = "right"
    for name, title, shown in wanted:
        values = [v for v in (number(row.get(name)) for row in rows) if math.isfinite(v)]
        if values:
            table.add_row(title, shown(values[0]), Text(sparkline(values), "cyan"), shown(values[-1]))
    return table if table.row_count else None


def ledger(view: RunView) -> RenderableType | None:
    """Where every sampled token went; None of a run that has not saved yet."""
    if view.ledger is None:
        return None
    table = Table("ledger", "tokens", "share", "samples", "groups", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for line in view.ledger.table().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[1] != "0" or cells[3] != "0" or cells[0] == "generated":
            table.add_row(*cells, style="bold" if cells[0] == "generated" else "")
    for reason, count in sorted(view.ledger.ended.items()):
        table.add_row(f"ended by {reason}", f"{count.tokens:,}", "", f"{count.samples:,}", "", style="dim")
    return table


def sample_panel(record: Record) -> RenderableType:
    reward, text = number(record["reward"]), record["response"]
    cut = f"{text[:LONGEST]} … ({len(text) - LONGEST} characters more)" if len(text) > LONGEST else text
    colour = "green" if reward >= 1 else "red" if reward <= 0 else "yellow"
    grade = record["grade"]
    read = f", read as {grade['extracted']!r}" if grade.get("extracted") is not None else ""
    turns = num_turns(record)
    within = f" in {turns} turns" if turns > 1 else ""
    ended = f"{len(record['logprobs'])} tokens{within}, ended by {record['stop_reason']}"
    body = Text.assemble(
        (record["question"], "bold"), "\n", cut, "\n", (f"answer {record['answer']}{read}; {ended}", "dim")
    )
    where = record.get("label") or f"update {record['update']}"
    title = Text(f"reward {reward:g}, {where}, {record['task']}", colour)
    return Panel(body, title=title, title_align="left", border_style=colour)


def show(view: RunView, records: Sequence[Record], count: int) -> RenderableType:
    """All of it; `count` best and as many worst samples."""
    best, worst = extremes(records, count)
    parts = [
        summary(view),
        evaluations(view),
        trends(view.supervised, SUPERVISED_TRENDS),
        trends(view.updates, TRENDS),
        ledger(view),
        *(sample_panel(record) for record in (*best, *worst)),
    ]
    nothing = Text("Nothing is recorded yet: the first evaluation and the first update come first.", "yellow")
    shown = [part for part in parts if part is not None]
    return Group(*shown) if len(shown) > 1 else Group(*shown, nothing)


def tokenizer_of(view: RunView) -> ChatTokenizer | None:
    """The tokenizer of the run's model; None, said on stderr, where the model has gone."""
    path = str(setting(view.config, "model.path"))
    ours = setting(view.config, "chat.template") == "chatml"  # the model may have no template of its own
    try:
        return load_chat_tokenizer(path, "", "", ChatConfig("chatml", "off") if ours else None)
    except (ValueError, OSError) as error:
        print(f"rlx show: no token by token view, as the model's tokenizer cannot be read: {error}", file=sys.stderr)
        return None


def main(argv: list[str] | None = None) -> int:
    """`rlx show`: 0 when shown, 1 where there is no run or one of its files is damaged."""
    arguments = _parser().parse_args(argv)
    view = read_run(arguments.run)
    if arguments.html is not None:
        to = arguments.html or arguments.run / "samples.html"
        count = write_page(arguments.run, tokenizer_of(view), to)
        print(f"{count} samples in {to}: open it in a browser")
        return 0
    records = choose(read_samples(arguments.run))
    Console(highlight=False).print(show(view, records, arguments.samples))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlx show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's directory, for instance runs/quickstart")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="best, and as many worst, samples (2)")
    parser.add_argument(
        "--html",
        nargs="?",
        const="",
        type=lambda text: Path(text) if text else "",
        metavar="FILE",
        help="write a page of the samples instead (RUN/samples.html)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(cli.run("show", sys.argv[1:]))

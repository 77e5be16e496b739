"""Signals: what an expert learned over its own base, kept, checked and reused.

    rlx signal create --run=runs/proxy --to=signals/proxy [--alpha=1.0]
    rlx signal create --base=models/base --expert=runs/proxy/adapter --to=signals/proxy
    rlx signal list [DIRECTORY ...]                 those in signals/, or in other directories
    rlx signal show signals/proxy [--json]
    rlx signal verify signals/proxy                 are the models those that it was made of?
    rlx signal verify signals/proxy --config=RECIPE [--tasks=32]
                                                    and how large and sharp is it where the recipe's model goes?
    rlx signal calibrate --config=configs/popd.py --lambdas=2,1,0.5 --updates=10
                                                    short runs from the largest lambda down, until one is worse

A target is trained with it by --config.frozen.signals="('signals/proxy',)" and objective.distill: docs/popd.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from rlx import cli
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.distillation.provenance import read_origin
from rlx.envs.vocabulary import read_vocabulary
from rlx.metrics.jsonl import encode
from rlx.proxy.report import Table, markdown_table, short, span, whole
from rlx.proxy.signal import (
    Part,
    Signal,
    SignalError,
    check_learned,
    check_models,
    find_signals,
    read_part,
    read_signal,
    write_signal,
)
from rlx.proxy.vocabulary import shared_ids, vocabulary_hash

HOME = "signals"
# By provenance.converged.
SETTLED = {True: "no longer rising", False: "still rising", None: "not known whether it still rises"}


def create(to: Path, base: str, expert: str, *, run: Path | None = None, alpha: float = 1.0) -> Signal:
    """Makes the artefact and returns it. run: the one that trained the expert; base and expert "" are its own.

    Raises:
      VocabularyError: base and expert differ in what an id means. SignalError: nothing was learned.
      ValueError, OSError: directories that are no models.
      FileExistsError: there is a signal already.
    """
    if alpha <= 0:
        raise ValueError(f"--alpha={alpha}: scales what is moved; it must be above 0, e.g. 1.0")
    origin = None if run is None else read_origin(run)
    if origin is not None:
        base, expert = base or origin.base, expert or origin.expert
    if not expert:
        raise ValueError("--expert is missing: name the trained model or adapter, or --run, the run that trained it")
    learned = read_part(expert)
    start = read_part(base) if base else read_part(learned.path) if learned.adapter else None
    if start is None:
        raise ValueError("--base is missing: name the model that the expert began with")
    check_learned(start, learned)
    vocabulary = read_vocabulary(start.path)
    shared_ids(read_vocabulary(learned.path), vocabulary, ("the expert", "its base"))
    signal = Signal(
        name=to.name,
        base=start,
        expert=learned,
        tokenizer_hash=vocabulary_hash(vocabulary),
        tokens=len(vocabulary),
        alpha=alpha,
        provenance={} if origin is None else origin.provenance,
        cost={} if origin is None else origin.cost,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    write_signal(to, signal)
    return signal


def listing(found: Sequence[tuple[str, Signal | SignalError]]) -> list[str]:
    """A line for each signal, and for each file that is none."""
    header = ["signal", "base", "expert", "alpha", "reward", "updates", "GB", "cost"]
    rows = []
    for where, signal in found:
        if isinstance(signal, SignalError):
            rows.append([where, f"damaged: {signal}", *[""] * (len(header) - 2)])
            continue
        about, cost = signal.provenance, signal.cost
        rows.append(
            [
                where,
                _part(signal.base),
                _part(signal.expert),
                f"{signal.alpha:g}",
                f"{about['reward_before']:.3f} to {about['reward_after']:.3f}" if "reward_after" in about else "–",
                str(about.get("updates", "–")),
                short(signal.size_bytes / 1e9),
                span(cost["seconds"]) if "seconds" in cost else "–",
            ]
        )
    return markdown_table(Table("Signals", header, rows))


def described(signal: Signal) -> list[str]:
    """The artefact in words."""
    about, cost = signal.provenance, signal.cost
    lines = [f"{signal.name}, made {signal.created}, alpha {signal.alpha:g}"]
    for role, part in (("base", signal.base), ("expert", signal.expert)):
        lines.append(f"{role:>7}: {_part(part)}, {whole(part.parameters)} parameters, content {part.hash[:12]}")
    lines.append(f"   size: {short(signal.size_bytes / 1e9)} GB" + (", one model" if signal.shares_weights else ""))
    lines.append(f" tokens: {signal.tokens}, tokenizer {signal.tokenizer_hash[:12]}")
    if about:
        settled = SETTLED[about["converged"]]
        lines.append(
            f"   from: {about['run']}, {about['updates']} updates ({about['objective']}) on {dict(about['tasks'])}, "
            f"held-out pass rate {about['reward_before']:.3f} to {about['reward_after']:.3f}, {settled}"
        )
    if cost:
        lines.append(f"   cost: {span(cost['seconds'])}, {whole(cost['generated_tokens'])} tokens generated")
    return lines


def _part(part: Part) -> str:
    return f"{part.path} + {part.adapter}" if part.adapter else part.path


def judged(found: dict[str, Any]) -> list[str]:
    """What `rlx.distillation.measure.figures` says, in words."""
    agreement = "no pair of attempts with different rewards"
    if found["agreement"] is not None:
        agreement = f"{found['agreement']:.3f} of {found['pairs']} pairs are ordered as their rewards (0.5 is chance)"
    return [
        f"size: mean |alpha (log expert - log base)| {found['abs_mean']:.4f} nats over {found['tokens']} tokens of "
        f"{found['samples']} attempts, largest {found['largest']:.2f}",
        f"sharpness: {found['carrying_share']:.1%} of the tokens carry more than 0.1 nats",
        f"agreement with reward: {agreement}; pass rate of the attempts {found['pass_rate']:.3f}",
    ]


def verify(path: str, rest: list[str]) -> dict[str, Any]:
    """Checks the artefact and, with a recipe, measures it. Returns what `rlx signal verify` prints as JSON."""
    signal = read_signal(path)
    check_models(signal)
    result: dict[str, Any] = {"signal": path, "valid": True}
    if any(word.partition("=")[0] == "--config" for word in rest):
        from rlx.distillation.measure import measure  # what only looks at files needs no jax

        own = flags.FlagValues()
        tasks = flags.DEFINE_integer("tasks", 32, "tasks that are attempted", flag_values=own)
        config = config_or_exit(["rlx signal verify", *rest], own, __doc__ or "")
        result |= measure(config, signal, tasks.value)
        if result["tokens"] and not result["largest"]:
            raise SignalError(
                f"signal {signal.name}: log expert - log base is 0 at each of {result['tokens']} tokens of the "
                "recipe's model: the expert learned nothing that shows there"
            )
    elif rest:
        raise ValueError(f"{rest[0]!r}: unexpected; `rlx signal verify SIGNAL` takes --config=RECIPE and its options")
    return result


def calibrated(rest: list[str]) -> list[str]:
    """Runs the search of `rlx.distillation.calibrate` and says what it found."""
    from rlx.distillation.calibrate import described, search  # it trains

    own = flags.FlagValues()
    given = flags.DEFINE_list("lambdas", ["2", "1.5", "1", "0.75", "0.5"], "to try, largest first", flag_values=own)
    updates = flags.DEFINE_integer("updates", 10, "of each run", flag_values=own)
    config = config_or_exit(["rlx signal calibrate", *rest], own, __doc__ or "")
    lams = [_number(word) for word in given.value]
    problems = [
        f"--lambdas={','.join(given.value)}: {word!r} is no number above 0; write for instance --lambdas=2,1,0.5"
        for word, lam in zip(given.value, lams, strict=True)
        if not 0 < lam < math.inf
    ]
    if updates.value < 1:
        problems.append(f"--updates={updates.value}: each lambda needs at least 1 update, e.g. 10")
    if problems:
        raise ConfigError(*problems)
    return described(search(config, lams, updates.value))


def _number(word: str) -> float:
    """NaN for what is none."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="rlx signal", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    made = commands.add_parser("create", help="make one of a base and an expert, or of a run")
    made.add_argument("--to", required=True, help="directory of the signal")
    made.add_argument("--base", default="", help="model directory; a run and an adapter know theirs")
    made.add_argument("--expert", default="", help="model or adapter directory; a run knows its own")
    made.add_argument("--run", default="", help="run that trained the expert: provenance and cost")
    made.add_argument("--alpha", type=float, default=1.0, help="factor on log expert - log base")
    listed = commands.add_parser("list", help="signals in directories")
    listed.add_argument("directories", nargs="*", default=[HOME])
    shown = commands.add_parser("show", help="one signal")
    shown.add_argument("signal")
    shown.add_argument("--json", action="store_true", help="as JSON")
    checked = commands.add_parser("verify", help="check a signal, and measure it with --config=RECIPE")
    checked.add_argument("signal")
    commands.add_parser("calibrate", help="search lambda by short runs of --config=RECIPE")
    return top


def main(argv: list[str] | None = None) -> int:
    """`rlx signal`: 0 when done, 1 for a signal or model that is refused."""
    words, rest = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    if rest and words.command not in ("verify", "calibrate"):
        print(f"rlx signal {words.command}: {rest[0]!r}: unexpected", file=sys.stderr)
        return 2
    match words.command:
        case "create":
            run = Path(words.run) if words.run else None
            print("\n".join(described(create(Path(words.to), words.base, words.expert, run=run, alpha=words.alpha))))
        case "list":
            found = find_signals(words.directories)
            print("\n".join(listing(found)) if found else f"no signals in {', '.join(words.directories)}")
        case "show":
            signal = read_signal(words.signal)
            print(encode(dataclasses.asdict(signal), indent=2) if words.json else "\n".join(described(signal)))
        case "calibrate":
            print("\n".join(calibrated(rest)))
        case "verify":
            result = verify(words.signal, rest)
            print(f"{words.signal}: base, expert and tokenizer are those that it was made of")
            if "tokens" in result:
                print("\n".join(judged(result)))
            print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("signal", sys.argv[1:]))

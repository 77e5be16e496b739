"""Which tasks does the base policy sometimes pass? Attempts until a stated error is reached, and a split of the tasks.

rlx edge --config=configs/quickstart.py --error=0.05 --held_out_similar=20 --to=reports/edge
rlx train --config=configs/quickstart.py --config.tasks.split=reports/edge/edge.json

All tasks of the recipe are attempted by the model it names, or by the newest checkpoint of its run with --checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from tqdm import tqdm

from rlx import assemble, cli
from rlx.config.chat_checks import several_turns
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.envs.graders import GraderPool
from rlx.envs.tasks import build_tasks
from rlx.export import newest
from rlx.metrics.rollout import PASS
from rlx.parallel import runtime
from rlx.prompt_checks import check_prompts
from rlx.proxy.edge import EdgeOptions, Tally, classify, next_attempts, nothing_known
from rlx.proxy.report import Report
from rlx.proxy.split import SplitOptions, evidence, report, split, without_verdict
from rlx.rollout.collect import collect
from rlx.rollout.engine import Engine
from rlx.rollout.fates import graded
from rlx.sessions.environments import Environments
from rlx.types import Group, StopReason, Task

LIMITS = (StopReason.LENGTH, StopReason.SESSION_LIMIT, StopReason.TURN_LIMIT, StopReason.TOOL_LIMIT)
AT_ONCE = 4  # attempts at a task that is sampled further, at least: an engine decodes many as fast as one
OWN_SEED = 3  # of `sampling_of`, beside those of training (0) and evaluation (1)


@dataclasses.dataclass(eq=False)
class Attempts:
    """Asks the engine for attempts at tasks, round by round."""

    config: Config
    model: assemble.Model
    engine: Engine
    environments: Environments
    tasks: Sequence[Task]
    round: int = 0
    limited: np.ndarray = dataclasses.field(init=False)  # attempts of each task that a limit ended

    def __post_init__(self) -> None:
        self.limited = np.zeros(len(self.tasks), np.int64)

    async def ask(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(passes, attempts with a verdict) of each task."""
        asked = [(int(count), np.flatnonzero(wanted == count)) for count in np.unique(wanted[wanted > 0])]
        if several_turns(self.config):  # all together they might hold more than there are sandboxes
            found = [await self._groups(count, tasks) for count, tasks in asked]
        else:
            found = await asyncio.gather(*(self._groups(count, tasks) for count, tasks in asked))
        self.round += 1
        passes, attempts = np.zeros_like(wanted), np.zeros_like(wanted)
        for (_, tasks), groups in zip(asked, found):
            for i, group in zip(tasks, groups, strict=True):
                passes[i] = sum(s.reward >= PASS for s in group.samples)
                attempts[i] = len(group.samples)
                self.limited[i] += sum(s.stop_reason in LIMITS for s in group.samples)
        return passes, attempts

    async def _groups(self, count: int, tasks: np.ndarray) -> list[Group]:
        # A number of its own for every round: the same one would draw the same samples again.
        first = self.round * len(self.tasks)
        sampling = dataclasses.replace(assemble.sampling(self.config), group_size=count, seed=self._seed)
        asked = [(first + int(task), self.tasks[task]) for task in tasks]
        return [graded(group) for group in await collect(self.engine, self.environments, asked, sampling)]

    @property
    def _seed(self) -> int:
        return 2 * self.config.run.seed + OWN_SEED


async def measure(attempts: Attempts, options: EdgeOptions) -> Tally:
    """Attempts until the error is reached, with a bar of the expected error.

    Raises:
      RuntimeError: where the first round gave no verdict.
    """
    tally = nothing_known(len(attempts.tasks))
    async with attempts.environments:
        with tqdm(desc="attempts", unit="", file=sys.stderr) as bar:
            while (asked := next_attempts(tally, options)).any():
                passes, counted = await attempts.ask(asked)
                tally = tally.plus(asked, passes, counted)
                bar.update(int(counted.sum()))
                bar.set_postfix_str(f"expected error {classify(tally, options).expected_error:.3f}")
    return tally


class Found(NamedTuple):
    report: Report
    no_split: str  # why the split that was asked for is impossible; "" = it is in the report


def find(config: Config, options: EdgeOptions, splitting: SplitOptions, *, checkpoint: bool = False) -> Found:
    """The edge tasks of a recipe. Raises ValueError or OSError for tasks or models that cannot be used."""
    runtime.use_compilation_cache(config.run.compilation_cache)
    tasks = [task for part in build_tasks(config.tasks) for task in part]
    model = assemble.load_model(config)
    check_prompts(config, model.tokenizer, tasks)
    restored = newest(config, model) if checkpoint else None
    if checkpoint and restored is None:
        raise ValueError(f"{config.run.path} has no checkpoint; train first, or leave out --checkpoint")
    state = assemble.fresh_state(config, model) if restored is None else restored.state
    version = 0 if restored is None else int(state.version)
    policy = assemble.policy_params(config, model, state.trainable)
    engine = assemble.make_engine(config, model, policy, version)
    with GraderPool(config.grader, sorted({t.grader for t in tasks})) as graders:
        attempts = Attempts(config, model, engine, Environments(config, model.tokenizer, graders), tasks)
        tally = asyncio.run(measure(attempts, options))
    verdicts = classify(tally, options)
    named = [(task.id, task.source) for task in tasks]
    rows = evidence(named, tally, attempts.limited, verdicts, config.rollout.group_size)
    about: dict[str, Any] = {"model": config.model.path, "version": version, "group_size": config.rollout.group_size}
    chosen, no_split = None, ""
    try:
        chosen = split(rows, splitting)
    except ValueError as error:  # the attempts were dear, so they are written all the same
        no_split = str(error)
    return Found(report(rows, verdicts, chosen, options, about, without_verdict(named, tally)), no_split)


def own_flags() -> flags.FlagValues:
    own = flags.FlagValues()
    flags.DEFINE_float("low", 0.1, "least pass rate of an edge task", flag_values=own)
    flags.DEFINE_float("high", 0.9, "largest pass rate of an edge task", flag_values=own)
    flags.DEFINE_float("error", 0.1, "share of tasks that may be misclassified", flag_values=own)
    flags.DEFINE_integer("most", 256, "attempts at one task, at most", flag_values=own)
    flags.DEFINE_integer("at_once", AT_ONCE, "attempts at a task in one round, at least", flag_values=own)
    flags.DEFINE_integer("train", 0, "edge tasks to train on, at most; 0 = all", flag_values=own)
    flags.DEFINE_integer("held_out_similar", 0, "edge tasks held out, of sources that are trained on", flag_values=own)
    flags.DEFINE_integer("held_out_new", 0, "edge tasks held out, of sources that are not", flag_values=own)
    flags.DEFINE_boolean("checkpoint", False, "attempt with the run's newest checkpoint", flag_values=own)
    flags.DEFINE_string("to", "reports/edge", "directory of edge.json, .md, .html and .png", flag_values=own)
    return own


def main(argv: Sequence[str] | None = None) -> int:
    """`rlx edge`: prints what was found and writes it; 1 where the split that was asked for is impossible."""
    own = own_flags()
    config = config_or_exit(list(sys.argv if argv is None else argv), own, __doc__ or "")
    value: dict[str, Any] = own.flag_values_dict()
    options = EdgeOptions(
        value["low"], value["high"], value["error"], most_attempts=value["most"], at_once=value["at_once"]
    )
    splitting = SplitOptions(value["train"], value["held_out_similar"], value["held_out_new"], config.tasks.seed)
    found = find(config, options, splitting, checkpoint=value["checkpoint"])
    written = found.report.write(Path(value["to"]), "edge")
    print("\n".join(found.report.lines))
    print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
    if found.no_split:
        raise ValueError(found.no_split)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("edge", sys.argv[1:]))

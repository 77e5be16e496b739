"""Evaluation on held-out tasks: pass@1 with its Wilson interval, pass@k, by source.

    rlx evaluate --config=configs/quickstart.py --config.run.name=quickstart
evaluates the newest checkpoint of that run, or the model itself where there is none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from rlx import assemble, cli
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config, EvalConfig
from rlx.envs.chat import ChatTokenizer
from rlx.envs.graders import GraderPool
from rlx.envs.tasks import build_tasks
from rlx.export import check_run, newest
from rlx.metrics.rollout import PASS
from rlx.metrics.statistics import pass_at_k, wilson_interval
from rlx.parallel import runtime
from rlx.rollout.collect import Sampling, collect
from rlx.rollout.engine import Engine
from rlx.rollout.fates import graded
from rlx.types import Group, StopReason, Task


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The interval is Wilson's over attempts, as if attempts at one task were independent.

    An attempt whose grading failed is no verdict: it is counted in `failed_gradings` and nowhere else.
    """

    pass_rate: float
    pass_rate_low: float
    pass_rate_high: float
    attempts: int
    failed_gradings: int
    tasks: int
    tokens: int
    reward_mean: float
    response_length_mean: float
    truncated_fraction: float
    pass_at_k: dict[str, float]
    by_source: dict[str, float]

    def scalars(self) -> dict[str, float]:
        """Metrics of the group `eval/`."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        at_k, by_source = own.pop("pass_at_k"), own.pop("by_source")
        values = {f"eval/{name}": float(value) for name, value in own.items()}
        values |= {f"eval/pass_at_{k}": value for k, value in at_k.items()}
        return values | {f"eval/pass_rate_{source}": value for source, value in by_source.items()}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"pass rate {self.pass_rate:.3f} [{self.pass_rate_low:.3f}, {self.pass_rate_high:.3f}] "
            f"({self.attempts} attempts at {self.tasks} held-out tasks)"
        )


async def evaluate(
    engine: Engine,
    graders: GraderPool,
    tokenizer: ChatTokenizer,
    tasks: Sequence[Task],
    config: EvalConfig,
    sampling: Sampling,
) -> tuple[EvalResult, list[Group]]:
    """Attempt every task `sampling.group_size` times. The same seed asks for the same samples at every evaluation."""
    groups = await collect(engine, graders, tokenizer, list(enumerate(tasks)), sampling)
    return summarise(groups, config), groups


def summarise(groups: Sequence[Group], config: EvalConfig) -> EvalResult:
    groups, failed = [graded(g) for g in groups], sum(len(g.samples) - len(graded(g).samples) for g in groups)
    samples = [s for g in groups for s in g.samples]
    if not samples:
        raise ValueError(
            f"all {failed} gradings of the evaluation failed; see samples.jsonl, grade.detail, for the reason"
        )
    passed = [s.reward >= PASS for s in samples]
    low, high = wilson_interval(sum(passed), len(passed), config.confidence)
    counts = [(len(g.samples), sum(s.reward >= PASS for s in g.samples)) for g in groups]
    sources = sorted({g.task.source for g in groups})
    return EvalResult(
        pass_rate=float(np.mean(passed)),
        pass_rate_low=low,
        pass_rate_high=high,
        attempts=len(samples),
        failed_gradings=failed,
        tasks=len(groups),
        tokens=sum(s.num_written for s in samples),
        reward_mean=float(np.mean([s.reward for s in samples])),
        response_length_mean=float(np.mean([s.num_written for s in samples])),
        truncated_fraction=float(np.mean([s.stop_reason is StopReason.LENGTH for s in samples])),
        pass_at_k={
            str(k): float(np.mean([pass_at_k(n, c, k) for n, c in counts if n >= k]))
            for k in config.k
            if any(n >= k for n, _ in counts)
        },
        by_source={
            source: float(np.mean([s.reward >= PASS for s in samples if s.task.source == source])) for source in sources
        },
    )


def evaluate_run(config: Config) -> tuple[int | None, EvalResult]:
    """(version, result) of the newest checkpoint of the run that `config` names; of the model itself, with version
    None, where it has none.

    Raises what `rlx.run.open_training` raises for tasks, model and checkpoint.
    """
    runtime.use_compilation_cache(config.run.compilation_cache)
    if not config.tasks.held_out:
        raise ConfigError("config.tasks.held_out = 0: there is nothing to evaluate on; set at least 1")
    check_run(config)
    train_tasks, held_out = build_tasks(config.tasks)
    model = assemble.load_model(config)
    assemble.check_prompts(config, model.tokenizer, held_out)
    restored = newest(config, model, held_out)
    state = assemble.fresh_state(config, model) if restored is None else restored.state
    if restored is not None:
        # Other tasks under the same settings, as from a changed file: some held out now may have been trained on.
        assemble.task_stream(config, train_tasks).set_state(restored.host["stream"])
    version = None if restored is None else int(state.version)
    policy = assemble.policy_params(config, model, state.trainable)
    engine = assemble.make_engine(config, model, policy, version or 0)
    with GraderPool(config.grader, sorted({t.grader for t in held_out})) as graders:
        job = evaluate(engine, graders, model.tokenizer, held_out, config.eval, assemble.eval_sampling(config))
        return version, asyncio.run(job)[0]


def main(argv: list[str] | None = None) -> int:
    """`rlx evaluate`: prints the result; its last line is JSON."""
    argv = sys.argv if argv is None else argv
    config = config_or_exit(argv, flags.FlagValues(), __doc__ or "")
    version, result = evaluate_run(config)
    which = f"no checkpoint in {config.run.path}: the model itself" if version is None else f"version {version}"
    print(f"{which}: {result}")
    print(json.dumps({"version": version, **result.to_dict()}))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("evaluate", sys.argv[1:]))

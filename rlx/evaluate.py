"""Evaluation on held-out tasks: pass@1 with its Wilson interval, pass@k, by source.

    rlx evaluate --config=configs/quickstart.py --config.run.name=quickstart
evaluates the newest checkpoint of that run, or the model itself where there is none.

    rlx evaluate --watch=runs/quickstart
follows a run from another process and tests its versions as they are saved: `rlx.watch`.
"""

from __future__ import annotations

import asyncio
import json
import sys

from absl import flags

from rlx import assemble, cli, watch
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.envs.graders import GraderPool
from rlx.envs.tasks import build_tasks
from rlx.evaluation import EvalResult, evaluate
from rlx.export import check_run, newest
from rlx.parallel import runtime
from rlx.prompt_checks import check_prompts
from rlx.sessions.environments import Environments


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
    check_prompts(config, model.tokenizer, held_out)
    restored = newest(config, model, held_out)
    state = assemble.fresh_state(config, model) if restored is None else restored.state
    if restored is not None:
        # Other tasks under the same settings, as from a changed file: some held out now may have been trained on.
        assemble.task_stream(config, train_tasks).set_state(restored.host["stream"])
    version = None if restored is None else int(state.version)
    policy = assemble.policy_params(config, model, state.trainable)
    engine = assemble.make_engine(config, model, policy, version or 0)
    with GraderPool(config.grader, sorted({t.grader for t in held_out})) as graders:
        environments = Environments(config, model.tokenizer, graders)

        async def job() -> EvalResult:
            async with environments:
                sampling = assemble.eval_sampling(config)
                return (await evaluate(engine, environments, held_out, config.eval, sampling))[0]

        return version, asyncio.run(job())


def main(argv: list[str] | None = None) -> int:
    """`rlx evaluate`: prints the result; its last line is JSON."""
    argv = sys.argv if argv is None else argv
    if any(word.partition("=")[0] == "--watch" for word in argv[1:]):
        return watch.main(argv[1:])
    config = config_or_exit(argv, flags.FlagValues(), __doc__ or "")
    version, result = evaluate_run(config)
    which = f"no checkpoint in {config.run.path}: the model itself" if version is None else f"version {version}"
    print(f"{which}: {result}")
    print(json.dumps({"version": version, **result.to_dict()}))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("evaluate", sys.argv[1:]))

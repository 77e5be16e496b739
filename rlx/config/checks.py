"""What a configuration must not say: values out of range, and keys that contradict each other or the machine's disk.

Types and choices are `rlx.config.parse`'s. Every section has one function from the configuration to its problem lines;
the objective's rules have a file of their own.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlx.config.chat_checks import chat_problems
from rlx.config.cluster_checks import cluster_problems
from rlx.config.engine_checks import engine_problems
from rlx.config.errors import ConfigError, nearest, said
from rlx.config.frozen_checks import objective_problems
from rlx.config.inference_checks import inference_problems
from rlx.config.length_checks import length_problems
from rlx.config.planning import LEAST_EFFICIENCY
from rlx.config.producer_checks import producer_problems
from rlx.config.sandbox_checks import sandbox_problems
from rlx.config.schema import LINEAR_LAYERS, Config, TaskSourceConfig
from rlx.config.simulation_checks import simulation_problems

# What an implementation of the output head can multiply in, where that is not everything.
HEAD_PRECISIONS = {"reference": ("auto", "bfloat16", "float32"), "mosaic": ("auto", "bfloat16")}

NAME = re.compile(r"[A-Za-z0-9_-]+")

AT_LEAST_ONE = (
    "grader.workers",
    "rollout.tasks_per_update",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.no_signal_limit",
    "engine.slots",
    "engine.context",
    "engine.prefill_rows",
    "engine.steps_per_dispatch",
    "engine.lanes",
    "learner.updates",
    "learner.row_tokens",
    "learner.micro_batch_rows",
    "learner.nonfinite_limit",
    "sft.batch_size",
    "sft.eval_every",
    "sft.save_every",
    "eval.attempts_per_task",
    "eval.watch_nth",
    "checkpoint.every",
    "checkpoint.keep",
    "metrics.histograms_every",
    "metrics.samples_every",
    "cluster.gpus_per_node",
    "cluster.pipeline_rounds",
)
NOT_NEGATIVE = (
    "run.seed",
    "lora.rank",
    "model.attention_block",
    "model.balance_loss",
    "model.router_z_loss",
    "tasks.seed",
    "tasks.held_out",
    "tasks.train",
    "cluster.trainer_nodes",
    "cluster.inference_nodes",
    "cluster.engines",
    "plan.sequence_tokens",
    "rollout.head_size",
    "learner.row_targets",
    "learner.row_prefix",
    "learner.row_samples",
    "learner.warmup_updates",
    "learner.weight_decay",
    "learner.max_grad_norm",
    "sft.steps",
    "sft.batch_rows",
    "eval.every",
    "eval.temperature",
    "metrics.samples_shown",
    "metrics.skip_updates",
)
POSITIVE = (
    "lora.alpha",
    "grader.timeout_s",
    "learner.learning_rate",
    "learner.eps",
    "sft.learning_rate",
)


def check(config: Config, *, simulated: bool = False) -> None:
    """Raises ConfigError with every problem of `config`: a line each, that names the key, its value and the way out.

    simulated: nothing runs for real, so the files of model, tasks and SFT need not be there.
    """
    ranges = (_finite, _ranges, _fractions)
    sections = (
        _limits,
        _run,
        _model,
        _experts,
        _lora,
        _tasks,
        chat_problems,
        _rollout,
        sandbox_problems,
        producer_problems,
        engine_problems,
        inference_problems,
        length_problems,
        _learner,
        objective_problems,
        _sft,
        _eval,
        _simulate,
        *(() if simulated else (cluster_problems,)),
    )
    used = [s for s in (*ranges, *sections) if not (simulated and s in (_model, _tasks, _sft))]
    problems = [problem for section in used for problem in section(config)]
    if problems:
        raise ConfigError(*problems)


def _finite(config: Config) -> list[str]:
    numbers = ((key, value) for key, value in _leaves(dataclasses.asdict(config), "") if isinstance(value, float))
    return [said(key, value, "must be a finite number") for key, value in numbers if not math.isfinite(value)]


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _ranges(config: Config) -> list[str]:
    rules = (
        (AT_LEAST_ONE, "must be at least 1", lambda v: v >= 1),
        (NOT_NEGATIVE, "must be 0 or more", lambda v: v >= 0),
        (POSITIVE, "must be above 0", lambda v: v > 0),
    )
    values = [(key, attrgetter(key)(config), demand, holds) for keys, demand, holds in rules for key in keys]
    return [said(key, value, demand) for key, value, demand, holds in values if not holds(value)]


def _limits(config: Config) -> list[str]:
    rollout, samples = config.rollout, config.rollout.tasks_per_update * config.rollout.group_size
    rules = (
        ("grader.timeout_s", config.grader.timeout_s, 86_400.0, "a day is the longest limit"),
        ("engine.steps_per_dispatch", config.engine.steps_per_dispatch, 1024, "a finished slot waits for the others"),
        ("learner.micro_batch_rows", config.learner.micro_batch_rows, samples, "an update has no more samples"),
    )
    problems = [said(key, value, f"{why}; set at most {most}") for key, value, most, why in rules if value > most]
    if 0 < rollout.temperature < 1e-3:
        problems.append(said("rollout.temperature", rollout.temperature, "logits would overflow; set at least 0.001"))
    return problems


def _fractions(config: Config) -> list[str]:
    learner = config.learner
    rules = (
        ("learner.b1", learner.b1, 0 <= learner.b1 < 1, "must be in [0, 1)"),
        ("learner.b2", learner.b2, 0 <= learner.b2 < 1, "must be in [0, 1)"),
        (
            "learner.final_learning_rate_fraction",
            learner.final_learning_rate_fraction,
            0 <= learner.final_learning_rate_fraction <= 1,
            "must be in [0, 1]",
        ),
        (
            "plan.efficiency",
            config.plan.efficiency,
            LEAST_EFFICIENCY <= config.plan.efficiency <= 1,
            f"must be in [{LEAST_EFFICIENCY}, 1]",
        ),
        (
            "sft.validation_fraction",
            config.sft.validation_fraction,
            0 <= config.sft.validation_fraction < 1,
            "must be in [0, 1)",
        ),
        ("eval.confidence", config.eval.confidence, 0 < config.eval.confidence < 1, "must be in (0, 1), e.g. 0.95"),
    )
    return [said(key, value, demand) for key, value, holds, demand in rules if not holds]


def _run(config: Config) -> list[str]:
    problems = []
    if config.run.name in ("", ".", "..") or "/" in config.run.name:
        problems.append(said("run.name", config.run.name, "must be one folder name, below config.run.directory"))
    if not config.run.directory:
        problems.append(said("run.directory", "", "must be a folder, e.g. 'runs'; '.' is the current one"))
    if config.run.seed >= 2**32:
        problems.append(said("run.seed", config.run.seed, "must be below 2**32"))
    return problems


def _model(config: Config) -> list[str]:
    path, way_out = config.model.path, "give a Hugging Face directory; `make model` makes models/smollm2-135m-instruct"
    if not path:
        return [said("model.path", path, f"names no model; {way_out}")]
    if not Path(path).is_dir():
        return [said("model.path", path, f"no such directory; {way_out}")]
    if not (Path(path) / "config.json").is_file():
        return [said("model.path", path, f"has no config.json, so it is no Hugging Face checkpoint; {way_out}")]
    return []


def _experts(config: Config) -> list[str]:
    demand = "balances by the routes that engines record; set config.model.replay_routes = True too"
    wrong = config.model.balance_packing and not config.model.replay_routes
    return [said("model.balance_packing", True, demand)] if wrong else []


def _lora(config: Config) -> list[str]:
    targets = config.lora.targets
    problems = []
    for i, name in enumerate(targets):
        # What a pattern means depends on the model; names with a comma between them are none.
        if (name.isidentifier() or "," in name) and name not in LINEAR_LAYERS:
            close = nearest(name, LINEAR_LAYERS)
            hint = f"; the nearest is {close!r}" if close else ""
            problems.append(said(f"lora.targets[{i}]", name, f"must be one of {', '.join(LINEAR_LAYERS)}{hint}"))
    if repeated := _repeated(targets):
        problems.append(said("lora.targets", targets, f"names {', '.join(repeated)} twice"))
    if config.lora.rank > 0 and not targets:
        problems.append(said("lora.targets", targets, "must name a layer; config.lora.rank = 0 trains all parameters"))
    return problems


def _tasks(config: Config) -> list[str]:
    tasks, sources = config.tasks, config.tasks.sources
    if not sources:
        return [said("tasks.sources", {}, "no task source; a recipe adds one: c.tasks.sources.NAME = source(...)")]
    problems = [problem for name, source in sources.items() for problem in _source(name, source)]
    for name in sources:
        if name in ("low", "high") or not NAME.fullmatch(name):
            why = "the name of a source is part of metric names: letters, digits, _ and -, and neither low nor high"
            problems.append(said(f"tasks.sources.{name}", name, why))
    total = sum(source.size for source in sources.values())
    if not tasks.split and all(source.dataset for source in sources.values()) and tasks.held_out >= total:
        problems.append(said("tasks.held_out", tasks.held_out, f"leaves none of the {total} tasks to train on"))
    return problems


def _source(name: str, source: TaskSourceConfig) -> list[str]:
    key = f"tasks.sources.{name}"
    problems = []
    if "/" in name:
        problems.append(f"config.{key}: a source's name must not hold '/', task ids are <source>/<index>")
    if bool(source.dataset) == bool(source.path):
        given = f"dataset = {source.dataset!r} and path = {source.path!r}"
        problems.append(f"config.{key} has {given}: set exactly one of the two")
    if source.path and not Path(source.path).is_file():
        problems.append(said(f"{key}.path", source.path, "no such file"))
    if source.size < 0 or (source.dataset and source.size == 0):
        least = "at least 1 for a dataset" if source.dataset else "0 (the whole file) or more"
        problems.append(said(f"{key}.size", source.size, f"must be {least}"))
    if not source.weight > 0:
        problems.append(said(f"{key}.weight", source.weight, "must be above 0; or leave the source out"))
    return problems


def _rollout(config: Config) -> list[str]:
    if config.rollout.group_size == 1 and config.rollout.filter_no_signal:
        why = "drops every group of one sample; set it to False or config.rollout.group_size to at least 2"
        return [said("rollout.filter_no_signal", True, why)]
    return []


def _learner(config: Config) -> list[str]:
    learner = config.learner
    problems = []
    if learner.warmup_updates > learner.updates:
        why = f"must be at most config.learner.updates = {learner.updates}"
        problems.append(said("learner.warmup_updates", learner.warmup_updates, why))
    fraction = learner.final_learning_rate_fraction
    if learner.schedule == "constant" and fraction != 0:
        why = "means nothing under config.learner.schedule = 'constant'; set 0.0, or the schedule to 'cosine'"
        problems.append(said("learner.final_learning_rate_fraction", fraction, why))
    served = HEAD_PRECISIONS.get(learner.logprob_implementation)
    if served and learner.head_precision not in served:
        why = (
            f"cannot be had with config.learner.logprob_implementation = {learner.logprob_implementation!r}; "
            f"set one of {', '.join(served)}, or the implementation to 'auto'"
        )
        problems.append(said("learner.head_precision", learner.head_precision, why))
    if config.model.dtype == "bfloat16" and learner.head_precision not in ("auto", "bfloat16"):
        why = (
            "multiplies numbers that config.model.dtype = 'bfloat16' has already rounded; "
            "set the model's dtype to 'float32', or this to 'auto'"
        )
        problems.append(said("learner.head_precision", learner.head_precision, why))
    return problems


def _sft(config: Config) -> list[str]:
    sft = config.sft
    problems = []
    if sft.steps > 0 and not Path(sft.path).is_file():
        why = f"config.sft.steps = {sft.steps} needs a JSONL file of question and response; or set the steps to 0"
        problems.append(said("sft.path", sft.path, why))
    if sft.path and not sft.steps:
        why = f"config.sft.path = {sft.path!r} is not read; set the steps, or the path to ''"
        problems.append(said("sft.steps", 0, why))
    if sft.validation_path and not Path(sft.validation_path).is_file():
        problems.append(said("sft.validation_path", sft.validation_path, "no such file"))
    if sft.validation_path and sft.validation_fraction:
        why = f"config.sft.validation_path = {sft.validation_path!r} is the validation already; set this to 0"
        problems.append(said("sft.validation_fraction", sft.validation_fraction, why))
    if sft.batch_rows % config.learner.micro_batch_rows:
        why = f"must be a multiple of config.learner.micro_batch_rows = {config.learner.micro_batch_rows}, or 0"
        problems.append(said("sft.batch_rows", sft.batch_rows, why))
    return problems


def _eval(config: Config) -> list[str]:
    evaluation = config.eval
    problems = []
    if not evaluation.k or min(evaluation.k) < 1 or _repeated(evaluation.k):
        problems.append(said("eval.k", evaluation.k, "must be distinct counts of at least 1, e.g. (1,)"))
    elif max(evaluation.k) > evaluation.attempts_per_task:
        why = f"pass@k needs k at most config.eval.attempts_per_task = {evaluation.attempts_per_task}"
        problems.append(said("eval.k", evaluation.k, why))
    if evaluation.temperature == 0 and evaluation.attempts_per_task > 1:
        why = "greedy attempts at a task are all the same; set config.eval.attempts_per_task to 1, or this above 0"
        problems.append(said("eval.temperature", evaluation.temperature, why))
    if evaluation.every > 0 and config.tasks.held_out == 0:
        why = "there is nothing to evaluate on; set config.tasks.held_out above 0, or this to 0"
        problems.append(said("eval.every", evaluation.every, why))
    return problems


def _simulate(config: Config) -> list[str]:
    return simulation_problems(config.simulate)


def _repeated(values: Iterable[Any]) -> list[str]:
    values = list(values)
    return sorted({str(value) for value in values if values.count(value) > 1})

"""Two configurations side by side: which settings must change with the model, be searched again, or stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from rlx.config.identity import flat
from rlx.metrics.view import setting
from rlx.proxy.report import Report, Table
from rlx.proxy.runs import model_name

Kind = Literal["must change", "search again", "must stay", "carries over"]
Tree = Mapping[str, Any]


class Rule(NamedTuple):
    """Of every key that is one of `keys` or below it; the first rule that fits a key is its own."""

    keys: tuple[str, ...]
    kind: Kind
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(("learner.learning_rate",), "search again", "the stable step depends on the trainable share of the "
         "parameters and on the share of groups that carry reward"),
    Rule(("producer.max_policy_lag",), "search again", "how old samples get depends on the model's speed, how old "
         "they may be on how fast its policy moves"),
    Rule(("producer.sessions_in_flight",), "search again", "it fills the engines; more makes samples older"),
    Rule(("learner.warmup_updates",), "search again", "it goes with the learning rate"),
    Rule(("lora.rank", "lora.alpha"), "must stay", "rank and scale are part of the update rule"),
    Rule(("lora",), "must change", "the layers that there are to adapt are the model's"),
    Rule(("model", "chat"), "must change", "it is the model, and how it is spoken to"),
    Rule(("cluster", "inference", "plan"), "must change", "nodes and layout follow the model's size"),
    Rule(("engine", "producer.engine_admission", "producer.http_admission", "producer.max_concurrent_samples"),
         "must change", "what an engine holds depends on the model's memory"),
    Rule(("producer.train_token_limit", "producer.session_token_limit", "producer.over_limit",
          "producer.sessions_beyond_training", "rollout.max_new_tokens"),
         "must change", "limits follow from memory and from how much the model writes; a stop below the training limit "
         "keeps long sessions in the loss"),
    Rule(("learner.row_tokens", "learner.row_targets", "learner.micro_batch_rows", "learner.prefix_sharing",
          "learner.row_samples", "learner.row_prefix", "learner.logprob_implementation", "learner.head_precision"),
         "must change", "how the same update fits into memory"),
    Rule(("tasks.train", "tasks.split", "tasks.held_out"), "must change", "edge tasks are those that this model "
         "sometimes passes; another model has others"),
    Rule(("simulate",), "must change", "durations and lengths are measured on the model"),
    Rule(("frozen",), "must stay", "teachers and signals are what is learned from"),
    Rule(("collapse",), "search again", "bounds follow the lengths and the entropy of the model's own responses"),
    Rule(("objective", "learner", "rollout"), "must stay", "it is the algorithm that is being compared"),
    Rule(("tasks", "tools", "grader", "sandbox"), "carries over", "tasks, sandboxes and graders do not know the model"),
    Rule(("producer",), "carries over", "timeouts and repairs belong to sandboxes and servers"),
    Rule(("eval", "audit", "checkpoint", "metrics", "run", "sft"), "carries over", "measuring and recording do not "
         "know the model"),

)  # fmt: skip


class Row(NamedTuple):
    key: str
    first: Any
    second: Any
    kind: Kind
    reason: str
    differs: bool


@dataclasses.dataclass(frozen=True)
class Side:
    """One configuration: its name, its settings as nested dicts, and its parameters as far as they were counted."""

    name: str
    tree: Tree
    total: int | None = None
    trainable: int | None = None
    uncounted: str = ""  # why not


class Setting(NamedTuple):
    """A row of the table for people: several keys in the words that people use."""

    title: str
    keys: tuple[str, ...]
    show: Callable[[Side], str]


def rows(first: Tree, second: Tree) -> list[Row]:
    """Every key of either, with its rule."""
    a, b = flat(first), flat(second)
    keys = dict.fromkeys([*a, *b])
    return [Row(key, a.get(key), b.get(key), *rule_of(key), a.get(key) != b.get(key)) for key in keys]


def rule_of(key: str) -> tuple[Kind, str]:
    """Raises KeyError for a section that no rule is about."""
    for rule in RULES:
        if any(key == name or key.startswith(f"{name}.") for name in rule.keys):
            return rule.kind, rule.reason
    raise KeyError(f"rlx/proxy/diff.py has no rule for {key!r}")


def report(first: Side, second: Side) -> Report:
    """What `rlx diff` writes."""
    every = rows(first.tree, second.tree)
    broken = [row for row in every if row.differs and row.kind == "must stay"]
    counts = {kind: sum(r.differs for r in every if r.kind == kind) for kind in dict.fromkeys(r.kind for r in RULES)}
    lines = [f"{sum(r.differs for r in every)} of {len(every)} settings differ: {_counted(counts)}"]
    lines.append(
        f"The algorithm differs in {', '.join(r.key for r in broken)}: what is learned from one does not carry over"
        if broken
        else "The algorithm is the same"
    )
    lines += [f"{side.name}: parameters not counted, {side.uncounted}" for side in (first, second) if side.uncounted]
    table = [[s.title, s.show(first), s.show(second), *_kind(s, every)] for s in SETTINGS if _known(s, first, second)]
    differing = [[r.key, _shown(r.first), _shown(r.second), r.kind, r.reason] for r in every if r.differs]
    names = [first.name, second.name]
    return Report(
        title=f"{first.name} and {second.name}",
        lines=lines,
        tables=[
            Table("The two runs", ["setting", *names, "kind", "why"], table),
            Table("Every setting that differs", ["key", *names, "kind", "why"], differing),
        ],
        figures=[],
        record={
            "sides": [_about(side) for side in (first, second)],
            "settings": [dict(zip(("setting", "first", "second", "kind", "reason"), row)) for row in table],
            "keys": [row._asdict() for row in every],
            "algorithm_differs_in": [row.key for row in broken],
        },
    )


def _about(side: Side) -> dict[str, Any]:
    share = side.trainable / side.total if side.total and side.trainable is not None else None
    counts = {"total_parameters": side.total, "trainable_parameters": side.trainable, "trainable_share": share}
    return {"name": side.name, **counts}


def _counted(counts: Mapping[Kind, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _known(shown: Setting, *sides: Side) -> bool:
    """Whether both have the row's settings: a run may be of a version that lacked one."""
    return all(setting(side.tree, key) is not None for side in sides for key in shown.keys)


def _kind(shown: Setting, every: list[Row]) -> list[str]:
    """The strictest rule among the row's keys."""
    order: list[Kind] = ["must stay", "search again", "must change", "carries over"]
    own = [row for row in every if row.key in shown.keys]
    strictest = min(own, key=lambda row: (not row.differs, order.index(row.kind)))
    return [strictest.kind, strictest.reason]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def amount(count: float) -> str:
    """2.78T, 24.5B, 36.4M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _get(side: Side, key: str) -> Any:
    return setting(side.tree, key)


def _model(side: Side) -> str:
    name = model_name(str(_get(side, "model.path"))) or "not named"
    return f"{name}, {amount(side.total)}" if side.total else name


def _adapter(side: Side) -> str:
    rank = _get(side, "lora.rank")
    trained = f"LoRA r{rank} on {', '.join(_get(side, 'lora.targets'))}" if rank else "every parameter"
    if side.total and side.trainable is not None:
        trained += f": {amount(side.trainable)} = {side.trainable / side.total:.2%}"
    return trained


def _nodes(side: Side) -> str:
    train, infer = _get(side, "cluster.trainer_nodes"), _get(side, "cluster.inference_nodes")
    return f"{train + infer} of {_get(side, 'cluster.gpus_per_node')} GPUs: {train} trainer + {infer} inference"


def _engines(side: Side) -> str:
    count, layout = _get(side, "cluster.engines"), _get(side, "cluster.engine_layout")
    admission = _get(side, "producer.engine_admission") or _get(side, "engine.slots")
    return f"{count or 1} x {layout or '1 GPU'}, at most {admission} requests each"


def _limit(key: str, none: str, words: str) -> Callable[[Side], str]:
    return lambda side: f"{words}{value:,} tokens" if (value := _get(side, key)) else none


def _validation(side: Side) -> str:
    every, nth = _get(side, "eval.every"), _get(side, "eval.watch_nth")
    where = f"in the training job, every {every} updates" if every else f"a separate job, every {nth}. saved version"
    return f"{where}; {_get(side, 'tasks.held_out')} held-out tasks x {_get(side, 'eval.attempts_per_task')}"


def _plain(key: str) -> Callable[[Side], str]:
    return lambda side: str(_get(side, key))


def _algorithm(side: Side) -> str:
    names = ("advantage", "loss", "tis_cap", "centering", "aggregation")
    return ", ".join(f"{name} {_get(side, f'objective.{name}')}" for name in names)


SETTINGS: tuple[Setting, ...] = (
    Setting("model", ("model.path",), _model),
    Setting("adapter", ("lora.targets", "lora.experts", "lora.rank"), _adapter),
    Setting("thinking", ("chat.thinking",), _plain("chat.thinking")),
    Setting("nodes", ("cluster.trainer_nodes", "cluster.inference_nodes"), _nodes),
    Setting(
        "trainer layout",
        ("cluster.trainer_layout",),
        lambda side: _get(side, "cluster.trainer_layout") or "one device",
    ),
    Setting("engines", ("cluster.engines", "cluster.engine_layout", "engine.slots"), _engines),
    Setting("learning rate (Adam)", ("learner.learning_rate",), _plain("learner.learning_rate")),
    Setting(
        "batch",
        ("rollout.tasks_per_update", "rollout.group_size"),
        lambda side: f"{_get(side, 'rollout.tasks_per_update')} tasks x {_get(side, 'rollout.group_size')} samples",
    ),
    Setting("sessions in flight", ("producer.sessions_in_flight",), _plain("producer.sessions_in_flight")),
    Setting("policy lag", ("producer.max_policy_lag",), _plain("producer.max_policy_lag")),
    Setting("engine context", ("engine.context",), _limit("engine.context", "none", "")),
    Setting(
        "training sample limit", ("producer.train_token_limit",), _limit("producer.train_token_limit", "a row", "")
    ),
    Setting("session stop", ("producer.session_token_limit",), _limit("producer.session_token_limit", "none", "at ")),
    Setting(
        "tasks",
        ("tasks.train", "tasks.split"),
        lambda side: (
            f"{_get(side, 'tasks.train') or 'all'} edge tasks"
            + (f" of {split}" if (split := _get(side, "tasks.split")) else "")
        ),
    ),
    Setting("validation", ("eval.every", "eval.watch_nth"), _validation),
    Setting("algorithm", ("objective.advantage", "objective.loss", "objective.tis_cap"), _algorithm),
)

"""Which changes would make a plan fit, smallest first: one key, then a layout, then several, then more devices.

Each is a recipe that its checks accept: keys that are tied to one another change together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlx.config.checks import check
from rlx.config.errors import ConfigError
from rlx.config.schema import Config
from rlx.parallel.layout import Layout, nearest, parse_layout, rounds_of, unsupported_reason
from rlx.planning.case import Case
from rlx.planning.engine import embedded
from rlx.planning.estimate import memory
from rlx.planning.hardware import DEVICES, Device

LAYOUTS = 12  # of as many devices, the nearest
LEAST_TOKENS = 1024  # of a row
LEAST_BLOCK = 128  # tokens of a block of scores
MOST_NODES = 64  # times as many devices as planned

Keys = dict[str, Any]  # of the recipe, with the values that they would have


class Change(NamedTuple):
    said: str  # what to set
    bytes: int  # of a device, then
    keys: Keys


def changes(case: Case, device: Device, most: int = 3) -> list[Change]:
    """Up to `most` that fit `device`; nothing where the plan fits as it is."""
    if needed(case) <= device.usable:
        return []
    found: list[Change] = []
    searches = [*((one, 1) for one in _single(case)), *((many, most) for many in _many(case))]
    for candidates, count in searches:
        found += itertools.islice(_fitting(case, candidates, device), min(count, most - len(found)))
    bigger = [d for d in DEVICES.values() if d.usable > device.usable and needed(case) <= d.usable]
    found += [Change(f"plan.device = '{d.name}'", needed(case), {"plan.device": d.name}) for d in bigger]
    return found[:most]


def _fitting(case: Case, candidates: Iterator[Keys], device: Device) -> Iterator[Change]:
    """The first of those that differ in numbers alone."""
    seen = set()
    for keys in candidates:
        kind = (frozenset(keys), keys.get("cluster.trainer_layout"))
        if kind not in seen and (change := _change(case, keys, device)) is not None:
            seen.add(kind)
            yield change


def needed(case: Case) -> int:
    """Bytes of a device."""
    state, served = embedded(case.config, case.arch)
    return memory(case, engine=state, served=served).total


def changed(case: Case, keys: Keys) -> Case:
    config = case.config
    for key, value in keys.items():
        config = _set(config, key.split("."), value)
    tokens = keys.get("learner.row_tokens", case.tokens)
    layout = keys.get("cluster.trainer_layout")
    return dataclasses.replace(
        case,
        config=config,
        layout=case.layout if layout is None else parse_layout(layout),
        remat=keys.get("model.remat", case.remat),
        rows=keys.get("learner.micro_batch_rows", case.rows),
        tokens=tokens,
        targets=min(case.targets, tokens),
    )


def _set(section: Any, names: list[str], value: Any) -> Any:
    first, *rest = names
    return dataclasses.replace(section, **{first: _set(getattr(section, first), rest, value) if rest else value})


def _change(case: Case, keys: Keys, device: Device) -> Change | None:
    """None where it does not fit, or where the recipe's checks or the layout's refuse it."""
    other = changed(case, keys)
    if unsupported_reason(other.layout, other.sizes) is not None:
        return None
    if other.layout.pp > 1 and other.config.model.replay_routes:
        return None
    if not _accepted(other.config) or (size := needed(other)) > device.usable:
        return None
    return Change(_said(case, other, keys), size, keys)


def _accepted(config: Config) -> bool:
    try:
        check(config, simulated=True)
    except ConfigError:
        return False
    return True


def _said(case: Case, other: Case, keys: Keys) -> str:
    more = f"{other.layout.devices} devices: " if other.layout.devices != case.layout.devices else ""
    notes = {
        "engine.context": "longer sessions end",
        "learner.row_tokens": "longer samples cannot be trained",
        "engine.kind": "on GPUs of their own",
    }
    why = "; ".join(note for key, note in notes.items() if key in keys)
    return more + ", ".join(f"{key} = {value!r}" for key, value in keys.items()) + (f" ({why})" if why else "")


# ---------------------------------------------------------------------------------------------------------- candidates


def _single(case: Case) -> Iterator[Iterator[Keys]]:
    """One key of the recipe, with those that are tied to it; the first that fits is enough."""
    yield _remat(case)
    yield _streams(case)
    yield _ring(case)
    yield _rounds(case)
    yield _rows(case)
    yield _blocks(case)
    yield _slots(case)
    yield _contexts(case)
    yield _engines(case)
    yield _tokens(case)


def _many(case: Case) -> Iterator[Iterator[Keys]]:
    yield _layouts(case)
    yield _several(case)
    yield _more_devices(case)


def _remat(case: Case) -> Iterator[Keys]:
    if case.remat != "layer":
        yield {"model.remat": "layer"}


def _streams(case: Case) -> Iterator[Keys]:
    """Tokens over tp too, between products."""
    if case.layout.tp > 1 and not case.config.cluster.sequence_parallel:
        yield {"cluster.sequence_parallel": True}


def _ring(case: Case) -> Iterator[Keys]:
    """Keys and values of a device's own tokens alone."""
    if case.layout.cp > 1 and not case.ring:
        yield {"cluster.context_parallel": "ring"}


def _blocks(case: Case) -> Iterator[Keys]:
    """Fewer scores at once."""
    block = (case.attention_block(accelerator=True) or case.tokens) // 2
    while block >= LEAST_BLOCK:
        yield {"model.attention_block": block}
        block //= 2


def _rounds(case: Case) -> Iterator[Keys]:
    """No second copy of a stage's weights."""
    if case.rounds > 1:
        yield {"cluster.pipeline_rounds": 1}


def _rows(case: Case) -> Iterator[Keys]:
    least = _least_rows(case.layout, case.rounds)
    rows = case.rows // 2 // least * least
    while rows:
        yield {"learner.micro_batch_rows": rows}
        rows = rows // 2 // least * least


def _has_cache(case: Case) -> bool:
    return embedded(case.config, case.arch)[0] > 0


def _slots(case: Case) -> Iterator[Keys]:
    """Fewer sequences at once in the embedded engine."""
    engine = case.config.engine
    each = engine.slots // engine.lanes // 2 if _has_cache(case) else 0  # of a lane
    while each:
        rows: Keys = {"engine.prefill_rows": each} if engine.prefill_rows > each else {}
        yield {"engine.slots": each * engine.lanes} | rows
        each //= 2


def _contexts(case: Case) -> Iterator[Keys]:
    context = case.config.engine.context // 2 if _has_cache(case) else 0
    while context >= LEAST_TOKENS:
        yield _shorter_context(case.config, context)
        context //= 2


def _shorter_context(config: Config, context: int) -> Keys:
    keys: Keys = {"engine.context": context}
    new = config.rollout.max_new_tokens
    if new >= context:
        keys["rollout.max_new_tokens"] = new = context // 2
    if config.producer.session_token_limit > context - new:
        keys["producer.session_token_limit"] = context - new
    if config.engine.prefill_buckets[-1] > context:
        keys["engine.prefill_buckets"] = tuple(b for b in config.engine.prefill_buckets if b < context) + (context,)
    return keys


def _engines(case: Case) -> Iterator[Keys]:
    """Engines that are not in the trainer's process."""
    devices = case.layout.devices
    if not _has_cache(case):
        return
    keys: Keys = {"engine.kind": "sglang"} | ({"engine.lanes": 1} if case.config.engine.lanes > 1 else {})
    if devices < case.config.cluster.gpus_per_node:  # there are others beside the trainer's
        yield keys | {"inference.count": 1, "inference.first_gpu": devices}
    else:
        yield keys | {"inference.addresses": ("http://HOST:30000",)}


def _tokens(case: Case) -> Iterator[Keys]:
    tokens = case.tokens // 2
    while tokens >= LEAST_TOKENS:
        yield _shorter_rows(case.config, tokens)
        tokens //= 2


def _shorter_rows(config: Config, tokens: int) -> Keys:
    keys: Keys = {"learner.row_tokens": tokens}
    limits = {
        "learner.row_targets": config.learner.row_targets,
        "producer.train_token_limit": config.producer.train_token_limit,
        "plan.sequence_tokens": config.plan.sequence_tokens,
    }
    keys |= {key: tokens for key, limit in limits.items() if limit > tokens}
    if config.learner.row_samples:
        keys |= {"learner.row_samples": 0, "learner.row_prefix": 0}
    return keys | (_shorter_context(config, tokens) if config.engine.context > tokens else {})


def _layouts(case: Case) -> Iterator[Keys]:
    """Of as many devices. With more dp ZeRO cuts weights and optimizer further."""
    for layout in nearest(case.layout, dataclasses.replace(case.sizes, rows=0, rounds=1, ring=False), LAYOUTS):
        if layout != case.layout:
            yield _laid_out(case, layout)


def _laid_out(case: Case, layout: Layout) -> Keys:
    keys: Keys = {"cluster.trainer_layout": str(layout)}
    rounds = rounds_of(case.sizes.periods, layout, case.rounds) if layout.pp > 1 else 1
    if rounds != case.rounds:
        keys["cluster.pipeline_rounds"] = rounds
    if layout.cp == 1 and case.config.cluster.context_parallel == "ring":
        keys["cluster.context_parallel"] = "gather"
    if case.rows % (least := _least_rows(layout, rounds)):
        keys["learner.micro_batch_rows"] = max(case.rows // least, 1) * least
    each, cluster = case.config.cluster.gpus_per_node, case.config.cluster
    if cluster.trainer_nodes > 1 and cluster.trainer_nodes * each == case.layout.devices != layout.devices:
        keys["cluster.trainer_nodes"] = layout.devices // each
    return keys


def _least_rows(layout: Layout, rounds: int) -> int:
    """Of a micro-batch."""
    return layout.dp * (layout.pp if rounds > 1 else 1)


def _several(case: Case) -> Iterator[Keys]:
    """Everything recomputed and as few rows as there can be, with a smaller engine, fewer tokens, other layouts."""
    yield from _with_least(case, {})
    for keys in _layouts(case):
        yield from _with_least(case, keys)


def _with_least(case: Case, keys: Keys) -> Iterator[Keys]:
    other = changed(case, keys)
    keys = keys | next(_remat(other), {})
    if (least := _least_rows(other.layout, other.rounds)) < other.rows:
        keys = keys | {"learner.micro_batch_rows": least}
    yield from _smaller(changed(case, keys), keys)


def _smaller(case: Case, keys: Keys) -> Iterator[Keys]:
    """keys: what `case` has been changed by."""
    yield keys
    yield from (keys | fewer for fewer in _slots(case))
    yield from (keys | shorter for shorter in _tokens(case))
    for elsewhere in _engines(case):
        yield keys | elsewhere
        yield from (keys | elsewhere | shorter for shorter in _tokens(case))


def _more_devices(case: Case) -> Iterator[Keys]:
    """Twice as many, and so on: more of them along each axis."""
    factor = 2
    while factor <= MOST_NODES:
        for axis in ("dp", "cp", "pp", "tp"):
            layout = dataclasses.replace(case.layout, **{axis: case.layout.size(axis) * factor})
            try:
                _ = layout.expert_axes
            except ValueError:
                continue
            keys = _laid_out(case, layout)
            yield from _smaller(changed(case, keys), keys)
        factor *= 2

"""Which changes would make a plan fit, smallest first: one key, then a layout, then several, then more devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from rlx.models.placed import sizes_of
from rlx.parallel.layout import Layout, nearest, unsupported_reason
from rlx.planning.case import Case
from rlx.planning.estimate import memory
from rlx.planning.hardware import DEVICES, Device

LAYOUTS = 12  # of as many devices, the nearest
LEAST_TOKENS = 1024  # of a row
MOST_NODES = 64  # times as many devices as planned


class Change(NamedTuple):
    said: str  # what to set
    bytes: int  # of a device, then


def changes(case: Case, device: Device, engine: int, served: int, most: int = 3) -> list[Change]:
    """Up to `most` that fit `device`; nothing where the plan fits as it is."""
    size = lambda other: memory(other, engine=engine, served=served).total  # noqa: E731
    if size(case) <= device.usable:
        return []
    found: list[Change] = []
    for candidates in (_single(case), _layouts(case), _several(case), _more_devices(case)):
        for said, other in candidates:
            possible = unsupported_reason(other.layout, sizes_of(other.arch, other.tokens, other.rows)) is None
            if possible and (needed := size(other)) <= device.usable:
                found.append(Change(said, needed))
            if len(found) == most:
                return found
    bigger = [d for d in DEVICES.values() if d.usable > device.usable and size(case) <= d.usable]
    found += [Change(f"plan.device = '{d.name}'", size(case)) for d in bigger]
    return found[:most]


def _single(case: Case) -> Iterator[tuple[str, Case]]:
    """One key of the recipe."""
    yield from _remat(case)
    yield from _rows(case)
    yield from _tokens(case)


def _remat(case: Case) -> Iterator[tuple[str, Case]]:
    if case.remat != "layer":
        yield "model.remat = 'layer'", dataclasses.replace(case, remat="layer")


def _rows(case: Case) -> Iterator[tuple[str, Case]]:
    rows = case.rows // 2
    while rows >= case.layout.dp:
        yield f"learner.micro_batch_rows = {rows}", dataclasses.replace(case, rows=rows)
        rows //= 2


def _tokens(case: Case) -> Iterator[tuple[str, Case]]:
    tokens = case.tokens // 2
    while tokens >= LEAST_TOKENS:
        said = f"learner.row_tokens = {tokens} (longer samples cannot be trained)"
        yield said, dataclasses.replace(case, tokens=tokens, targets=min(case.targets, tokens))
        tokens //= 2


def _layouts(case: Case) -> Iterator[tuple[str, Case]]:
    """Of as many devices. With more dp ZeRO cuts weights and optimizer further."""
    for layout in nearest(case.layout, sizes_of(case.arch, case.tokens, 0), LAYOUTS):
        yield from _as(case, layout)


def _as(case: Case, layout: Layout) -> Iterator[tuple[str, Case]]:
    rows = max(case.rows, layout.dp)
    said = f"cluster.trainer_layout = '{layout}'"
    if rows != case.rows:
        said += f", learner.micro_batch_rows = {rows}"
    if layout != case.layout:
        yield said, dataclasses.replace(case, layout=layout, rows=rows)


def _several(case: Case) -> Iterator[tuple[str, Case]]:
    """Everything recomputed and as few rows as there can be, with fewer tokens, with other layouts."""
    for said, other in _least(case):
        yield said, other
        for shorter, fewer in _tokens(other):
            yield f"{said}, {shorter}", fewer
    for layout, one in _layouts(case):
        for said, other in _least(one):
            yield f"{layout}, {said}", other
            for shorter, fewer in _tokens(other):
                yield f"{layout}, {said}, {shorter}", fewer


def _least(case: Case) -> Iterator[tuple[str, Case]]:
    rows = case.layout.dp
    said = [f"learner.micro_batch_rows = {rows}"] if rows < case.rows else []
    said += ["model.remat = 'layer'"] if case.remat != "layer" else []
    yield ", ".join(said) or "as it is", dataclasses.replace(case, remat="layer", rows=min(rows, case.rows))


def _more_devices(case: Case) -> Iterator[tuple[str, Case]]:
    """Twice as many, and so on: more of them along each axis."""
    factor = 2
    while factor <= MOST_NODES:
        for axis in ("dp", "cp", "pp", "tp"):
            layout = dataclasses.replace(case.layout, **{axis: case.layout.size(axis) * factor})
            try:
                _ = layout.expert_axes
            except ValueError:
                continue
            for said, other in _as(case, layout):
                yield f"{layout.devices} devices: {said}", other
                for shorter, fewer in _tokens(other):
                    yield f"{layout.devices} devices: {said}, {shorter}", fewer
        factor *= 2

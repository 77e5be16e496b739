"""What a plan is made of: a model, what is trained of it, a layout and a micro-batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import PartitionSpec

from rlx.assemble import head_size, remat, replayed_routes, trained_specs
from rlx.config.schema import Config, LoraConfig
from rlx.models.blockwise import block_size, default_block
from rlx.models.description import Architecture, Layer, Params, ParamSpec, Slot, group_slots
from rlx.models.lora import adapter_specs
from rlx.models.placed import partitions, sizes_of
from rlx.models.spec import layer_specs, param_specs
from rlx.models.transformer import Remat
from rlx.parallel.blocks import dealt_share
from rlx.parallel.layout import Divisible, Layout, check, micro_batches, parse_layout, rounds_of
from rlx.parallel.rules import axes_of


@dataclasses.dataclass(frozen=True)
class Case:
    """One update's program on one layout. Rows and tokens are those of a micro-batch, over all devices."""

    config: Config
    arch: Architecture
    layout: Layout
    remat: Remat
    rows: int
    tokens: int  # of a row
    targets: int  # of a row
    head: int  # the sampler's likeliest tokens at each target

    @property
    def parts(self) -> int:
        """That a pipeline cuts the rows into."""
        return micro_batches(self.layout, self.rows)

    @property
    def rounds(self) -> int:
        """Blocks of layers that each stage of a pipeline holds."""
        return self.config.cluster.pipeline_rounds

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.config.model.dtype).itemsize

    @property
    def rows_here(self) -> float:
        """Rows that a device computes at once."""
        return self.rows / self.layout.dp / self.parts

    @property
    def tokens_here(self) -> float:
        """Of a row, on one device."""
        return self.tokens / self.layout.cp

    @property
    def stream_parts(self) -> int:
        """Devices of a tp group that share a token's residual stream."""
        return self.layout.tp if self.config.cluster.sequence_parallel else 1

    @property
    def sizes(self) -> Divisible:
        """What its layout must divide."""
        return sizes_of(self.arch, self.tokens, self.rows, self.config)

    @property
    def seen(self) -> float:
        """Tokens that scores of a query are computed with, whether it may see them or not."""
        shape = self.config.learner.row_shape
        if shape is None:
            return self.tokens
        return shape.own_tokens(self.tokens) * shape.keys(self.tokens) / self.tokens

    @property
    def ring(self) -> bool:
        """Do keys and values go round over cp?"""
        return self.layout.cp > 1 and self.config.cluster.context_parallel == "ring"

    def attention_block(self, accelerator: bool) -> int:
        """Tokens of a block of scores, 0 = those of a device are held whole."""
        if self.config.learner.row_shape is not None:
            return 0
        asked = self.config.model.attention_block or default_block(self.tokens, accelerator=accelerator)
        return block_size(asked, self.tokens, self.layout.cp, always=self.ring)

    def checked(self) -> Case:
        """Itself. Raises LayoutError where model or batch do not allow the layout, with the nearest that they do."""
        check(self.layout, self.sizes)
        return self


def case_of(config: Config, arch: Architecture) -> Case:
    """Raises LayoutError for a layout that cannot be read."""
    learner, text = config.learner, config.cluster.trainer_layout
    return Case(
        config=config,
        arch=arch,
        layout=parse_layout(text) if text else Layout(),
        remat=remat(config, arch),
        rows=learner.micro_batch_rows,
        tokens=learner.row_tokens,
        targets=learner.row_targets or learner.row_tokens,
        head=head_size(config),
    )


def share(part: PartitionSpec, layout: Layout) -> int:
    """Devices that an array cut so is spread over; each holds one such part."""
    return math.prod(layout.size(axis) for axis in axes_of(part))  # type: ignore[arg-type]


def numbers_here(specs: Params, arch: Architecture, layout: Layout) -> int:
    """Numbers that one device holds of the arrays of these specs."""
    here = lambda spec, part: math.prod(spec.shape) // share(part, layout)  # noqa: E731
    parts = partitions(specs, arch, layout)
    return sum(jax.tree.leaves(jax.tree.map(here, specs, parts, is_leaf=lambda x: isinstance(x, ParamSpec))))


def trained(case: Case) -> Params:
    return trained_specs(case.config, case.arch)


class Numbers(NamedTuple):
    """That one device holds."""

    base: int  # of the model
    trained: int


def numbers(case: Case) -> Numbers:
    return _numbers(case.arch, case.config.lora, case.layout)


# A search asks for the same layout with many batches.
@functools.lru_cache(maxsize=512)
def _numbers(arch: Architecture, lora: LoraConfig, layout: Layout) -> Numbers:
    base = numbers_here(param_specs(arch), arch, layout)
    return Numbers(base, numbers_here(adapter_specs(arch, lora), arch, layout) if lora.rank else base)


@functools.lru_cache(maxsize=512)
def flat_specs(arch: Architecture, layer: Layer) -> dict[tuple[str, ...], ParamSpec]:
    """Of one layer, by path."""
    return traverse_util.flatten_dict(layer_specs(arch, layer))


def piped(case: Case, group: tuple[Slot, ...]) -> bool:
    """Is this group of layers spread over stages? The others are computed by every stage."""
    return 1 < case.layout.pp <= len(group[0].numbers)


def group_rounds(case: Case, group: tuple[Slot, ...]) -> int:
    """Blocks of it that a stage holds."""
    return rounds_of(len(group[0].numbers), case.layout, case.rounds) if piped(case, group) else 1


def repeats_here(case: Case, group: tuple[Slot, ...]) -> int:
    """Repeats of a group's pattern that one device computes, padding of its stage included."""
    repeats, rounds = len(group[0].numbers), group_rounds(case, group)
    return rounds * -(-repeats // (rounds * case.layout.pp)) if piped(case, group) else repeats


class Dealt(NamedTuple):
    """Bytes of a group of layers' weights and adapter, and of the gradients of what is trained, on one device in a call
    of the program."""

    copied: float  # put into the order of the blocks that stages hold, gradients in that order
    sent: float  # weights to other stages, gradients back


def dealt(case: Case, group: tuple[Slot, ...]) -> Dealt:
    """Nothing where a stage has one block of neighbouring layers."""
    stages, rounds, repeats = case.layout.pp, group_rounds(case, group), len(group[0].numbers)
    if rounds == 1:
        return Dealt(0.0, 0.0)
    share = dealt_share(stages, rounds) if repeats % stages == 0 else (stages - 1) / stages
    weights, adapter = (
        sum(numbers_here(specs.get(slot.name, {}), case.arch, case.layout) for slot in group)
        for specs in (param_specs(case.arch)["layers"], trained(case) if case.config.lora.rank else {})
    )
    if case.config.lora.rank:
        copied = weights * case.itemsize + 2 * adapter * jnp.dtype(jnp.float32).itemsize
    else:
        copied = 2 * weights * case.itemsize
    return Dealt(copied, share * copied)


def groups(case: Case) -> list[tuple[Slot, ...]]:
    return list(group_slots(case.arch))


def batch_shapes(case: Case) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, sizes) of the arrays of a `rlx.learner.step.MicroBatch`, by name, those left out that are absent."""
    of_tokens, of_targets = (case.rows, case.tokens), (case.rows, case.targets)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        **dict.fromkeys(("tokens", "positions", "segment_ids", "prefix_ids"), ("int32", of_tokens)),
        **dict.fromkeys(("source", "target_tokens", "sequences", "lengths", "ages"), ("int32", of_targets)),
        **dict.fromkeys(("advantages", "sampler_logprobs"), ("float32", of_targets)),
        "mask": ("bool", of_targets),
        **dict.fromkeys(("num_targets", "num_sequences"), ("int32", ())),
    }
    if case.head:
        shapes |= {
            "head_ids": ("int32", (*of_targets, case.head)),
            "head_logprobs": ("float32", (*of_targets, case.head)),
        }
    if (routes := replayed_routes(case.config, case.arch)) is not None:
        shapes["routes"] = ("int32", (*of_tokens, *routes))
    return shapes

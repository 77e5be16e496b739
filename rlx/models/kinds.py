"""Which functions belong to which kind of mixer: one line a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rlx.models import attention, delta, kda, mla
from rlx.models.cache import LayerCache
from rlx.models.description import Attention, DeltaNet, KimiDelta, LatentAttention, Mixer, Params


class MixerKind(NamedTuple):
    """Pure functions of a mixer's description; `models.attention` is the one to read.

    specs(mixer, arch) -> parameters of one layer
    forward(mixer, arch, weights, x [rows, t, d], rows) -> (y, made): packed rows; `made` is what a cache is made of
    empty(mixer, rows, ends, dtype) -> cache that holds nothing
    keep(mixer, made) -> cache of whole rows as `forward` saw them, each stretch one array
    step(mixer, arch, weights, x [rows, 1, d], cache, token) -> (y, cache): one token a row
    axes: of the positions in each of the cache's `growing` arrays
    """

    specs: Callable[..., Params]
    forward: Callable[..., tuple[Any, Any]]
    empty: Callable[..., LayerCache]
    keep: Callable[..., LayerCache]
    step: Callable[..., tuple[Any, LayerCache]]
    axes: tuple[int, ...]


def kind(mixer: Mixer) -> MixerKind:
    match mixer:
        case Attention():
            module = attention
        case LatentAttention():
            module = mla
        case DeltaNet():
            module = delta
        case KimiDelta():
            module = kda
    return MixerKind(module.specs, module.forward, module.empty, module.keep, module.step, module.AXES)


def recurrent(mixer: Mixer) -> bool:
    """Does it carry a state from token to token?"""
    return isinstance(mixer, DeltaNet | KimiDelta)

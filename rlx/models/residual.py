"""What layers read from and add to: the residual stream, or, where `Architecture.residual_block` is given, the bank of
its snapshots that Kimi K3 mixes (`models.residual_bank`).

`Stream` is a pytree of arrays, the same from layer to layer, so that a scan and a pipeline's stages can carry it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rlx.models import residual_bank
from rlx.models.description import Architecture, Params, ParamSpec
from rlx.models.residual_bank import Bank
from rlx.models.weights import Weights
from rlx.parallel import pipeline
from rlx.parallel.mesh import Placement

Stream = Array | Bank

PLACES = {"mixer": "self_attention_res", "mlp": "mlp_res"}
OUTPUT = "output_attn_res"


def start(arch: Architecture, embedded: Float[Array, "rows t d"]) -> Stream:
    if arch.residual_block is None:
        return embedded
    return residual_bank.begin(embedded, arch.num_layers, arch.residual_block)


def read(
    arch: Architecture, weights: Weights, stream: Stream, number: Int[Array, ""] | int, place: str
) -> tuple[Float[Array, "rows t d"], Stream]:
    """(input of the sub-layer, stream); place: "mixer" or "mlp" of layer `number`."""
    if not isinstance(stream, Bank):
        return stream, stream
    assert arch.residual_block is not None
    x = _mixed(arch, weights.params, stream, PLACES[place])
    return x, residual_bank.snapshot(stream, number, arch.residual_block) if place == "mixer" else stream


def add(arch: Architecture, stream: Stream, y: Float[Array, "rows t d"]) -> Stream:
    return residual_bank.added(stream, y) if isinstance(stream, Bank) else stream + y


def finish(arch: Architecture, params: Params, stream: Stream) -> Float[Array, "rows t d"]:
    """What the final norm is applied to."""
    return _mixed(arch, params, stream, OUTPUT) if isinstance(stream, Bank) else stream


def plain(stream: Stream) -> Float[Array, "rows t d"]:
    """What has been added up since the last snapshot."""
    return stream.stream if isinstance(stream, Bank) else stream


def placed(placement: Placement, stream: Stream) -> Stream:
    """Rows over dp and tokens over cp, and tp where they are cut so, whatever the layer before left."""
    if not isinstance(stream, Bank):
        return placement.stream(stream)
    return Bank(placement.stream(stream.snapshots), stream.count, placement.stream(stream.stream))


def split(stream: Stream, parts: int) -> Stream:
    """Its rows cut into micro-batches; every leaf leads with them."""
    cut = lambda x: pipeline.split(x, parts)  # noqa: E731
    if not isinstance(stream, Bank):
        return cut(stream)
    snapshots = jnp.moveaxis(jax.vmap(cut)(stream.snapshots), 1, 0)
    return Bank(snapshots, jnp.broadcast_to(stream.count, (parts,)), cut(stream.stream))


def joined(stream: Stream) -> Stream:
    """`split` undone."""
    whole = pipeline.joined
    if not isinstance(stream, Bank):
        return whole(stream)
    return Bank(jax.vmap(whole)(jnp.moveaxis(stream.snapshots, 1, 0)), stream.count[0], whole(stream.stream))


def layer_specs(arch: Architecture) -> Params:
    return {} if arch.residual_block is None else _specs(arch, *PLACES.values())


def output_specs(arch: Architecture) -> Params:
    return {} if arch.residual_block is None else _specs(arch, OUTPUT)


def _specs(arch: Architecture, *names: str) -> Params:
    """Scores begin at 0: all entries of the bank count alike."""
    embed = (arch.hidden_size,), ("embed",)
    norms = {f"{name}_norm": ParamSpec(*embed, "ones") for name in names}
    return norms | {f"{name}_proj": ParamSpec(*embed, "zeros") for name in names}


def _mixed(arch: Architecture, params: Params, bank: Bank, name: str) -> Array:
    return residual_bank.mix(bank, params[f"{name}_norm"], params[f"{name}_proj"], arch.rms_norm_eps)

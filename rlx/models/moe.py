"""Mixtures of experts: dropless, experts as grouped products over tokens sorted by expert (arXiv 2211.15841)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int
from rlx_kernels.grouped_matmul import grouped_matmul

from rlx.models import mlp
from rlx.models.description import Architecture, Experts, Mlp, Params, ParamSpec, Router
from rlx.models.layers import KEPT, rms_norm, wide
from rlx.models.weights import Weights, linear_spec, project
from rlx.parallel import expert, pipeline
from rlx.parallel.mesh import Placement
from rlx.parallel.sequence import gathered, scattered


@struct.dataclass
class Routing:
    """What the routers of a model did with the tokens of some rows, padding left out; a leading axis for its layers."""

    choices: Array  # int32 [layers, rows, t, k], by descending score
    weights: Array  # float32 [layers, rows, t, k], of the choices
    margin: Array  # float32 [layers, rows, t], between the scores of the last expert chosen and the first one not
    load: Array  # float32 [layers, experts], tokens that chose each
    balance: Array  # float32 [layers], the balancing loss: 1 where experts are used alike
    z: Array  # float32 [layers], the router's z loss
    dropped: Array  # int32 [layers], choices that came to no expert because an exchange had no room: `parallel.expert`


def specs(experts: Experts, arch: Architecture) -> Params:
    hidden, inner = arch.hidden_size, experts.latent or arch.hidden_size
    count, width, axis = experts.count, experts.width, "latent_mlp" if experts.latent else "embed"
    parts = (("gate_proj", width), ("up_proj", width))
    tree: Params = {
        "router": linear_spec(hidden, count, ("embed", "experts")),
        "experts": {
            "gate_up_proj": ParamSpec((count, inner, 2 * width), ("expert", axis, "expert_gate_up"), "normal", parts),
            "down_proj": ParamSpec((count, width, inner), ("expert", "expert_mlp", axis), "normal"),
        },
    }
    if experts.router.bias:
        tree["router_bias"] = ParamSpec((count,), ("experts",), "zeros")
    if experts.shared_width:
        tree["shared"] = mlp.gated_specs(hidden, experts.shared_width, "shared_mlp")
    if experts.shared_gated:
        tree["shared_gate"] = linear_spec(hidden, 1, ("embed", "one"))
    if experts.latent:
        tree["routed_expert_down_proj"] = linear_spec(hidden, inner, ("embed", axis))
        tree["routed_expert_up_proj"] = linear_spec(inner, hidden, (axis, "embed"))
    if experts.latent_norm:
        tree["routed_expert_norm"] = ParamSpec((inner,), (axis,), "ones")
    return tree


def forward(
    experts: Experts,
    arch: Architecture,
    weights: Weights,
    x: Float[Array, "rows t d"],
    valid: Bool[Array, "rows t"],
    replayed: Int[Array, "rows t k"] | None = None,
    placement: Placement | None = None,
) -> tuple[Float[Array, "rows t d"], Routing]:
    """Routed experts, and the shared one where there is one. Tokens that are not `valid` come to no expert.

    replayed: expert choices to use in place of the router's own, where they are not negative; their weights are the
      router's all the same, so that its gradient is that of the choices which were made.
    """
    # On a mesh rows and tokens stay apart: over dp and cp at once they are no axis that could be cut.
    flat, seen = (x.reshape(-1, x.shape[-1]), valid.reshape(-1)) if placement is None else (x, valid)
    logits = wide(flat) @ wide(weights.params["router"]["kernel"])
    bias = weights.params["router_bias"] if experts.router.bias else None
    scores = route_scores(experts.router, logits)
    choices, margin = choose(experts, scores, bias)
    if replayed is not None:
        given = replayed.reshape(choices.shape)
        choices = jnp.where(given >= 0, given, choices)
    gains = route_weights(experts.router, scores, choices)
    y, dropped = _routed(experts, arch, weights, flat, choices, gains, seen, placement)
    if experts.shared_width:
        shared = mlp.forward(Mlp(experts.shared_width, experts.situ), weights.sub("shared"), gathered(placement, flat))
        shared = scattered(placement, shared)
        y = y + (shared * jax.nn.sigmoid(project(weights, "shared_gate", flat)) if experts.shared_gated else shared)
    by_token = lambda out: out.reshape(*x.shape[:2], *out.shape[seen.ndim :])  # noqa: E731
    load, balance, z = statistics(experts, logits, scores, choices, seen)
    return y.reshape(x.shape), Routing(
        choices=by_token(choices),
        weights=by_token(gains),
        margin=by_token(margin),
        load=load,
        balance=balance,
        z=z,
        dropped=dropped,
    )


def route_scores(router: Router, logits: Float[Array, "*t experts"]) -> Float[Array, "*t experts"]:
    return jax.nn.softmax(logits, axis=-1) if router.scoring == "softmax" else jax.nn.sigmoid(logits)


def choose(
    experts: Experts, scores: Float[Array, "*t experts"], bias: Float[Array, " experts"] | None
) -> tuple[Int[Array, "*t k"], Float[Array, "*t"]]:
    """(The top k experts by score and bias, what the last of them is ahead by).

    With groups they are of the groups whose two best add up to most (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    ranked = jax.lax.stop_gradient(scores if bias is None else scores + wide(bias))
    router = experts.router
    if router.groups > 1:
        by_group = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
        best = jax.lax.top_k(by_group, 2)[0].sum(axis=-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, router.top_groups)[1], router.groups, dtype=bool).any(axis=-2)
        ranked = jnp.where(kept[..., None], by_group, -jnp.inf).reshape(ranked.shape)
    best, choices = jax.lax.top_k(ranked, min(experts.top_k + 1, experts.count))
    margin = best[..., experts.top_k - 1] - best[..., -1] if experts.top_k < experts.count else jnp.inf * best[..., 0]
    return choices[..., : experts.top_k].astype(jnp.int32), margin


def route_weights(
    router: Router, scores: Float[Array, "*t experts"], choices: Int[Array, "*t k"]
) -> Float[Array, "*t k"]:
    gains = jnp.take_along_axis(scores, choices, axis=-1)
    if router.normalise:
        gains = gains / (gains.sum(axis=-1, keepdims=True) + (1e-20 if router.scoring == "sigmoid" else 0.0))
    return gains * router.scale


def statistics(
    experts: Experts, logits: Array, scores: Array, choices: Array, seen: Array
) -> tuple[Array, Array, Array]:
    """(load, balancing loss, z loss): N Σ_e f_e P_e of Switch Transformers (arXiv 2101.03961, eq. 4-6) with f the share
    of choices and P the mean normalised score; the mean squared logsumexp of ST-MoE (arXiv 2202.08906, eq. 5)."""
    load = jnp.zeros(experts.count).at[choices].add(seen[..., None].astype(jnp.float32))
    tokens = jnp.maximum(seen.sum(), 1)
    share = load / (tokens * experts.top_k)
    normed = jnp.where(seen[..., None], scores / scores.sum(axis=-1, keepdims=True), 0)
    probability = normed.reshape(-1, experts.count).sum(axis=0) / tokens
    z = jnp.where(seen, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum() / tokens
    return load, experts.count * (share * probability).sum(), z


def _routed(
    experts: Experts,
    arch: Architecture,
    weights: Weights,
    x: Float[Array, "*t d"],
    choices: Int[Array, "*t k"],
    gains: Float[Array, "*t k"],
    seen: Bool[Array, "*t"],
    placement: Placement | None,
) -> tuple[Float[Array, "*t d"], Int[Array, ""]]:
    """(the experts' weighted sum, choices dropped)."""
    inner = project(weights, "routed_expert_down_proj", x) if experts.latent else x
    wanted, inside = jnp.where(seen[..., None], choices, experts.count), weights.sub("experts")
    if placement is not None:
        y, dropped = _exchanged(experts, inside, inner, wanted, gains, placement)
    else:
        through = partial(_through, experts, inside)
        made = expert.by_expert(through, inner, wanted.reshape(-1), experts.count, copies=experts.top_k)
        made = made.reshape(*choices.shape, -1)
        y, dropped = (made * gains[..., None].astype(made.dtype)).sum(axis=1), jnp.int32(0)
    if experts.latent_norm:
        y = rms_norm(y, weights.params["routed_expert_norm"], arch.rms_norm_eps)
    return project(weights, "routed_expert_up_proj", y) if experts.latent else y, dropped


def _through(
    experts: Experts, weights: Weights, x: Float[Array, "n d"], sizes: Int[Array, " experts"]
) -> Float[Array, "n d"]:
    """Sorted tokens through their experts."""
    both = grouped(weights, "gate_up_proj", x, sizes)
    return grouped(weights, "down_proj", mlp.activate(experts.situ, *jnp.split(both, 2, axis=-1)), sizes)


def _exchanged(
    experts: Experts,
    weights: Weights,
    x: Float[Array, "rows t d"],
    wanted: Int[Array, "rows t k"],
    gains: Float[Array, "rows t k"],
    placement: Placement,
) -> tuple[Float[Array, "rows t d"], Int[Array, ""]]:
    """`_routed` of tokens, and experts, over devices."""
    trees = (weights.params, weights.adapter)
    axes = placement.layout.expert_axes
    # What leads with the experts has three axes; the outer factors of an adapter that all experts share have two.
    cut = jax.tree.map(lambda leaf: PartitionSpec(axes) if leaf.ndim == 3 else PartitionSpec(), trees)

    def compute(trees: tuple[Params, Params], rows: Array, sizes: Array) -> Array:
        return _through(experts, Weights(*trees, weights.scale), rows, sizes)

    # Said on both sides, or the shared expert's products would be cut over tokens too, as the exchange is.
    y, dropped = expert.run(placement, compute, trees, cut, placement.stream(x), wanted, gains, experts.count)
    return placement.stream(y), dropped


def joined(routing: Routing) -> Routing:
    """Of micro-batches, [layers, micro-batches, ...], as of their rows together; the losses are means."""
    rows = jax.vmap(pipeline.joined)
    return Routing(
        choices=rows(routing.choices),
        weights=rows(routing.weights),
        margin=rows(routing.margin),
        load=routing.load.sum(axis=1),
        balance=routing.balance.mean(axis=1),
        z=routing.z.mean(axis=1),
        dropped=routing.dropped.sum(axis=1),
    )


def grouped(weights: Weights, name: str, x: Float[Array, "n i"], sizes: Int[Array, " experts"]) -> Float[Array, "n o"]:
    """Sorted tokens through their experts' matrices, with their adapters: `models.lora` has the two forms."""
    y = grouped_matmul(x, weights.params[name].astype(x.dtype), sizes)
    adapter = weights.adapter.get(name)
    if adapter is not None:
        y = y + (weights.scale * _low_rank(x, adapter, sizes)).astype(y.dtype)
    return checkpoint_name(y, KEPT)


def _low_rank(x: Array, adapter: Params, sizes: Array) -> Array:
    if "a" not in adapter:
        return jnp.concatenate([_low_rank(x, part, sizes) for part in adapter.values()], axis=-1)
    for factor in (adapter["a"], adapter["b"]):
        x = x.astype(factor.dtype)
        x = x @ factor if factor.ndim == 2 else grouped_matmul(x, factor, sizes)
    return x

"""Golden values against this project: `evaluate` maps the name of a golden case onto the project's public functions.

No formula lives here. A case of float32 arrays is computed in float32, any other in float64. Masked slots may hold
anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rlx_kernels.logprob import TokenStats

from configs.base import get_config
from rlx.algos import advantages as adv
from rlx.algos.aggregation import aggregate, aggregation_weights
from rlx.algos.kl import kl
from rlx.algos.masked import fill, masked_mean
from rlx.algos.metrics import sample_ages, weight_moments
from rlx.algos.objective import Targets, objective
from rlx.config.objective import DistillConfig, ObjectiveConfig
from rlx.metrics import statistics

Inputs = Mapping[str, Any]
FIELDS = {  # the golden files' names of parameters -> the configuration's
    "cap": ("tis_cap",),
    "low": ("mask_low", "cispo_low"),
    "high": ("mask_high", "cispo_high"),
    "clip_low": ("clip_low",),
    "clip_high": ("clip_high",),
    "dual": ("dual_clip",),
    "delta": ("tv_delta",),
    "ddof": ("advantage_ddof",),
    "eps": ("advantage_eps",),
    "discount": ("discount",),
    "gae_lambda": ("gae_lambda",),
    "constant_length": ("constant_length",),
}
CENTRED = {"none": "reinforce", "tis": "tis", "mis": "icepop"}  # weight -> loss


def evaluate(what: str, inputs: Inputs) -> dict[str, Any]:
    """What the project computes for a golden case, under the keys of its `expected`."""
    kind = what.partition("/")[0]
    double = not any(getattr(x, "dtype", None) == np.float32 for x in inputs.values())
    with jax.enable_x64(double):
        return jax.device_get(EVALUATIONS[kind if kind in EVALUATIONS else what](what, inputs))


def base_objective(**changes: Any) -> ObjectiveConfig:
    """The base configuration's objective, uncentred, with changes; `distill` is a dict of changes."""
    base = get_config().objective.to_dict()
    distill = DistillConfig(**base.pop("distill") | changes.pop("distill", {}))
    return ObjectiveConfig(**base | {"distill": distill, "centering": "off"} | changes)


def _config(inputs: Inputs, **changes: Any) -> ObjectiveConfig:
    given = {field: inputs[name] for name, fields in FIELDS.items() if name in inputs for field in fields}
    return base_objective(**given | changes)


def _floats(x: Any) -> jax.Array:
    dtype = np.float32 if getattr(x, "dtype", None) == np.float32 else np.float64
    return jnp.asarray(np.asarray(x, dtype))


def _mask(inputs: Inputs) -> jax.Array:
    return jnp.asarray(np.asarray(inputs["mask"]).astype(bool))


def _ints(x: Any, mask: jax.Array) -> jax.Array:
    x = np.asarray(x, np.float64)
    return jnp.asarray(np.where(np.asarray(mask).reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0), jnp.int32)


def _advantage(what: str, inputs: Inputs) -> dict[str, Any]:
    rewards = _floats(inputs["rewards"])
    method = what.partition("/")[2]
    if method == "gae":
        config, mask = _config(inputs), _mask(inputs)
        one_row = lambda r, v, m: adv.gae(r, v, m, jnp.zeros(m.shape, int), config.discount, config.gae_lambda)  # noqa: E731
        return {"advantages": jax.vmap(one_row)(rewards, _floats(inputs["values"]), mask)}
    groups, valid = jnp.asarray(inputs["groups"]), jnp.ones(rewards.shape, bool)
    return {"advantages": adv.advantages(_config(inputs, advantage=method), rewards, groups, valid)}


def _no_signal(what: str, inputs: Inputs) -> dict[str, Any]:
    rewards, groups = _floats(inputs["rewards"]), jnp.asarray(inputs["groups"])
    return {"fraction": adv.no_signal_groups(rewards, groups, jnp.ones(rewards.shape, bool)).fraction}


def _loss(what: str, inputs: Inputs) -> dict[str, Any]:
    name, mask, logits = what.partition("/")[2], _mask(inputs), _floats(inputs["logits"])
    config = _loss_config(name, inputs)
    targets = _targets(config, inputs, mask, vocabulary=logits.shape[-1])

    value, gradient = _value_and_gradient(config, logits, targets)
    return {"loss": value, "grad_logits": gradient}


@partial(jax.jit, static_argnums=0)
def _value_and_gradient(config: ObjectiveConfig, logits: jax.Array, targets: Targets) -> tuple[jax.Array, jax.Array]:
    def loss(logits: jax.Array) -> jax.Array:
        stats = dense_stats(fill(targets.mask, logits.reshape(-1, logits.shape[-1])), targets)
        return objective(config, stats, targets)[0]

    return jax.value_and_grad(loss)(logits)


def _loss_config(name: str, inputs: Inputs) -> ObjectiveConfig:
    if name == "score_centered":
        return _config(inputs, loss=CENTRED[inputs["weight"]], centering=inputs["weight"])
    if name.startswith("p_opd_"):
        form = {"form": name.removeprefix("p_opd_"), "signal": "proxy", "alpha": inputs["alpha"], "lam": inputs["lam"]}
        return _config(inputs, loss="reinforce", distill=form)
    return _config(inputs, loss=name, aggregation="sequence_mean_token_mean" if name == "gspo" else "token_mean")


def _targets(config: ObjectiveConfig, inputs: Inputs, mask: jax.Array, vocabulary: int) -> Targets:
    rows = mask.shape[0]
    flat = lambda name: _floats(inputs[name]).ravel() if name in inputs else None  # noqa: E731
    sequences = jnp.repeat(jnp.arange(1, rows + 1), mask.shape[1])
    old, sampler = flat("old_logprobs"), flat("sampler_logprobs")
    nothing = jnp.zeros(mask.size, _floats(inputs["logits"]).dtype)
    targets = Targets(
        mask=mask.ravel(),
        tokens=_ints(inputs["tokens"], mask).ravel(),
        sequences=sequences,
        lengths=jnp.repeat(mask.sum(1), mask.shape[1]),
        advantages=flat("advantages"),
        sampler_logprobs=next((x for x in (sampler, old) if x is not None), nothing),
        ages=jnp.zeros(mask.size, jnp.int32),
        weights=aggregation_weights(config, mask.ravel(), sequences, num_sequences=rows),
        old_logprobs=old,
    )
    if "head_ids" in inputs:
        ids, logprobs = _ints(inputs["head_ids"], mask), _floats(inputs["head_sampler_logprobs"])
        return targets.replace(
            head_ids=ids.reshape(mask.size, -1), head_logprobs=logprobs.reshape(mask.size, ids.shape[-1])
        )
    if config.distill.form != "off":
        return _distill_targets(targets, inputs, vocabulary)
    return targets


def _distill_targets(targets: Targets, inputs: Inputs, vocabulary: int) -> Targets:
    """Frozen models as statistics of the sampled tokens and, for the full form, of the whole vocabulary."""
    models = {}
    everything = targets.replace(head_ids=jnp.broadcast_to(jnp.arange(vocabulary), (targets.mask.size, vocabulary)))
    for name in ("proxy_expert", "proxy_base", "target_base"):
        logits = _floats(inputs[f"{name}_logits"]).reshape(-1, vocabulary)
        models[name] = dense_stats(fill(targets.mask, logits), everything)
    expert, base, reference = models["proxy_expert"], models["proxy_base"], models["target_base"]
    return everything.replace(
        signal=expert.logprob - base.logprob,
        head_signal=expert.candidate_logprobs - base.candidate_logprobs,
        reference_logprobs=reference.logprob,
        head_reference_logprobs=reference.candidate_logprobs,
    )


def dense_stats(logits: jax.Array, targets: Targets) -> TokenStats:
    """The kernels' statistics from dense logits, in the logits' own precision: the kernels' are float32."""
    logprobs = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
    chosen = jnp.take_along_axis(logprobs, targets.tokens[:, None], -1)[:, 0]
    picked = None if targets.head_ids is None else jnp.take_along_axis(logprobs, targets.head_ids, -1)
    return TokenStats(chosen, jax.nn.logsumexp(logits, -1), entropy, picked)


def _kl(what: str, inputs: Inputs) -> dict[str, Any]:
    mask = _mask(inputs).ravel()
    policy, reference = (fill(mask, _floats(inputs[name]).ravel()) for name in ("logprobs", "ref_logprobs"))
    return {k: masked_mean(mask, kl(k, policy, reference)) for k in ("k1", "k2", "k3")}


def _ess(what: str, inputs: Inputs) -> dict[str, Any]:
    return {"ess": weight_moments(_mask(inputs), _floats(inputs["weights"])).ess}


def _age(what: str, inputs: Inputs) -> dict[str, Any]:
    ages = sample_ages(jnp.asarray(inputs["token_versions"]), inputs["trained_at_version"])
    return {"mean": ages.mean(), "max": ages.max()}


def _aggregate(what: str, inputs: Inputs) -> dict[str, Any]:
    mask, per_token = _mask(inputs), _floats(inputs["per_token"]).ravel()
    segments = np.asarray(inputs["segment_ids"])
    sequences = np.where(segments > 0, segments + np.arange(len(segments))[:, None] * segments.max(), 0)
    modes = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm")

    def one(mode: str) -> jax.Array:
        config = dataclasses.replace(_config(inputs), aggregation=mode)
        weights = aggregation_weights(config, mask.ravel(), jnp.asarray(sequences.ravel()), int(sequences.max()))
        return aggregate(weights, per_token)

    return {mode: one(mode) for mode in modes}


def _wilson(what: str, inputs: Inputs) -> dict[str, Any]:
    low, high = statistics.wilson_interval(inputs["successes"], inputs["attempts"], inputs["confidence"])
    return {"low": low, "high": high}


def _no_signal_probability(what: str, inputs: Inputs) -> dict[str, Any]:
    return {"probability": statistics.no_signal_probability(inputs["pass_rate"], inputs["group_size"])}


def _kendall(what: str, inputs: Inputs) -> dict[str, Any]:
    return {"tau": statistics.kendall_tau_b(inputs["x"], inputs["y"])}


def _pass_at_k(what: str, inputs: Inputs) -> dict[str, Any]:
    return {"pass_at_k": statistics.pass_at_k(inputs["attempts"], inputs["successes"], inputs["k"])}


EVALUATIONS: Mapping[str, Callable[[str, Inputs], dict[str, Any]]] = {
    "advantage": _advantage,
    "loss": _loss,
    "aggregate": _aggregate,
    "metric/no_signal_groups": _no_signal,
    "metric/kl": _kl,
    "metric/ess": _ess,
    "metric/sample_age": _age,
    "proxy/wilson": _wilson,
    "proxy/no_signal_probability": _no_signal_probability,
    "proxy/kendall_tau_b": _kendall,
    "eval/pass_at_k": _pass_at_k,
}

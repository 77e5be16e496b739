"""The objective: what one slice of an optimizer batch adds to the loss, its gradient and its metrics.

    loss = Σ_t weight_t · [policy_t + centering_t + β KL_t - η H_t]

The weights come from the whole batch (`rlx.algos.aggregation`), so adding slices gives the batch exactly, however it is
cut. Nothing here knows of logits, vocabularies or meshes: p arrives as statistics of the target tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float
from rlx_kernels.logprob import TokenStats

from rlx.algos import centering, diagnostics, distill
from rlx.algos.aggregation import aggregate
from rlx.algos.importance import log_ratio
from rlx.algos.kl import kl
from rlx.algos.masked import dense_ids, fill
from rlx.algos.metrics import Metrics, pair
from rlx.algos.policy_gradient import PolicyLoss, Surrogate, bounded, policy_loss, sequence_keep, surrogate
from rlx.config.objective import ObjectiveConfig

__all__ = ["Metrics", "Targets", "objective"]

Term = tuple[Float[Array, " tokens"], diagnostics.Pairs]


@struct.dataclass
class Targets:
    """What is known of the n target tokens of a slice. Masked positions may hold anything."""

    mask: Array  # bool [n]: trained
    tokens: Array  # int32 [n]
    sequences: Array  # int32 [n]: equal within a sequence; no sequence is in two slices
    lengths: Array  # int32 [n]: trained tokens of the sequence
    advantages: Array  # float32 [n]
    sampler_logprobs: Array  # float32 [n]: log q
    ages: Array  # int32 [n]: updates between writing and training
    weights: Array  # float32 [n]: of `aggregation_weights`, over the whole batch
    old_logprobs: Array | None = None  # float32 [n]: before the first step on this batch; None = this forward's own
    reference_logprobs: Array | None = None  # float32 [n]
    head_ids: Array | None = None  # int32 [n, K]: the candidates that `TokenStats.candidate_logprobs` are of
    head_logprobs: Array | None = None  # float32 [n, K]: log q of them
    # Distillation. A signal is frozen: log teacher, or log expert - log base, combined where there are several.
    signal: Array | None = None  # float32 [n]
    head_signal: Array | None = None  # float32 [n, K]
    head_reference_logprobs: Array | None = None  # float32 [n, K]
    teacher_logprobs: Array | None = None  # float32 [n]: log of the teacher or expert alone, for filter = agreeing
    overlap: Array | None = None  # float32 [n]: `top_k_overlap` of proxy and target
    known: Array | None = None  # bool [n]: the proxy's vocabulary has the token; None = all of them
    head_known: Array | None = None  # bool [n, K]


def objective(config: ObjectiveConfig, stats: TokenStats, targets: Targets) -> tuple[Float[Array, ""], Metrics]:
    """(this slice's share of the loss, its metric sums); differentiate with respect to `stats`.

    Raises:
      ValueError: where the config needs something that `targets` or `stats` does not have.
    """
    stats, targets = _clean(stats, targets)
    mask, sampler, rule = targets.mask, targets.sampler_logprobs, surrogate(config)
    ids = dense_ids(mask, targets.sequences)
    ratios = stop_gradient(log_ratio(stats.logprob, sampler))
    keep = sequence_keep(config, ratios, mask, ids)
    pairs: diagnostics.Pairs = {}
    advantages, referred = targets.advantages, mask  # where the reference says something
    if config.distill.form != "off":
        advantages, allowed, pairs = _credit(config, stats, targets)
        keep &= allowed
        referred = mask if config.kl_coefficient > 0 else mask & allowed
    policy = policy_loss(rule, stats.logprob, sampler, _old(config, stats, targets), advantages, mask, ids)
    per_token = policy.loss
    if config.distill.form in ("top_k", "full"):
        per_token = _over_candidates(config, stats, targets, policy)
    if config.centering != "off":
        added, seen = _centering(rule, stats, targets, policy, advantages)
        per_token, pairs = per_token + added, pairs | seen
    per_token = jnp.where(keep, per_token, 0) - config.entropy_coefficient * stats.entropy
    if config.kl_coefficient > 0 or targets.reference_logprobs is not None:
        reference = _required(targets.reference_logprobs, "reference log-probs", "objective.kl_coefficient")
        divergence = kl(config.kl_estimator, stats.logprob, reference)
        pairs["policy/reference_kl"] = pair(referred, stop_gradient(divergence))
        if config.kl_placement == "loss":
            per_token += config.kl_coefficient * divergence
    pairs |= diagnostics.bound_pairs(rule, policy, keep, mask)
    return aggregate(targets.weights, per_token), _metrics(stats, targets, jnp.exp(ratios), pairs)


def _clean(stats: TokenStats, targets: Targets) -> tuple[TokenStats, Targets]:
    """Both with 0 wherever the mask is False: from there on everything is finite, and so is every gradient."""
    mask = targets.mask
    filled = {name: fill(mask, x) for name, x in vars(targets).items() if x is not None and name != "mask"}
    candidates = None if stats.candidate_logprobs is None else fill(mask, stats.candidate_logprobs)
    own = TokenStats(fill(mask, stats.logprob), fill(mask, stats.logsumexp), fill(mask, stats.entropy), candidates)
    return own, dataclasses.replace(targets, **filled)


def _required(x: Array | None, name: str, key: str) -> Array:
    if x is None:
        raise ValueError(f"{key} needs {name}, which this batch does not have; provide it or change {key}")
    return x


def _old(config: ObjectiveConfig, stats: TokenStats, targets: Targets) -> Float[Array, " tokens"]:
    """Where the ratio of ppo_* starts: the sampler, the scoring pass, or without one this forward itself."""
    if config.use_rollout_logprobs:
        return targets.sampler_logprobs
    return stop_gradient(stats.logprob) if targets.old_logprobs is None else targets.old_logprobs


def _centering(
    rule: Surrogate, stats: TokenStats, targets: Targets, policy: PolicyLoss, advantages: Float[Array, " tokens"]
) -> Term:
    """Score centering with the loss's own weight as f."""
    candidates = _required(stats.candidate_logprobs, "candidate log-probs", "objective.centering")
    sampler = _required(targets.head_logprobs, "the sampler's head", "objective.centering")
    ids = _required(targets.head_ids, "the sampler's head", "objective.centering")
    head = centering.center(lambda ratio: bounded(rule, ratio, ratio), candidates, sampler)
    drift, covariance = centering.norms(head, candidates, ids, policy.weight, stats.logprob, targets.tokens)
    seen = diagnostics.centering_pairs(targets.mask, head, drift, covariance, advantages)
    return centering.centering_loss(head, candidates, advantages), seen


def _credit(
    config: ObjectiveConfig, stats: TokenStats, targets: Targets
) -> tuple[Float[Array, " tokens"], Bool[Array, " tokens"], diagnostics.Pairs]:
    """Distillation's advantage sg(u) of the sampled tokens, which of them it trains, and what there is to see."""
    c, mask = config.distill, targets.mask
    signal = _required(targets.signal, "a signal", "objective.distill.form")
    u = stop_gradient(
        distill.utility(c, stats.logprob, signal, _reference(config, targets), _lam(config, stats, targets))
    )
    known = jnp.ones_like(mask) if targets.known is None else targets.known
    teacher = jnp.zeros_like(u)
    if c.filter == "agreeing":
        teacher = _required(targets.teacher_logprobs, "teacher log-probs", "objective.distill.filter")
    allowed = distill.kept(c, targets.advantages, teacher, stats.logprob)
    pairs = {
        "distill/utility_abs_mean": pair(mask & known & allowed, jnp.abs(u)),
        "distill/local_entropy": pair(mask, stop_gradient(stats.entropy)),
        "distill/masked_vocabulary_fraction": pair(mask & allowed, ~known),
    }
    if targets.overlap is not None:
        pairs["distill/topk_overlap"] = pair(mask & allowed, targets.overlap)
    return jnp.where(known, u, 0), allowed, pairs


def _reference(config: ObjectiveConfig, targets: Targets) -> Float[Array, " tokens"]:
    if config.distill.signal == "teacher":
        return jnp.zeros_like(targets.sampler_logprobs)
    return _required(targets.reference_logprobs, "reference log-probs", "objective.distill.signal = 'proxy'")


def _lam(config: ObjectiveConfig, stats: TokenStats, targets: Targets) -> Float[Array, " tokens"]:
    overlap = jnp.ones_like(stats.entropy)
    if config.distill.calibration == "overlap":
        overlap = _required(targets.overlap, "an overlap", "objective.distill.calibration")
    return distill.calibrated_lam(config.distill, stats.entropy, overlap)


def _over_candidates(
    config: ObjectiveConfig, stats: TokenStats, targets: Targets, policy: PolicyLoss
) -> Float[Array, " tokens"]:
    """Distillation summed over candidates: all of the vocabulary, or a head and the sampled token beyond it."""
    key = f"objective.distill.form = {config.distill.form!r}"
    candidates = _required(stats.candidate_logprobs, "candidate log-probs", key)
    known = jnp.ones(candidates.shape, bool) if targets.head_known is None else targets.head_known
    candidates = jnp.where(known, candidates, 0)
    signal = jnp.where(known, _required(targets.head_signal, "the candidates' signal", key), 0)
    reference = jnp.zeros_like(candidates)
    if config.distill.signal == "proxy":
        reference = _required(targets.head_reference_logprobs, "the candidates' reference log-probs", key)
    lam = _lam(config, stats, targets)[:, None]
    utilities = distill.utility(config.distill, candidates, signal, jnp.where(known, reference, 0), lam)
    in_head = jnp.zeros_like(targets.mask)
    if config.distill.form == "top_k":
        in_head = (_required(targets.head_ids, "candidate ids", key) == targets.tokens[:, None]).any(-1)
    return distill.utility_loss(config.distill.form, policy.loss, candidates, utilities, known, in_head)


def _metrics(stats: TokenStats, targets: Targets, ratios: Array, pairs: diagnostics.Pairs) -> Metrics:
    mask, ages, logprobs = targets.mask, targets.ages, stop_gradient(stats.logprob)
    gap = jnp.where(mask, jnp.abs(logprobs - targets.sampler_logprobs), 0)
    moments = diagnostics.weight_sums(mask, ratios, ages, targets.lengths)
    return Metrics(
        means=pairs
        | diagnostics.policy_pairs(mask, stats.entropy, logprobs)
        | diagnostics.offpolicy_pairs(mask, logprobs, targets.sampler_logprobs, ratios, ages),
        maxima={"offpolicy/logprob_gap_max": gap.max(), "offpolicy/age_max": jnp.where(mask, ages, 0).max()},
        moments=moments,
        counts={"offpolicy/age": moments["offpolicy/ess_age"].count},
    )

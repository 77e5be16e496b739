"""What the objective reports, and what it asks for. That its sums do not depend on the layout is in test_contract."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.algos.metrics import Metrics, bin_labels
from rlx.algos.objective import objective
from rlx.metrics.names import check_names
from rlx.types import AGE_BINS, LENGTH_BINS
from tests.algos.contract import WIDTH, draw_batch
from tests.oracle_adapter import base_objective, dense_stats


def run(config, seed=0, **changes):
    batch = draw_batch(config, seed)
    targets = dataclasses.replace(batch.targets, **changes)
    return objective(config, dense_stats(batch.logits, batch.targets), targets), targets, batch


FULL = {"loss": "tis", "centering": "tis", "entropy_coefficient": 0.01, "kl_coefficient": 0.1, "tis_cap": 1.1}


def test_metrics_are_what_they_are_called():
    (_, metrics), targets, batch = run(base_objective(**FULL))
    mask = np.asarray(targets.mask)
    logprobs = dense_stats(batch.logits, targets).logprob[mask]
    q, ages = targets.sampler_logprobs[mask], np.asarray(targets.ages)[mask]
    d, ratio = np.asarray(q - logprobs), np.exp(logprobs - q)
    values = metrics.values()
    expected = {
        "offpolicy/kl_k1": d.mean(),
        "offpolicy/kl_k2": (d**2 / 2).mean(),
        "offpolicy/kl_k3": (np.exp(-d) - 1 + d).mean(),
        "offpolicy/logprob_gap_mean": np.abs(d).mean(),
        "offpolicy/logprob_gap_max": np.abs(d).max(),
        "offpolicy/ratio_mean": ratio.mean(),
        "offpolicy/ratio_outside_fraction": ((ratio < 0.8) | (ratio > 1.25)).mean(),
        "offpolicy/truncated_fraction": (ratio > 1.1).mean(),
        "offpolicy/masked_fraction": 0,
        "policy/clipped_fraction": 0,
        "offpolicy/ess": ratio.sum() ** 2 / (ratio.size * (ratio**2).sum()),
        "offpolicy/ess_age_2": ratio[ages == 2].sum() ** 2 / ((ages == 2).sum() * (ratio[ages == 2] ** 2).sum()),
        "offpolicy/age_mean": ages.mean(),
        "offpolicy/age_max": ages.max(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    np.testing.assert_array_equal(metrics.counts["offpolicy/age"], np.histogram(ages, [0, 1, 2, 3, 4, 8, 16, 99])[0])


def test_effective_sample_sizes_are_of_bins_of_ages_and_of_lengths():
    rng = np.random.default_rng(0)
    ages, lengths = rng.integers(-1, 40, WIDTH), rng.integers(1, 30_000, WIDTH)
    ages[:3] = 0, 3, 4  # edges are of the bin that they begin
    lengths[:3] = 63, 64, 4096
    (_, metrics), targets, batch = run(base_objective(), ages=jnp.asarray(ages), lengths=jnp.asarray(lengths))
    mask = np.asarray(targets.mask)
    ratio = np.exp(dense_stats(batch.logits, targets).logprob - targets.sampler_logprobs)
    values = metrics.values()
    for name, x, edges in (("age", ages, AGE_BINS), ("length", lengths, LENGTH_BINS)):
        number = np.searchsorted(edges[1:], x, side="right")  # what is below the first edge is in the first bin
        for i, label in enumerate(bin_labels(edges)):
            weights = ratio[mask & (number == i)]
            value = values.get(f"offpolicy/ess_{name}_{label}", np.nan)  # left out where it would be of nothing
            expected = weights.sum() ** 2 / (weights.size * (weights**2).sum()) if weights.size else np.nan
            np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=f"{name} {label}")


@pytest.mark.parametrize(
    "changes",
    [
        FULL,
        {"loss": "icepop", "sequence_mask": "sum"},
        {"loss": "ppo_clip_tis"},
        {"distill": {"form": "top_k"}, "loss": "tis"},
    ],
    ids=lambda c: c["loss"],
)
def test_every_metric_is_in_the_table_of_names(changes):
    (_, metrics), *_ = run(base_objective(**changes))
    check_names(metrics.values())
    check_names(metrics.counts)


@pytest.mark.parametrize(
    "changes, missing, key",
    [
        ({"kl_coefficient": 0.1}, "reference_logprobs", "objective.kl_coefficient"),
        ({"centering": "tis"}, "head_logprobs", "objective.centering"),
        ({"centering": "tis"}, "head_ids", "objective.centering"),
        ({"distill": {"form": "sampled"}}, "signal", "objective.distill.form"),
        ({"distill": {"form": "sampled"}}, "reference_logprobs", "objective.distill.signal"),
        ({"distill": {"form": "sampled", "filter": "agreeing"}}, "teacher_logprobs", "objective.distill.filter"),
        ({"distill": {"form": "sampled", "calibration": "overlap"}}, "overlap", "objective.distill.calibration"),
        ({"distill": {"form": "full"}}, "head_signal", "objective.distill.form"),
        ({"distill": {"form": "top_k"}}, "head_reference_logprobs", "objective.distill.form"),
    ],
)
def test_what_is_missing_is_asked_for_by_the_key_that_needs_it(changes, missing, key):
    with pytest.raises(ValueError, match=key):
        run(base_objective(loss="tis", **changes), **{missing: None})


def test_the_entropy_bonus_raises_entropy_and_its_coefficient_scales_it():
    batch = draw_batch(base_objective(), 0)
    targets = dataclasses.replace(batch.targets, weights=jnp.ones_like(batch.targets.sampler_logprobs))

    def loss(logits, coefficient):
        config = base_objective(loss="tis", entropy_coefficient=coefficient)
        return objective(config, dense_stats(logits, targets), targets)[0]

    def entropy(logits):
        return dense_stats(logits, targets).entropy[targets.mask].sum()

    none, half, whole = (jax.grad(loss)(batch.logits, coefficient) for coefficient in (0.0, 0.5, 1.0))
    np.testing.assert_allclose(whole - none, -jax.grad(entropy)(batch.logits), atol=1e-5)
    np.testing.assert_allclose(whole - none, 2 * (half - none), atol=1e-5)


def test_merging_adds_sums_and_keeps_the_largest():
    (_, a), *_ = run(base_objective(**FULL), seed=2)
    (_, b), *_ = run(base_objective(**FULL), seed=4)
    both = a.merge(b)
    total, count = both.means["policy/entropy"]
    np.testing.assert_allclose(total, a.means["policy/entropy"][0] + b.means["policy/entropy"][0])
    assert count == a.means["policy/entropy"][1] + b.means["policy/entropy"][1]
    gap = "offpolicy/logprob_gap_max"
    assert both.maxima[gap] == max(a.maxima[gap], b.maxima[gap])
    stacked = jax.tree.map(lambda x, y: jnp.stack([x, y]), a, b)
    jax.tree.map(np.testing.assert_array_equal, stacked.reduce(), both)
    nothing = jax.tree.map(jnp.zeros_like, a)
    jax.tree.map(np.testing.assert_array_equal, a.merge(nothing), a)


def test_a_mean_over_nothing_is_left_out():
    (loss, metrics), *_ = run(base_objective(**FULL), mask=jnp.zeros(WIDTH, bool))
    assert loss == 0
    assert set(metrics.values()) == {"offpolicy/logprob_gap_max", "offpolicy/age_max"}
    assert isinstance(metrics, Metrics)


def test_bins_are_labelled_by_what_they_hold():
    assert bin_labels((0, 1, 2, 4, 8)) == ("0", "1", "2-3", "4-7", "8+")

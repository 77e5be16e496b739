"""Which implementation of the log-prob head serves, and what is refused with which words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.logprob import TokenStats, api, token_stats, unsupported_reason

HIDDEN, HEAD = jnp.ones((3, 4)), jnp.ones((5, 4))
TARGETS, CANDIDATES = jnp.zeros(3, jnp.int32), jnp.zeros((3, 2), jnp.int32)


def jaxpr_of(implementation):
    return str(jax.make_jaxpr(lambda h: token_stats(h, HEAD, TARGETS, None, implementation=implementation))(HIDDEN))


def test_xla_is_chosen_and_the_dense_one_only_by_name():
    assert jaxpr_of(None) == jaxpr_of("xla")
    assert jaxpr_of(None) != jaxpr_of("reference")


def test_no_candidates_give_no_candidate_logprobs():
    out = token_stats(HIDDEN, HEAD, TARGETS, None)
    assert out.candidate_logprobs is None
    np.testing.assert_allclose(out.logprob, -np.log(5), rtol=1e-6)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_what_can_be_served_has_no_reason(name):
    assert unsupported_reason(name, HIDDEN, HEAD, TARGETS, CANDIDATES) is None


def test_the_first_that_can_serve_is_taken_and_all_reasons_are_told(monkeypatch):
    stats = TokenStats(TARGETS, TARGETS, TARGETS, None)
    first = api.Implementation("first", True, lambda *_, **__: stats, lambda *_: None)
    cannot = first._replace(name="cannot", unsupported_reason=lambda *_: "it is Tuesday")
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (cannot, first))
    assert token_stats(HIDDEN, HEAD, TARGETS, None) is stats
    with pytest.raises(ValueError, match="by cannot: it is Tuesday"):
        token_stats(HIDDEN, HEAD, TARGETS, None, implementation="cannot")
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (cannot, cannot._replace(name="nor")))
    with pytest.raises(ValueError, match="cannot: it is Tuesday; nor: it is Tuesday"):
        token_stats(HIDDEN, HEAD, TARGETS, None)


def test_an_unknown_implementation_names_the_nearest():
    with pytest.raises(
        ValueError, match="'refrence' is unknown; nearest: 'reference', all: 'mosaic', 'xla', 'reference', or None"
    ):
        token_stats(HIDDEN, HEAD, TARGETS, None, implementation="refrence")


@pytest.mark.parametrize("name", [None, *(i.name for i in api.IMPLEMENTATIONS)])
def test_a_vocabulary_axis_outside_shard_map_is_refused(name):
    with pytest.raises(ValueError, match=r"vocab_axis='tp' is not a manual mesh axis here \(none\): call inside"):
        token_stats(HIDDEN, HEAD, TARGETS, None, vocab_axis="tp", implementation=name)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_is_not_positive_and_finite_is_refused(temperature):
    with pytest.raises(ValueError, match=rf"temperature={temperature} must be a finite .* score the policy at 1\.0"):
        token_stats(HIDDEN, HEAD, TARGETS, None, temperature=temperature)


def test_a_traced_temperature_is_refused():
    with pytest.raises(ValueError, match="static under jit"):
        jax.jit(lambda t: api.check_arguments(HIDDEN, HEAD, TARGETS, None, t, None))(1.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"head": jnp.ones((4, 5))},
            r"hidden \(3, 4\) and head \(4, 5\) must be .* transpose a head stored as \[D, V\]",
        ),
        ({"hidden": jnp.ones((1, 3, 4))}, r"hidden \(1, 3, 4\).*flatten the batch"),
        ({"hidden": jnp.ones((0, 4)), "targets": jnp.zeros(0, jnp.int32)}, "none of them 0"),
        ({"hidden": jnp.ones((3, 4), jnp.float16)}, "hidden is float16; it must be float32 or bfloat16: cast it"),
        ({"head": jnp.ones((5, 4), jnp.int32)}, "head is int32; it must be"),
        ({"precision": "fp32"}, "precision='fp32' is unknown; nearest: 'float32', all: 'bfloat16'"),
        ({"targets": jnp.zeros(2, jnp.int32)}, r"targets int32\[2\] must be signed integers \[T\] with T = 3"),
        ({"targets": jnp.zeros(3)}, r"targets float32\[3\] must be signed integers"),
        ({"candidates": TARGETS}, r"candidates int32\[3\] must be signed integers \[T, K\] with T = 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    """On the check itself: under pytest the annotations of `token_stats` refuse most of these earlier."""
    given = {"hidden": HIDDEN, "head": HEAD, "targets": TARGETS, "candidates": None}
    given |= {"temperature": 1.0, "precision": None} | changes
    with pytest.raises(ValueError, match=message):
        api.check_arguments(**given)

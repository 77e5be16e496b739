"""Which implementation of the log-prob head serves, and what is refused with which words."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.logprob import TokenStats, api, token_loss, token_stats, unsupported_reason

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


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), 1e-39, 1e39, "1.0"])
def test_a_temperature_that_is_not_positive_and_finite_in_float32_is_refused(temperature):
    with pytest.raises(
        ValueError, match=rf"temperature={re.escape(repr(temperature))} must be a finite .* score the policy at 1\.0"
    ):
        api.check_arguments(HIDDEN, HEAD, TARGETS, None, temperature, None)


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
        ({"hidden": jnp.ones((0, 4)), "targets": jnp.zeros(0, jnp.int32)}, "do not call for an empty batch"),
        ({"hidden": jnp.ones((3, 4), jnp.float16)}, "hidden is float16; it must be float32, bfloat16 or float64: cast"),
        ({"head": jnp.ones((5, 4), jnp.int32)}, "head is int32; it must be"),
        ({"precision": "fp32"}, "precision='fp32' is unknown; nearest: 'float32', all: 'bfloat16'"),
        ({"precision": 32}, "precision=32 is a int, not a string: one of 'bfloat16'"),
        ({"targets": [0, 1, 2]}, r"targets is a list, \[0, 1, 2\]; it must be an array: jnp.asarray\(targets\)"),
        ({"targets": None}, "targets is a NoneType, None; it must be an array"),
        ({"targets": "012"}, "targets is a str, '012'; it must be an array"),
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


def test_an_implementation_that_is_no_string_is_refused():
    with pytest.raises(ValueError, match=r"implementation=3 is a int, not a string: one of 'mosaic', 'xla'"):
        api._find(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype, vocab", [(jnp.int8, 128), (jnp.int8, 300), (jnp.int16, 65_536)])
@pytest.mark.parametrize("name", ["xla", "reference", "token_loss"])
def test_narrow_ids_do_not_wrap(name, dtype, vocab):
    """128 and 65,536 are no numbers of these types: compared in them, every id or none would be in the vocabulary."""
    head = jnp.zeros((vocab, 4))
    targets, candidates = jnp.asarray([0, 127, -1], dtype), jnp.asarray([[1], [-2], [100]], dtype)
    out = stats_by(name, head, targets, candidates)
    np.testing.assert_allclose(out.logprob, [-np.log(vocab), -np.log(vocab), np.nan], rtol=1e-6)
    np.testing.assert_allclose(out.candidate_logprobs[:, 0], [-np.log(vocab), np.nan, -np.log(vocab)], rtol=1e-6)


def test_ids_beyond_32_bits_stay_outside_of_every_vocabulary():
    ids = api._int32(np.asarray([2**32 + 1, -(2**32), 7, -1]))
    assert (ids.dtype, ids.tolist()) == (jnp.int32, [2**31 - 1, -1, 7, -1])
    with jax.enable_x64(True):
        targets = jnp.asarray([2**32 + 1, -(2**32), 1])
        assert targets.dtype == jnp.int64
        out = token_stats(HIDDEN, HEAD, targets, targets[:, None])
    np.testing.assert_array_equal(np.isnan(out.logprob), [True, True, False])
    np.testing.assert_array_equal(np.isnan(jnp.asarray(out.candidate_logprobs)[:, 0]), [True, True, False])


def stats_by(name, head, targets, candidates):
    if name == "token_loss":
        return token_loss(lambda stats, _: stats.entropy.sum(), HIDDEN, head, targets, candidates)[1]
    return token_stats(HIDDEN, head, targets, candidates, implementation=name)


@pytest.mark.parametrize("name", [i.name for i in api.IMPLEMENTATIONS])
def test_what_token_stats_refuses_has_no_reason_but_is_refused(name):
    with pytest.raises(ValueError, match="hidden is float16; it must be"):
        unsupported_reason(name, HIDDEN.astype(jnp.float16), HEAD, TARGETS, None)
    with pytest.raises(ValueError, match="do not call for an empty batch"):
        unsupported_reason(name, HIDDEN[:0], HEAD, TARGETS[:0], None)


WITHOUT_MOSAIC = """
import sys
sys.modules["jax.experimental.pallas.mosaic_gpu"] = None
import jax
import jax.numpy as jnp
from rlx_kernels.logprob import token_stats, unsupported_reason
jax.__version__ = "0.99"
case = jnp.ones((3, 64)), jnp.ones((5, 64)), jnp.zeros(3, jnp.int32), None
print(unsupported_reason("mosaic", *case), token_stats(*case).logprob.shape)
"""


def test_another_jax_whose_mosaic_has_moved_is_served_by_xla():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run([sys.executable, "-c", WITHOUT_MOSAIC], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "jax is 0.99, and these kernels are written against 0.11.2 (3,)\n"

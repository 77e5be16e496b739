"""The gated delta rule against float64 in numpy: values, gradients, packed rows, states in and out, decoding."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from rlx_kernels.delta_rule import api, chunked, delta_rule, delta_rule_step, unsupported_reason
from rlx_kernels.delta_rule.packing import runs

GATES = ["scalar", "channels"]
FLOATS = ("query", "key", "value", "decay", "beta", "initial_state")


class Case(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    initial_state: np.ndarray
    segment_ids: np.ndarray

    def given(self, dtype=jnp.float32):
        return [jnp.asarray(x, dtype) for x in self[:5]]

    @property
    def options(self):
        return {"segment_ids": jnp.asarray(self.segment_ids), "initial_state": jnp.asarray(self.initial_state)}


def make_case(gate="scalar", tokens=23, key_heads=1, heads=2, lowest=-3.0, key_width=4, value_width=3) -> Case:
    """Two rows. The first: a segment that goes on from the state, one of 1 token, a long one, padding at the end; the
    second: padding, a segment, padding, and a last one that fills the row."""
    rng = np.random.default_rng(0)
    ids = np.zeros((2, tokens), np.int32)
    ids[0, :5], ids[0, 5], ids[0, 6 : tokens - 3] = 3, 4, 2
    ids[1, 2:9], ids[1, 10:] = 1, 5
    shape = (2, tokens, key_heads, key_width)
    query, key = rng.normal(size=shape) / 2, rng.normal(size=shape)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.normal(size=(2, tokens, heads, value_width))
    each = (2, tokens, heads)
    decay = lowest * rng.uniform(size=each if gate == "scalar" else (*each, key_width)) ** 3
    state = rng.normal(size=(2, heads, key_width, value_width))
    arrays = (query, key, value, decay, rng.uniform(0, 2, size=each), state)  # beta above 1: negative eigenvalues
    return Case(*(x.astype(np.float32) for x in arrays), ids)


def by_hand(case: Case):
    """(output, state), token by token, row by row, head by head, in float64."""
    rows, tokens, heads, _ = case.value.shape
    out, states = np.zeros(case.value.shape), np.zeros(case.initial_state.shape)
    for r, h in np.ndindex(rows, heads):
        k_head = h // (heads // case.key.shape[2])
        state = case.initial_state[r, h].astype(np.float64)
        for t in range(tokens):
            segment = case.segment_ids[r, t]
            if segment <= 0:
                continue
            if t > 0 and segment != case.segment_ids[r, t - 1]:
                state = np.zeros_like(state)
            k, v = case.key[r, t, k_head].astype(np.float64), case.value[r, t, h].astype(np.float64)
            state = state * np.exp(np.broadcast_to(case.decay[r, t, h].astype(np.float64), k.shape))[:, None]
            state = state + np.outer(k, case.beta[r, t, h] * (v - state.T @ k))
            out[r, t, h] = state.T @ case.query[r, t, k_head]
        states[r, h] = state
    return out, states


def in_chunks_of_8(*arguments, **options):
    """Several chunks of a short row, documents that end inside them."""
    with_ordinal = api.check_arguments(*arguments, options["segment_ids"], options["initial_state"])
    run = runs(options["segment_ids"])
    seen = run.valid[..., None, None]
    query, key, value, decay, beta = (jnp.where(seen, x, 0) for x in with_ordinal.of_tokens)
    out, state = chunked.delta_rule(query, key, value, decay, beta[..., 0], run.ordinal, with_ordinal.state, chunk=8)
    return jnp.where(seen, out, 0).astype(with_ordinal.dtype), state


IMPLEMENTATIONS = {
    "chunked": functools.partial(delta_rule, implementation="chunked"),
    "in_chunks_of_8": in_chunks_of_8,
    "reference": functools.partial(delta_rule, implementation="reference"),
}
every_implementation = pytest.mark.parametrize("rule", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
every_gate = pytest.mark.parametrize("gate", GATES)


def with_gradients(rule, case: Case, dtype=jnp.float32):
    """(output, state, gradients of the six float arguments) of a loss of both outputs."""
    rng = np.random.default_rng(1)
    d_out, d_state = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (case.value, case.initial_state))

    def loss(*floats):
        out, state = rule(*floats[:5], segment_ids=jnp.asarray(case.segment_ids), initial_state=floats[5])
        return (out * d_out).sum() + (state * d_state).sum(), (out, state)

    floats = [*case.given(dtype), jnp.asarray(case.initial_state)]
    gradients, outputs = jax.jit(jax.grad(loss, tuple(range(6)), has_aux=True))(*floats)
    return [np.asarray(x, np.float64) for x in (*outputs, *gradients)]


def assert_close(got, wanted, tolerance):
    for name, x, y in zip(("output", "state", *FLOATS), got, wanted, strict=False):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


@every_gate
@every_implementation
@pytest.mark.parametrize("heads", [(1, 2), (2, 2)], ids=["two heads of a key head", "a key head each"])
def test_values_are_those_of_the_rule_by_hand(rule, gate, heads):
    case = make_case(gate, key_heads=heads[0], heads=heads[1])
    assert_close(jax.jit(rule)(*case.given(), **case.options), by_hand(case), 2e-6)


@every_gate
def test_the_reference_gradients_agree_with_finite_differences(gate):
    case, step = make_case(gate), 1e-6
    rng = np.random.default_rng(1)
    d_out, d_state = rng.normal(size=case.value.shape), rng.normal(size=case.initial_state.shape)
    wide = Case(*(x.astype(np.float64) for x in case[:6]), case.segment_ids)
    _, _, *gradients = with_gradients(IMPLEMENTATIONS["reference"], case)
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)
        moved = [wide._replace(**{FLOATS[i]: wide[i if i < 5 else 5] + s * step * direction}) for s in (1, -1)]
        there, back = (sum((a * b).sum() for a, b in zip((d_out, d_state), by_hand(m), strict=True)) for m in moved)
        np.testing.assert_allclose((gradient * direction).sum(), (there - back) / (2 * step), rtol=2e-5, atol=1e-5)


@every_gate
@pytest.mark.parametrize("rule", ["chunked", "in_chunks_of_8"])
def test_gradients_of_chunks_are_those_of_the_reference(rule, gate):
    case = make_case(gate)
    wanted = with_gradients(IMPLEMENTATIONS["reference"], case)
    assert_close(with_gradients(IMPLEMENTATIONS[rule], case), wanted, 3e-6)


@every_gate
@pytest.mark.parametrize("lowest", [-5.0, -60.0, -np.inf], ids=["K3's bound", "far below", "forgets everything"])
def test_decays_of_any_size(gate, lowest):
    """-5 at every token of a chunk is e^-320 over it, whose inverse no float32 holds."""
    case = make_case(gate, tokens=150)
    for shape in (case.decay.shape, case.decay[:, :, :1].shape):
        case = case._replace(decay=np.broadcast_to(np.full(shape, lowest, np.float32), case.decay.shape))
        got = with_gradients(IMPLEMENTATIONS["chunked"], case)
        assert all(np.isfinite(x).all() for x in got)
        assert_close(got, by_hand(case), 3e-6)
    mixed = np.where(np.random.default_rng(2).uniform(size=case.decay.shape) < 0.5, lowest, -1e-3)
    case = case._replace(decay=mixed.astype(np.float32))
    assert_close(with_gradients(IMPLEMENTATIONS["chunked"], case), by_hand(case), 3e-6)


def test_the_same_key_again_and_again():
    """Powers of the triangle that chunks invert grow to 1e17 here; the inverse itself stays small."""
    case = make_case(tokens=130)
    key = np.broadcast_to(case.key[:, :1], case.key.shape)
    case = case._replace(key=key, beta=np.ones_like(case.beta), decay=np.zeros_like(case.decay))
    assert_close(with_gradients(IMPLEMENTATIONS["chunked"], case), by_hand(case), 3e-6)


@every_gate
def test_packed_is_separate_in_value_and_gradient(gate):
    """Documents end inside a chunk and at its edge."""
    case, bounds = make_case(gate, tokens=150), (0, 37, 64, 150)
    ids = np.zeros((2, 150), np.int32)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        ids[:, start:end] = i + 1
    case = case._replace(segment_ids=ids, initial_state=np.zeros_like(case.initial_state))
    out, _, *gradients = with_gradients(IMPLEMENTATIONS["chunked"], case)
    d_out = np.random.default_rng(1).normal(size=case.value.shape)
    for start, end in itertools.pairwise(bounds):
        part = [jnp.asarray(x[:, start:end]) for x in case[:5]]
        one = jnp.ones((2, end - start), jnp.int32)
        alone, pullback = jax.vjp(lambda *x, one=one: delta_rule(*x, segment_ids=one).output, *part)
        wanted = [alone, *pullback(jnp.asarray(d_out[:, start:end], jnp.float32))]
        if end == 150:  # the state's cotangent reaches the last document alone
            np.testing.assert_allclose(out[:, start:end], alone, atol=2e-6)
            continue
        for x, y in zip((out, *gradients[:5]), wanted, strict=True):
            np.testing.assert_allclose(x[:, start:end], y, atol=5e-6)


@every_gate
@every_implementation
def test_a_row_in_parts_is_the_row(rule, gate):
    """The state out of one part is the state into the next, also where the cut is inside a segment."""
    case = make_case(gate)
    whole = rule(*case.given(), **case.options)
    outs, state = [], jnp.asarray(case.initial_state)
    for start, end in ((0, 8), (8, 13), (13, 23)):
        goes_on = start == 0 or case.segment_ids[:, start] == case.segment_ids[:, start - 1]
        state = jnp.where(np.broadcast_to(goes_on, 2)[:, None, None, None], state, 0)
        part = [x[:, start:end] for x in case.given()]
        out, state = rule(*part, segment_ids=jnp.asarray(case.segment_ids[:, start:end]), initial_state=state)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole[0], atol=2e-6)
    np.testing.assert_allclose(state[1], whole[1][1], atol=2e-6)


@every_gate
def test_decoding_goes_on_from_the_state(gate):
    case = make_case(gate, tokens=70)._replace(segment_ids=np.ones((2, 70), np.int32))
    whole = delta_rule(*case.given(), **case.options)
    part = [x[:, :66] for x in case.given()]
    _, state = delta_rule(*part, segment_ids=jnp.ones((2, 66), jnp.int32), initial_state=case.options["initial_state"])
    assert state.dtype == jnp.float32
    for t in range(66, 70):
        out, state = delta_rule_step(*(x[:, t] for x in case.given()), state)
        np.testing.assert_allclose(out, whole.output[:, t], atol=2e-6)
    np.testing.assert_allclose(state, whole.state, atol=2e-6)


@every_implementation
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_that_padding_holds_matters(rule, poison):
    case = make_case("channels")
    padding = case.segment_ids <= 0
    poisoned = [np.where(padding.reshape(2, -1, *(1,) * (x.ndim - 2)), poison, x) for x in case[:5]]
    clean, got = with_gradients(rule, case), with_gradients(rule, case._replace(**dict(zip(FLOATS, poisoned))))
    for x, y in zip(got, clean, strict=True):
        np.testing.assert_array_equal(x, y)
    for x in (got[0], *got[2:7]):
        assert (x[padding] == 0).all()


@every_implementation
def test_bfloat16_is_worked_in_float32(rule):
    case = make_case()
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in case[:5]]
    wanted = by_hand(case._replace(**dict(zip(FLOATS, rounded))))
    out, state = rule(*case.given(jnp.bfloat16), **case.options)
    assert out.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    np.testing.assert_allclose(state, wanted[1], atol=2e-6 * np.abs(wanted[1]).max())
    np.testing.assert_allclose(out.astype(jnp.float32), wanted[0], atol=1e-2 * np.abs(wanted[0]).max())


@every_gate
@pytest.mark.parametrize("rule", ["chunked", "reference"])
def test_products_ask_for_the_highest_precision(rule, gate):
    case = make_case(gate, tokens=70)
    loss = lambda *x: IMPLEMENTATIONS[rule](*x, **case.options).output.sum()  # noqa: E731
    text = jax.jit(jax.grad(loss, tuple(range(5)))).lower(*case.given()).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 5
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_gradients_inside_shard_map_are_summed_over_shards():
    """Rows over 'dp', heads over 'tp'; one key head is shared by both halves of the heads."""
    case = make_case("channels", tokens=20)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rows, heads = PartitionSpec("dp"), PartitionSpec("dp", None, "tp")
    specs = (rows, rows, heads, heads, heads, PartitionSpec("dp", "tp"), rows)

    def rule(*floats, segment_ids, initial_state):
        body = lambda *x: tuple(delta_rule(*x[:5], segment_ids=x[6], initial_state=x[5]))  # noqa: E731
        out_specs = (heads, PartitionSpec("dp", "tp"))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs)(*floats, initial_state, segment_ids)

    assert_close(with_gradients(rule, case), with_gradients(IMPLEMENTATIONS["reference"], case), 3e-6)


def test_memory_is_linear_in_the_tokens():
    def temporary_bytes(tokens):
        x, gate = (jax.ShapeDtypeStruct((1, tokens, 2, *width), jnp.float32) for width in ((16,), ()))
        ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        loss = lambda q, k, v, g, b, i: delta_rule(q, k, v, g, b, segment_ids=i).output.sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).lower(x, x, x, gate, gate, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) < 2.2 * temporary_bytes(1024)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"key": jnp.zeros((2, 23, 1, 5))}, r"query .* and key .* must be \[rows, T, K, D\] of one shape"),
        ({"value": jnp.zeros((2, 22, 2, 3))}, r"must agree in rows and tokens"),
        ({"query": jnp.zeros((2, 23, 3, 4)), "key": jnp.zeros((2, 23, 3, 4))}, r"the 2 heads of value must be a multi"),
        ({"key": jnp.zeros((2, 23, 1, 4), jnp.bfloat16)}, "query is float32, key bfloat16, value float32"),
        ({"decay": jnp.zeros((2, 23, 2, 3))}, r"decay \(2, 23, 2, 3\) must be \(2, 23, 2\), or .* \(2, 23, 2, 4\)"),
        ({"beta": jnp.zeros((2, 23, 1))}, r"beta \(2, 23, 1\) must be \(2, 23, 2\)"),
        ({"segment_ids": jnp.zeros((2, 23))}, r"segment_ids float32\[2, 23\] must be integers \[2, 23\]"),
        ({"initial_state": jnp.zeros((2, 2, 3, 4))}, r"initial_state \(2, 2, 3, 4\) must be \(2, 2, 4, 3\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("asked", [delta_rule, functools.partial(unsupported_reason, "chunked")])
def test_arguments_that_do_not_fit_are_refused(asked, changes, message):
    case = make_case()
    given = dict(zip(FLOATS, case.given(), strict=False)) | case.options | changes
    with pytest.raises(ValueError, match=message):
        asked(**given)


def test_implementations_by_name():
    case = make_case()
    assert [unsupported_reason(i.name, *case.given(), **case.options) for i in api.IMPLEMENTATIONS] == [None, None]
    with pytest.raises(ValueError, match=r"'chunk' is unknown; nearest: 'chunked', all: chunked, reference, or None"):
        delta_rule(*case.given(), **case.options, implementation="chunk")
    np.testing.assert_array_equal(
        delta_rule(*case.given(), **case.options).output, IMPLEMENTATIONS["chunked"](*case.given(), **case.options)[0]
    )

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
CHUNKED, SHORT, REFERENCE = IMPLEMENTATIONS.values()
every_implementation = pytest.mark.parametrize("rule", (SHORT, REFERENCE), ids=("in_chunks_of_8", "reference"))
every_gate = pytest.mark.parametrize("gate", GATES)


@functools.partial(jax.jit, static_argnums=0)
def values(rule, floats, ids):
    return rule(*floats[:5], segment_ids=ids, initial_state=floats[5])


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(rule, floats, ids, d_out, d_state):
    (out, state), pullback = jax.vjp(lambda *floats: tuple(values(rule, floats, ids)), *floats)
    return out, state, *pullback((d_out, d_state))


def cotangents(case: Case):
    rng = np.random.default_rng(1)
    return [rng.normal(size=x.shape).astype(np.float32) for x in (case.value, case.initial_state)]


def run(rule, case: Case):
    """(output, state)"""
    return [np.asarray(x, np.float64) for x in values(rule, case[:6], case.segment_ids)]


def with_gradients(rule, case: Case, given=None):
    """(output, state, gradients of the six float arguments)."""
    found = values_and_gradients(rule, case[:6], case.segment_ids, *(given or cotangents(case)))
    return [np.asarray(x, np.float64) for x in found]


def assert_close(got, wanted, tolerance):
    for name, x, y in zip(("output", "state", *FLOATS), got, wanted, strict=False):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


@every_gate
@every_implementation
def test_values_are_those_of_the_rule_by_hand(rule, gate):
    """Two heads read one key head."""
    case = make_case(gate)
    assert_close(with_gradients(rule, case), by_hand(case), 2e-6)


def test_a_key_head_for_each_head():
    case = make_case(key_heads=2)
    assert_close(run(SHORT, case), by_hand(case), 2e-6)


@every_gate
def test_the_reference_gradients_agree_with_finite_differences(gate):
    case, step = make_case(gate), 1e-6
    rng, given = np.random.default_rng(1), cotangents(make_case(gate))
    wide = Case(*(x.astype(np.float64) for x in case[:6]), case.segment_ids)
    _, _, *gradients = with_gradients(REFERENCE, case)
    for name, gradient in zip(FLOATS, gradients, strict=True):
        direction = rng.normal(size=gradient.shape)
        moved = [wide._replace(**{name: getattr(wide, name) + s * step * direction}) for s in (1, -1)]
        there, back = (sum((a * b).sum() for a, b in zip(given, by_hand(m), strict=True)) for m in moved)
        np.testing.assert_allclose((gradient * direction).sum(), (there - back) / (2 * step), rtol=2e-5, atol=1e-5)


@every_gate
def test_gradients_of_chunks_are_those_of_the_reference(gate):
    case = make_case(gate)
    assert_close(with_gradients(SHORT, case), with_gradients(REFERENCE, case), 3e-6)


LONG = 150  # tokens: chunks as they are, the last one not full


@every_gate
@pytest.mark.parametrize("lowest", [-5.0, -60.0, -np.inf], ids=["K3's bound", "far below", "forgets everything"])
def test_decays_of_any_size(gate, lowest):
    """-5 at every token of a chunk is e^-320 over it, whose inverse no float32 holds."""
    case = make_case(gate, tokens=LONG)
    rng = np.random.default_rng(2)
    for low in (np.full(case.decay.shape, lowest), np.where(rng.uniform(size=case.decay.shape) < 0.5, lowest, -1e-3)):
        case = case._replace(decay=low.astype(np.float32))
        got = with_gradients(CHUNKED, case)
        assert all(np.isfinite(x).all() for x in got)
        # a decay for each channel may cost its neighbours in a block of 8 tokens a digit where it is next to nothing
        assert_close(got, by_hand(case), 3e-6 if gate == "scalar" else 1e-5)


def test_the_same_key_again_and_again():
    """Powers of the triangle that chunks invert grow to 1e17 here; the inverse itself stays small."""
    case = make_case(tokens=LONG)
    key = np.broadcast_to(case.key[:, :1], case.key.shape)
    case = case._replace(key=key, beta=np.ones_like(case.beta), decay=np.zeros_like(case.decay))
    assert_close(with_gradients(CHUNKED, case), by_hand(case), 3e-6)


@every_gate
def test_packed_is_separate_in_value_and_gradient(gate):
    """Documents end inside a chunk and at its edge."""
    case, bounds = make_case(gate, tokens=LONG), (0, 37, 64, LONG)
    ids = np.zeros((2, LONG), np.int32)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        ids[:, start:end] = i + 1
    case = case._replace(segment_ids=ids, initial_state=np.zeros_like(case.initial_state))
    d_out, d_state = cotangents(case)
    got = with_gradients(CHUNKED, case, (d_out, 0 * d_state))
    for start, end in itertools.pairwise(bounds):  # at the beginning of a row of its own
        blank = lambda x, s=start, e=end: np.concatenate([x[:, s:e], np.zeros_like(x[:, : LONG - e + s])], 1)  # noqa: E731
        alone = Case(*(blank(x) for x in case[:5]), case.initial_state, blank(np.ones_like(ids)))
        wanted = with_gradients(CHUNKED, alone, (blank(d_out), 0 * d_state))
        for i, name in enumerate(("output", "state", *FLOATS[:5])):
            if name != "state":
                x, y = got[i][:, start:end], wanted[i][:, : end - start]
                np.testing.assert_allclose(x, y, atol=5e-6, err_msg=name)


@every_gate
def test_a_row_in_parts_is_the_row(gate):
    """The state out of one part is the state into the next, also where the cut is inside a segment."""
    case = make_case(gate, tokens=24)
    whole, outs, state = run(SHORT, case), [], case.initial_state
    for start in (0, 8, 16):
        part = case._replace(**{n: x[:, start : start + 8] for n, x in case._asdict().items() if n != "initial_state"})
        if start:
            goes_on = case.segment_ids[:, start] == case.segment_ids[:, start - 1]
            state = np.where(goes_on[:, None, None, None], state, 0)
        out, state = run(SHORT, part._replace(initial_state=state.astype(np.float32)))
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole[0], atol=2e-6)
    np.testing.assert_allclose(state, whole[1], atol=2e-6)


@every_gate
def test_decoding_goes_on_from_the_state(gate):
    case = make_case(gate, tokens=24)._replace(segment_ids=np.ones((2, 24), np.int32))
    whole = run(SHORT, case)
    state = values(SHORT, case[:6], case.segment_ids * (np.arange(24) < 20))[1]
    assert state.dtype == jnp.float32
    step = jax.jit(delta_rule_step)
    for t in range(20, 24):
        out, state = step(*(x[:, t] for x in case[:5]), state)
        np.testing.assert_allclose(out, whole[0][:, t], atol=2e-6)
    np.testing.assert_allclose(state, whole[1], atol=2e-6)


@every_implementation
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_that_padding_holds_matters(rule, poison):
    case = make_case("channels")
    padding = case.segment_ids <= 0
    poisoned = [np.where(padding.reshape(2, -1, *(1,) * (x.ndim - 2)), poison, x).astype(np.float32) for x in case[:5]]
    got = with_gradients(rule, case._replace(**dict(zip(FLOATS, poisoned, strict=False))))
    for x, y in zip(got, with_gradients(rule, case), strict=True):
        np.testing.assert_array_equal(x, y)
    for x in (got[0], *got[2:7]):
        assert (x[padding] == 0).all()


def test_bfloat16_is_worked_in_float32():
    case = make_case()
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in case[:5]]
    wanted = by_hand(case._replace(**dict(zip(FLOATS, (np.asarray(x, np.float32) for x in narrow), strict=False))))
    out, state = values(SHORT, (*narrow, case.initial_state), case.segment_ids)
    assert out.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    np.testing.assert_allclose(state, wanted[1], atol=2e-6 * np.abs(wanted[1]).max())
    np.testing.assert_allclose(out.astype(jnp.float32), wanted[0], atol=1e-2 * np.abs(wanted[0]).max())


@every_gate
def test_products_ask_for_the_highest_precision(gate):
    case = make_case(gate)
    lowered = values_and_gradients.lower(SHORT, case[:6], case.segment_ids, *cotangents(case))
    products = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 5
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.slow
def test_gradients_inside_shard_map_are_summed_over_shards():
    """Rows over 'dp', heads over 'tp'; one key head is shared by both halves of the heads."""
    case = make_case("channels")
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rows, heads, of_state = PartitionSpec("dp"), PartitionSpec("dp", None, "tp"), PartitionSpec("dp", "tp")
    specs = (rows, rows, heads, heads, heads, of_state, rows)

    def rule(*floats, segment_ids, initial_state):
        body = lambda *x: tuple(delta_rule(*x[:5], segment_ids=x[6], initial_state=x[5]))  # noqa: E731
        sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(heads, of_state))
        return sharded(*floats, initial_state, segment_ids)

    assert_close(with_gradients(rule, case), with_gradients(REFERENCE, case), 3e-6)


@pytest.mark.slow
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
def test_arguments_that_do_not_fit_are_refused(changes, message):
    case = make_case()
    given = dict(zip(FLOATS, case.given(), strict=False)) | case.options | changes
    with pytest.raises(ValueError, match=message):
        api.check_arguments(**given)


def test_implementations_by_name():
    case = make_case()
    assert [unsupported_reason(i.name, *case.given(), **case.options) for i in api.IMPLEMENTATIONS] == [None, None]
    with pytest.raises(ValueError, match=r"'chunk' is unknown; nearest: 'chunked', all: chunked, reference, or None"):
        delta_rule(*case.given(), **case.options, implementation="chunk")

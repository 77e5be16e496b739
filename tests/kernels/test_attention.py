"""Packed causal attention against dense float64 in numpy: values, gradients, and which token sees which."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import AxisType, PartitionSpec
from rlx_kernels.attention import api, attention, cudnn, unsupported_reason, xla
from rlx_kernels.attention.xla import Packing

from rlx.models import layers
from rlx.models.packed_attention import packed_attention


class Case(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    prefix_ids: np.ndarray | None

    @property
    def packing(self):
        names = ("positions", "segment_ids", "prefix_ids")
        return {n: None if getattr(self, n) is None else jnp.asarray(getattr(self, n)) for n in names}

    @property
    def arrays(self):
        return [jnp.asarray(x) for x in self[:3]]


def make_case(heads=4, kv_heads=2, width=8, prefixes=False) -> Case:
    """Two rows of 23 tokens: [5, 8, 7] and [16, 1], the rest padding. With prefixes, 1 comes before the others."""
    rng = np.random.default_rng(0)
    segments, positions, prefix = (np.zeros((2, 23), np.int32) for _ in range(3))
    for row, lengths in enumerate([(5, 8, 7), (16, 1)]):
        start = 0
        for i, length in enumerate(lengths):
            span = slice(start, start + length)
            segments[row, span] = i + 1
            shared = lengths[0] if prefixes and i > 0 else 0
            positions[row, span] = np.arange(length) + shared
            prefix[row, span] = 1 if shared else 0
            start += length
    arrays = [rng.normal(size=(2, 23, n, width)).astype(np.float32) for n in (heads, kv_heads, kv_heads)]
    return Case(*arrays, positions, segments, prefix if prefixes else None)


def sees(case: Case, window):
    """[rows, T, T], written out token by token."""
    rows, tokens = case.segment_ids.shape
    seen = np.zeros((rows, tokens, tokens), bool)
    for r, t, s in np.ndindex(rows, tokens, tokens):
        segment, other = case.segment_ids[r, t], case.segment_ids[r, s]
        prefix = segment if case.prefix_ids is None else case.prefix_ids[r, t]
        distance = case.positions[r, t] - case.positions[r, s]
        near = distance >= 0 and (window is None or distance < window)
        seen[r, t, s] = segment > 0 and other > 0 and other in (segment, prefix) and near
    return seen


def dense64(case: Case, window=None, d_out=None):
    """The output, and with its cotangent the gradients of query, key and value, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in case[:3])
    group = query.shape[2] // key.shape[2]
    keys, values = (np.repeat(x, group, axis=2) for x in (key, value))
    seen = sees(case, window)[:, None]
    scores = np.einsum("rthd,rshd->rhts", query, keys) / np.sqrt(query.shape[3])
    top = np.where(seen, scores, -1e300).max(-1, keepdims=True)
    weights = np.where(seen, np.exp(np.minimum(scores - top, 0)), 0)
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("rhts,rshd->rthd", weights, values)
    if d_out is None:
        return out
    d_weights = np.einsum("rthd,rshd->rhts", d_out, values)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(query.shape[3])

    def of_group(x):
        return x.reshape(*key.shape[:3], group, key.shape[3]).sum(3)

    d_key = of_group(np.einsum("rhts,rthd->rshd", d_scores, query))
    d_value = of_group(np.einsum("rhts,rthd->rshd", weights, d_out))
    return out, np.einsum("rhts,rshd->rthd", d_scores, keys), d_key, d_value


def chunked(query, key, value, *, positions, segment_ids, prefix_ids=None, window=None, chunk=5):
    return xla.attention(query, key, value, Packing(positions, segment_ids, prefix_ids, window, None), chunk=chunk)


IMPLEMENTATIONS = {
    "xla": functools.partial(attention, implementation="xla"),
    "xla_chunks_of_5": chunked,
    "xla_one_query_at_a_time": functools.partial(chunked, chunk=1),
}
every_implementation = pytest.mark.parametrize("attend", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def with_gradients(attend, case: Case, window=None, dtype=jnp.float32):
    d_out = np.random.default_rng(1).normal(size=case.query.shape)
    arrays = [jnp.asarray(x, dtype) for x in case[:3]]
    out, pullback = jax.vjp(jax.jit(functools.partial(attend, **case.packing, window=window)), *arrays)
    return d_out, (out, *pullback(jnp.asarray(d_out, dtype)))


def assert_close(got, wanted, tolerance):
    for name, x, y in zip(("output", "d_query", "d_key", "d_value"), got, wanted, strict=True):
        x = np.asarray(x, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


@every_implementation
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("prefixes", [False, True], ids=["packed", "shared prefix"])
def test_values_and_gradients_are_those_of_dense_scores(attend, window, prefixes):
    case = make_case(prefixes=prefixes)
    d_out, got = with_gradients(attend, case, window)
    assert_close(got, dense64(case, window, d_out), 2e-6)


@every_implementation
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 6), (6, 1), (6, 3)])
def test_every_grouping_of_heads(attend, heads, kv_heads):
    case = make_case(heads, kv_heads)
    d_out, got = with_gradients(attend, case)
    assert_close(got, dense64(case, d_out=d_out), 2e-6)


def test_the_reference_gradients_agree_with_finite_differences():
    case, step = make_case(prefixes=True), 1e-6
    rng = np.random.default_rng(2)
    d_out = rng.normal(size=case.query.shape)
    _, *gradients = dense64(case, 4, d_out)
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)
        there, back = (list(case), list(case))
        there[i], back[i] = case[i] + step * direction, case[i] - step * direction
        difference = ((dense64(Case(*there), 4) - dense64(Case(*back), 4)) * d_out).sum() / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), difference, rtol=1e-6)


@every_implementation
def test_bfloat16_accumulates_in_float32(attend):
    case = make_case()
    rounded = case._replace(
        **{n: np.asarray(jnp.asarray(getattr(case, n), jnp.bfloat16), np.float32) for n in Case._fields[:3]}
    )
    d_out, got = with_gradients(attend, rounded, dtype=jnp.bfloat16)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    assert_close(got, dense64(rounded, d_out=d_out), 1e-2)


@every_implementation
def test_padding_is_zero_and_never_seen(attend):
    case = make_case()
    padding = case.segment_ids == 0
    poisoned = case._replace(key=np.where(padding[..., None, None], 1e30, case.key))
    for given in (case, poisoned):
        _, (out, *gradients) = with_gradients(attend, given)
        for x in (out, *gradients):
            assert (np.asarray(x)[padding] == 0).all()
        np.testing.assert_allclose(out, dense64(case), atol=2e-6)


@every_implementation
def test_tokens_may_lie_in_any_order(attend):
    """As context parallelism deals them out."""
    case = make_case(prefixes=True)
    order = np.random.default_rng(3).permutation(23)
    shuffled = Case(*(x[:, order] for x in case))
    out = jax.jit(functools.partial(attend, **shuffled.packing))(*shuffled.arrays)
    np.testing.assert_allclose(out, dense64(case)[:, order], atol=2e-6)


@every_implementation
def test_huge_scores(attend):
    case = make_case()
    case = case._replace(query=case.query * 1e4)
    _, got = with_gradients(attend, case)
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_allclose(got[0], dense64(case), atol=1e-2)  # of scores near 10,000 float32 rounds away 1e-3


def test_it_is_what_the_model_computes():
    case = make_case(prefixes=False)
    allowed = layers.packed_causal_mask(jnp.asarray(case.positions), jnp.asarray(case.segment_ids))
    np.testing.assert_allclose(
        attention(*case.arrays, **case.packing), packed_attention(*case.arrays, allowed), atol=2e-6
    )


def test_gradients_inside_shard_map_are_summed_over_shards():
    """Rows over 'dp', heads over 'tp'; one key head is shared by both halves of the heads."""
    case = make_case(4, 1)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    ids, heads, shared = PartitionSpec("dp"), PartitionSpec("dp", None, "tp"), PartitionSpec("dp")

    def attend(query, key, value, positions, segment_ids):
        return chunked(query, key, value, positions=positions, segment_ids=segment_ids)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(heads, shared, shared, ids, ids), out_specs=heads)
    d_out = np.random.default_rng(1).normal(size=case.query.shape)
    out, pullback = jax.vjp(jax.jit(lambda *qkv: sharded(*qkv, case.positions, case.segment_ids)), *case.arrays)
    assert_close((out, *pullback(jnp.asarray(d_out, jnp.float32))), dense64(case, d_out=d_out), 2e-6)


def test_memory_is_linear_in_the_tokens():
    """Twice the tokens: twice the memory, where whole scores would take four times."""

    def temporary_bytes(tokens):
        x, ids = jax.ShapeDtypeStruct((1, tokens, 4, 16), jnp.float32), jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        loss = lambda q, k, v, i: attention(q, k, v, positions=i, segment_ids=i).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 2.2 * temporary_bytes(2048)
    assert temporary_bytes(4096) < 4096 * 4096 * 4


def test_small_scores_are_kept_whole_and_large_ones_chunked():
    assert xla.default_chunk(8 * 2048, "cpu") == 16
    assert xla.default_chunk(4 * 64, "cpu") >= 64
    assert xla.default_chunk(32 * 4096, "gpu") == 2048


def reason(case, implementation="cudnn", **options):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in case[:3]]
    return unsupported_reason(implementation, *arrays, **case.packing, **options)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint8, np.int8, np.int16])
@pytest.mark.parametrize("window", [None, 3])
def test_positions_and_ids_of_any_integer_type(dtype, window):
    case = make_case(prefixes=True)
    narrow = {name: x.astype(dtype) for name, x in case.packing.items()}
    out = attention(*case.arrays, **narrow, window=window)
    np.testing.assert_allclose(out, dense64(case, window), atol=2e-6)


def test_distances_do_not_wrap_in_a_narrow_type():
    """110 - -100 is -46 in int8."""
    case = make_case()
    positions = jnp.where(case.segment_ids > 0, case.positions * 14 - 100, 0)
    assert positions.max() == 110
    given = {"positions": positions.astype(jnp.int8), "segment_ids": jnp.asarray(case.segment_ids)}
    np.testing.assert_allclose(attention(*case.arrays, **given), dense64(case), atol=2e-6)


@pytest.mark.parametrize("tokens", [23, 2048], ids=["whole scores", "chunks"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_that_padding_holds_matters(tokens, poison):
    """Nor its cotangents. Ids of 0 and -1 are padding; 2,048 tokens are more than a chunk."""
    case = make_case()
    more = ((0, 0), (0, tokens - 23))
    ids = {name: jnp.pad(x, more) for name, x in case.packing.items() if x is not None}
    ids["segment_ids"] = jnp.where(ids["segment_ids"] == 0, -(jnp.arange(tokens) % 2), ids["segment_ids"])
    padding = (ids["segment_ids"] <= 0)[..., None, None]
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=case.query.shape), jnp.float32)
    *arrays, d_out = (jnp.where(padding, poison, jnp.pad(x, (*more, (0, 0), (0, 0)))) for x in (*case.arrays, d_out))
    out, pullback = jax.vjp(jax.jit(functools.partial(attention, **ids)), *arrays)
    got = out, *pullback(d_out)
    assert all((x[:, 23:] == 0).all() for x in got)
    assert_close([x[:, :23] for x in got], dense64(case, d_out=np.where(padding[:, :23], 0, d_out[:, :23])), 2e-6)


@every_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_float32_ask_for_the_highest_precision(attend, dtype):
    case = make_case()
    loss = lambda *qkv: attend(*qkv, **case.packing).astype(jnp.float32).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*(x.astype(dtype) for x in case.arrays)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 5
    assert {"precision = [HIGHEST, HIGHEST]" in line for line in products} == {dtype == jnp.float32}


def hopper(monkeypatch, capability="9.0"):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_cudnn_says_why_it_cannot(monkeypatch):
    monkeypatch.setattr(jax, "__version__", cudnn.JAX_VERSIONS[0])
    case = make_case()
    assert reason(case, max_segments=3) == "needs an NVIDIA GPU; the default backend is cpu"
    with pytest.raises(ValueError, match=r"attention cannot be served here by cudnn: needs max_segments"):
        attention(*case.arrays, **case.packing, implementation="cudnn")
    hopper(monkeypatch)
    assert reason(case, max_segments=3) is None
    assert "the promise that segments are contiguous" in reason(case)
    assert "sees two ranges of keys" in reason(make_case(prefixes=True), max_segments=3)
    assert "12 wide, and it takes multiples of 8" in reason(make_case(width=12), max_segments=3)
    exact = unsupported_reason("cudnn", *case.arrays, **case.packing, max_segments=3)
    assert "takes bfloat16, not float32" in exact
    hopper(monkeypatch, "8.9")
    assert "this GPU has 8.9" in reason(case, max_segments=3)
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    assert "jax is 0.12.0" in reason(case, max_segments=3)


def test_another_jax_still_imports_it(monkeypatch):
    """One whose private interface has moved."""
    monkeypatch.setitem(sys.modules, "jax._src.cudnn", None)
    monkeypatch.setitem(sys.modules, "jax._src.cudnn.fused_attention_stablehlo", None)
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    spec = importlib.util.spec_from_file_location("cudnn_of_another_jax", cudnn.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    case = make_case()
    packing = Packing(case.positions, case.segment_ids, None, None, 3)
    assert "jax is 0.12.0" in module.unsupported_reason(*case.arrays, packing)


def test_segments_become_ranges():
    case = make_case()
    starts, lengths, kept = cudnn.segment_ranges(Packing(case.positions, case.segment_ids, None, None, 3))
    assert starts.tolist() == [[0, 5, 13, -1], [0, 16, -1, -1]]
    assert lengths.tolist() == [[5, 8, 7], [16, 1, -1]]
    assert kept.tolist() == [True, True]


def test_a_broken_promise_is_noticed():
    case = make_case()
    packing = Packing(case.positions, case.segment_ids, None, None, 3)
    for broken in (
        packing._replace(max_segments=2),
        packing._replace(positions=case.positions + 1),
        packing._replace(segment_ids=case.segment_ids[:, ::-1], positions=case.positions[:, ::-1]),
    ):
        assert not cudnn.segment_ranges(broken)[2][0]


@pytest.mark.parametrize("window", [None, 64])
def test_cudnn_lowers_for_cuda(monkeypatch, window):
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    shape = jax.ShapeDtypeStruct
    query, key = shape((2, 1024, 8, 128), jnp.bfloat16), shape((2, 1024, 2, 128), jnp.bfloat16)
    ids = shape((2, 1024), jnp.int32)

    def loss(query, key, value, positions, segments):
        packing = Packing(positions, segments, None, window, 8)
        return cudnn.attention(query, key, value, packing).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, key, ids, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": jnp.zeros((2, 23, 3, 8))}, r"the 3 heads must be a multiple of the 2 kv heads"),
        ({"query": jnp.zeros((2, 22, 4, 8))}, r"must agree in rows, tokens and width"),
        ({"value": jnp.zeros((2, 23, 2, 9))}, r"must be \[rows, T, H, D\], key .* and value .* of one shape"),
        ({"query": jnp.zeros((2, 23, 4, 8), jnp.bfloat16)}, "query is bfloat16, key float32, value float32"),
        ({"window": 0}, r"window=0 must be an int from 1 to 2147483647, or None"),
        ({"window": 1.5}, r"window=1.5 must be an int"),
        ({"window": 2**40}, r"window=1099511627776 must be an int from 1 to 2147483647"),
        ({"max_segments": 0}, r"max_segments=0 must be an int from 1"),
        ({"positions": jnp.zeros((2, 22), jnp.int32)}, r"positions int32\[2, 22\] must be integers \[2, 23\]"),
        ({"segment_ids": jnp.zeros((2, 23))}, r"segment_ids float32\[2, 23\] must be integers"),
        ({"prefix_ids": jnp.zeros((2, 23))}, r"prefix_ids float32\[2, 23\] must be integers"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    case = make_case()
    given = dict(zip(("query", "key", "value"), case.arrays, strict=True)) | case.packing
    given |= {"window": None, "max_segments": None} | changes
    arrays = [given.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(ValueError, match=message):
        api.check_arguments(*arrays, Packing(**given))


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_a_reason_is_asked_of_arguments_that_fit(implementation):
    case = make_case()
    query, key, value = case.arrays
    with pytest.raises(ValueError, match="window=0 must be an int"):
        unsupported_reason(implementation, query, key, value, **case.packing, window=0)
    with pytest.raises(ValueError, match="query is bfloat16, key float32"):
        unsupported_reason(implementation, query.astype(jnp.bfloat16), key, value, **case.packing)


def test_an_unknown_implementation_names_the_nearest():
    case = make_case()
    with pytest.raises(ValueError, match=r"'cuddn' is unknown; nearest: 'cudnn', all: cudnn, xla, or None"):
        attention(*case.arrays, **case.packing, implementation="cuddn")

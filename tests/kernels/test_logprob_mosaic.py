"""The kernels for Hopper: run by Pallas's interpreter on the CPU, and lowered for CUDA at their real size."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.sharding import AxisType, PartitionSpec
from rlx_kernels.logprob import core, mosaic, mosaic_kernels, reference, token_stats, unsupported_reason
from rlx_kernels.logprob.mosaic_kernels import make_plan
from rlx_kernels.logprob.tiling import columns_within

OUTPUTS = ("logprob", "logsumexp", "entropy", "candidate_logprobs")
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]
FULL = (16_384, 4_096, 151_936)  # T, D, V

interpreted = functools.partial(mosaic.token_stats, vocab_axis=None, precision="bfloat16", interpret=True)
dense = functools.partial(reference.token_stats, vocab_axis=None, precision="float32")


@pytest.fixture(autouse=True)
def clean_interpreter():
    """An exception inside of it would otherwise fail every later test of the process."""
    yield
    interpreter.reset_gpu_interpret_mode_state()


def make_case(tokens, width, vocab, k, scale=1.0):
    """Row 0's candidates hold its target, the last row's repeat one id; the first and the last column are asked for."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)) * scale, jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(vocab, width)) / np.sqrt(width), jnp.bfloat16)
    targets = rng.integers(0, vocab, tokens)
    targets[-1:] = vocab - 1
    candidates = rng.integers(0, vocab, (tokens, k))
    candidates[0, -1:] = targets[0]
    candidates[-1] = 0
    return hidden, head, jnp.asarray(targets, jnp.int32), jnp.asarray(candidates, jnp.int32)


def cotangents(tokens, k, subset=range(4)):
    rng = np.random.default_rng(1)
    drawn = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((tokens,), (tokens,), (tokens,), (tokens, k))]
    return tuple(g if i in subset else jnp.zeros_like(g) for i, g in enumerate(drawn))


def values_and_pullback(stats, case, temperature):
    def call(hidden, head):
        return tuple(stats(hidden, head, *case[2:], temperature=temperature))

    out, pullback = jax.vjp(jax.jit(call), *case[:2])
    return out, jax.jit(pullback)


def exact(case):
    return (case[0].astype(jnp.float32), case[1].astype(jnp.float32), *case[2:])


def assert_values(got, wanted, atol=5e-6):
    for name, x, y in zip(OUTPUTS, got, wanted, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=atol, err_msg=name)


def assert_gradients(got, wanted, tolerance=6e-3):
    """Relative to the largest: d_logits is rounded to bfloat16, and so is the result."""
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == jnp.bfloat16
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


slow = pytest.mark.slow


@pytest.fixture(scope="module")
def small():
    """(values, pullback) of the kernels and of dense logits, compiled once. No tile divides this vocabulary."""
    case = make_case(13, 64, 700, 4)
    return values_and_pullback(interpreted, case, 1.0), values_and_pullback(dense, exact(case), 1.0)


def test_values_are_those_of_dense_logits(small):
    (got, _), (wanted, _) = small
    assert_values(got, wanted)


@pytest.mark.parametrize(
    "subset",
    [pytest.param(s, marks=() if len(s) in (1, 4) else slow, id="+".join(OUTPUTS[i] for i in s)) for s in SUBSETS],
)
def test_gradients_of_every_subset_of_outputs(small, subset):
    given = cotangents(13, 4, subset)
    got, wanted = (pullback(given) for _, pullback in small)
    assert_gradients(got, wanted)


CASES = [
    pytest.param(1, 64, 7, 3, 1.0, 1.0, id="one token, less than a tile of columns"),
    pytest.param(300, 128, 1_200, 2, 2.0, 0.7, id="bands, strips, a temperature"),
    pytest.param(5, 320, 600, 1, 100.0, 1.0, id="huge logits, more steps than buffers"),
    pytest.param(9, 64, 512, 2, 1e-3, 1.0, id="tiny logits, whole tiles"),
]


@slow
@pytest.mark.parametrize("tokens, width, vocab, k, scale, temperature", CASES)
def test_other_shapes_and_scales(monkeypatch, tokens, width, vocab, k, scale, temperature):
    monkeypatch.setattr(mosaic_kernels, "MAX_STRIP", 2)  # 1,200 columns are three strips
    case = make_case(tokens, width, vocab, k, scale)
    given = cotangents(tokens, k)
    got, pullback = values_and_pullback(interpreted, case, temperature)
    wanted, exact_pullback = values_and_pullback(dense, exact(case), temperature)
    assert_values(got, wanted, atol=5e-6 * max(scale, 1))
    assert_gradients(pullback(given), exact_pullback(given))


@slow
def test_gradients_of_a_confident_token_do_not_cancel():
    """With p = 0.9995 the target's d_logits is 5e-4; 0.9995 rounded to bfloat16 is 1."""
    hidden = jnp.zeros((2, 64), jnp.bfloat16).at[:, 0].set(1)
    head = jnp.zeros((300, 64), jnp.bfloat16).at[5, 0].set(float(np.log(299 * 0.9995 / 0.0005))).at[:, 1].set(1)
    case = hidden, head, jnp.full(2, 5, jnp.int32), jnp.full((2, 1), 5, jnp.int32)
    given = (jnp.ones(2), jnp.zeros(2), jnp.zeros(2), jnp.ones((2, 1)))
    got = values_and_pullback(interpreted, case, 1.0)[1](given)
    wanted = values_and_pullback(dense, exact(case), 1.0)[1](given)
    np.testing.assert_allclose(np.asarray(got[1][5, 0], np.float32), wanted[1][5, 0], rtol=1e-2)


@slow
def test_columns_of_minus_infinity_add_nothing():
    case = make_case(4, 64, 300, 2)
    hidden = case[0].at[:, 0].set(1e20)
    head = case[1].at[:, 0].set(0).at[256:].set(0).at[256:, 0].set(-1e20)
    narrow = (hidden, head[:256], case[2] % 256, case[3] % 256)
    got, pullback = values_and_pullback(interpreted, (hidden, head, *narrow[2:]), 1.0)
    wanted, exact_pullback = values_and_pullback(dense, exact(narrow), 1.0)
    assert_values(got, wanted)
    d_hidden, d_head = pullback(cotangents(4, 2))
    exact_d_hidden, exact_d_head = exact_pullback(cotangents(4, 2))
    assert_gradients((d_hidden[:, 1:], d_head[:256, 1:]), (exact_d_hidden[:, 1:], exact_d_head[:, 1:]))
    assert np.isfinite(np.asarray(d_head, np.float32)).all()


def over_a_vocabulary_axis(devices, stats):
    mesh = jax.make_mesh((devices,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.shard_map(
        functools.partial(stats, vocab_axis="tp", temperature=0.8),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("tp", None), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )


@slow
def test_inside_shard_map():
    """Over one device: the interpreter's state is not made for two that run a kernel at once."""
    case = make_case(6, 64, 300, 3)
    sharded = over_a_vocabulary_axis(1, interpreted)
    got, pullback = jax.vjp(jax.jit(lambda a, b: tuple(sharded(a, b, *case[2:]))), *case[:2])
    wanted, exact_pullback = values_and_pullback(dense, exact(case), 0.8)
    assert_values(got, wanted)
    assert_gradients(jax.jit(pullback)(cotangents(6, 3)), exact_pullback(cotangents(6, 3)))


def test_vocabulary_parallel_gradients_lower_for_cuda():
    shape, stats = jax.ShapeDtypeStruct, functools.partial(mosaic.token_stats, precision="bfloat16")
    sharded = over_a_vocabulary_axis(8, stats)
    arrays = shape((512, 1024), jnp.bfloat16), shape((FULL[2], 1024), jnp.bfloat16)
    ids = shape((512,), jnp.int32), shape((512, 4), jnp.int32)
    gradient = jax.jit(jax.grad(lambda *args: sum(x.sum() for x in sharded(*args)), (0, 1)))
    text = gradient.trace(*arrays, *ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2
    assert text.count('"stablehlo.all_reduce"') == 3  # a maximum, the sums, the gradient of the hidden states


@slow
def test_the_moments_of_shards_merge_to_those_of_the_whole():
    hidden, head, targets, candidates = make_case(6, 64, 544, 3)
    ids = core.stacked_ids(targets, candidates)
    options = core.Options(mosaic.INTERPRETED, 0.8, None, "bfloat16", "gpu")
    parts = []
    for shard in range(2):
        columns = columns_within(ids, 272 * shard, 272)
        parts.append(mosaic.INTERPRETED.moments(options, hidden, head[272 * shard :][:272], columns))
    whole = core.finish(options, core.merge(*parts), jnp.bool_(True))
    got = core.as_token_stats(whole, True)
    assert_values(got, dense(*exact((hidden, head, targets, candidates)), temperature=0.8))


@slow
def test_the_warpgroups_do_not_race(monkeypatch):
    """Where the last tile shares no columns with another: those are written twice, with the same values."""
    params = functools.partial(mosaic_kernels.plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic_kernels.plgpu, "InterpretGPUParams", params)
    monkeypatch.setattr(mosaic_kernels, "MAX_STRIP", 1)
    case = make_case(20, 384, 768, 1)  # three strips of one tile, six steps over four buffers
    _, pullback = values_and_pullback(interpreted, case, 1.0)
    assert not interpreter.get_races().races_found
    jax.block_until_ready(pullback(cotangents(20, 1)))
    assert not interpreter.get_races().races_found


def test_columns_written_over_are_summed_before_they_are_rounded():
    rng = np.random.default_rng(2)
    dense_part = jnp.asarray(rng.normal(size=(2, 9)), jnp.bfloat16)
    ids = jnp.asarray([[3, 3, 8, 9], [0, 9, 9, 9]], jnp.int32)  # 9 is elsewhere
    logprobs = jnp.log(jnp.asarray([[0.999, 0.999, 0.25, jnp.nan], [0.5, jnp.nan, jnp.nan, jnp.nan]]))
    offset, g_entropy = jnp.asarray([-1.0, 0.5]), jnp.asarray([0.0, 2.0])
    g_ids = jnp.asarray([[0.5, 0.5, 2.0, 7.0], [1.0, 7.0, 7.0, 7.0]])
    out = np.asarray(mosaic.with_ids(dense_part, ids, logprobs, offset, g_entropy, g_ids), np.float32)
    wanted = np.array(dense_part, np.float32)
    wanted[0, 3], wanted[0, 8], wanted[1, 0] = 1 - 0.999, 2 - 0.25, 0.5 * (0.5 - 2 * np.log(0.5)) + 1
    np.testing.assert_allclose(out, wanted, rtol=5e-3)


@pytest.mark.parametrize(
    "tokens, vocab, clusters", [(16_384, 151_936, 66), (4_096, 37_984, 66), (256, 7, 66), (768, 700, 2)]
)
def test_the_plan_covers_every_logit_once(tokens, vocab, clusters):
    plan = make_plan(tokens, vocab, 64, clusters)
    columns = np.zeros(plan.columns, int)
    for index in range(plan.strips):
        first = index * plan.strip
        for tile in range(first, min(first + plan.strip, plan.tiles)):
            start = int(plan.first_column(tile))
            own = max(tile * mosaic_kernels.TILE, plan.padding)
            assert 0 <= start <= own
            assert start % 16 == 0
            columns[own : start + mosaic_kernels.TILE] += 1
    assert (columns[: plan.padding] == 0).all()
    assert (columns[plan.padding :] == 1).all()
    assert plan.columns - plan.padding == vocab


def test_the_plan_keeps_every_cluster_busy_at_the_full_size():
    plan = make_plan(*FULL[::2], FULL[1], 66)
    assert plan.bands * plan.strips % plan.clusters == 0
    assert plan.tiles % plan.strip == 0


@pytest.mark.parametrize(
    "tokens, vocab, columns",
    [(16_384, 151_936, 37_984), (4_096, 151_936, 151_936), (16_384, 50_257, 25_344), (8, 5, 256)],
)
def test_a_block_of_d_logits_fits_its_budget(tokens, vocab, columns):
    assert mosaic.tile(tokens, vocab, True) == (tokens, columns)
    assert 2 * tokens * min(columns, vocab) <= mosaic.D_LOGITS_BYTES
    assert mosaic.tile(tokens, vocab, False) == (tokens, vocab)


def full_size(trains, vocab=FULL[2], tokens=FULL[0]) -> str:
    """StableHLO for CUDA of the statistics (trains = ()) or of their gradients."""
    shape = jax.ShapeDtypeStruct
    ids = shape((tokens,), jnp.int32), shape((tokens, 128), jnp.int32)
    arrays = shape((tokens, FULL[1]), jnp.bfloat16), shape((vocab, FULL[1]), jnp.bfloat16)
    stats: Any = functools.partial(mosaic.token_stats, temperature=1.0, vocab_axis=None, precision="bfloat16")

    def loss(hidden, head, targets, candidates):
        return sum(x.sum() for x in stats(hidden, head, targets, candidates))

    call = jax.jit(jax.grad(loss, trains) if trains else stats)
    return call.trace(*arrays, *ids).lower(lowering_platforms=("cuda",)).as_text()


def dot_results(text):
    """The result types of all matrix products."""
    return [line.rpartition("->")[2].strip() for line in text.splitlines() if "stablehlo.dot_general" in line]


def test_lowers_for_cuda_at_the_full_size():
    text = full_size(())
    assert text.count("mosaic_gpu_v2") == 1
    assert dot_results(text) == []


@pytest.mark.parametrize("trains", [(0,), (0, 1)], ids=["frozen head", "trained head"])
def test_gradients_lower_for_cuda_at_the_full_size(trains):
    text = full_size(trains)
    assert text.count("mosaic_gpu_v2") == 2  # forwards and backwards
    block = FULL[2] // 4
    d_hidden, d_head = f"tensor<{FULL[0]}x{FULL[1]}xf32>", f"tensor<{block}x{FULL[1]}xf32>"
    assert dot_results(text) == ([d_hidden, d_head] if trains == (0, 1) else [d_hidden])
    assert (d_head in text) == (trains == (0, 1))  # a frozen head has no gradient and no room for one


@slow
@pytest.mark.parametrize("vocab", [7, 300, 700, 18_992, 50_257, 248_320])
def test_any_vocabulary_lowers_for_cuda(vocab):
    """Copies must start at multiples of shared memory's tiles: the interpreter does not mind, the compiler does."""
    assert full_size((0, 1), vocab, tokens=100).count("mosaic_gpu_v2") >= 2


def reason(case, precision="bfloat16"):
    return unsupported_reason("mosaic", *case, precision=precision)


def hopper(monkeypatch, capability="9.0", count=1):
    device = types.SimpleNamespace(compute_capability=capability, device_kind="a GPU", core_count=132)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "device_count", lambda: count)


def test_refusals_name_what_is_missing(monkeypatch):
    monkeypatch.setattr(jax, "__version__", mosaic.JAX_VERSION)
    case = make_case(2, 64, 8, 1)
    assert "compute capability 9.0; the default backend is cpu" in reason(case)
    with pytest.raises(ValueError, match=r"served here by mosaic: needs an NVIDIA GPU"):
        token_stats(*case, implementation="mosaic")
    hopper(monkeypatch)
    assert reason(case) is None
    assert "asked for float32 with a head in float32" in reason(exact(case), "float32")
    assert "asked for bfloat16_3x" in reason(case, "bfloat16_3x")
    assert "80 wide, which is no multiple of 64" in reason(make_case(2, 80, 8, 1))
    hopper(monkeypatch, capability="8.0")
    assert "a GPU has 8.0" in reason(case)
    hopper(monkeypatch, count=8)
    assert "8 devices are visible: call inside jax.shard_map" in reason(case)
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    assert reason(case) == "jax is 0.12.0, and these kernels are written against 0.11.2"


def test_every_mesh_axis_must_be_manual(monkeypatch):
    monkeypatch.setattr(jax, "__version__", mosaic.JAX_VERSION)
    case = make_case(2, 64, 8, 1)
    hopper(monkeypatch, count=4)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    found = {}

    def seen(manual):
        def body(hidden, head, targets, candidates):
            found[manual] = reason((hidden, head, targets, candidates))
            return hidden

        specs = (PartitionSpec(),) * 4
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=manual)
        jax.eval_shape(jax.jit(run), *case)
        return found[manual]

    assert seen(frozenset({"dp", "tp"})) is None
    assert "mesh axes 'dp' are not manual" in seen(frozenset({"tp"}))

"""What the log-prob head costs, read off compiled programs: matrix products, buffers, temporary memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rlx_kernels.logprob import reference, xla

T, V, D, K = 512, 8192, 32, 4
MIB = 1 << 20
SMALL: dict[str, Any] = {"tokens": 128, "vocab": 300, "dtype": jnp.bfloat16}


def loss(stats, hidden, head, targets, candidates):
    out = stats(hidden, head, targets, candidates, temperature=1.0, vocab_axis=None)
    return (out.logprob + out.entropy).sum() + out.logsumexp.sum() + out.candidate_logprobs.sum()


def program(stats, trained, tokens=T, vocab=V, dtype=jnp.float32, wrap=lambda f: f):
    """(value and gradient of a loss of all outputs, the shapes of its arguments), in hidden (trained (0,)) or in
    hidden and head (trained (0, 1))."""
    shapes = (
        jax.ShapeDtypeStruct((tokens, D), dtype),
        jax.ShapeDtypeStruct((vocab, D), dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens, K), jnp.int32),
    )
    return jax.value_and_grad(wrap(functools.partial(loss, stats)), trained), shapes


def compiled(*args, **options):
    function, shapes = program(*args, **options)
    return jax.jit(function).lower(*shapes).compile()


def traced(*args, **options) -> str:
    """The jaxpr, from which nothing unused has been removed yet."""
    function, shapes = program(*args, **options)
    return str(jax.make_jaxpr(function)(*shapes))


def temporaries(*args, **options):
    return compiled(*args, **options).memory_analysis().temp_size_in_bytes


def in_a_scan(f):
    return lambda *x: jax.lax.scan(lambda total, _: (total + f(*x), None), 0.0, length=2)[0]


chunks_of_64 = functools.partial(xla.token_stats, chunk=64)
every_wrap = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, in_a_scan], ids=["plain", "jit", "scan"])


@every_wrap
def test_a_frozen_head_has_no_product_and_no_buffer_of_its_own(wrap):
    """Three products: logits, logits again, and the gradient of hidden. A trained head adds one."""
    frozen, trained = (traced(chunks_of_64, which, wrap=wrap, **SMALL) for which in ((0,), (0, 1)))
    assert (frozen.count("dot_general["), trained.count("dot_general[")) == (3, 4)
    assert f"f32[300,{D}]" not in frozen
    assert f"f32[300,{D}]" in trained


def test_frozen_hidden_states_have_no_product_of_their_own():
    assert traced(chunks_of_64, (1,), **SMALL).count("dot_general[") == 3


def test_remat_around_a_frozen_head_keeps_it_frozen():
    assert f"f32[300,{D}]" not in traced(chunks_of_64, (0,), wrap=jax.checkpoint, **SMALL)
    assert f"f32[300,{D}]" in traced(chunks_of_64, (0, 1), wrap=jax.checkpoint, **SMALL)


def test_compiled_products_are_the_traced_ones_and_the_head_is_neither_transposed_nor_converted():
    frozen, trained = (compiled(chunks_of_64, which, **SMALL).as_text() for which in ((0,), (0, 1)))
    assert (frozen.count(" dot("), trained.count(" dot(")) == (3, 4)
    assert f"f32[300,{D}]" not in frozen
    assert f"[{D},300]" not in frozen + trained


@pytest.mark.parametrize("trained", [(0,), (0, 1)], ids=["frozen", "trained"])
def test_memory_is_that_of_a_chunk(trained):
    gradient = 4 * V * D * (len(trained) - 1)
    assert temporaries(chunks_of_64, trained) < 2 * 64 * V * 4 + 2 * gradient + MIB
    assert temporaries(reference.token_stats, trained) > 2 * T * V * 4


def test_memory_is_flat_in_the_vocabulary_and_in_the_tokens(monkeypatch):
    monkeypatch.setitem(xla.LOGITS_BUDGET, "cpu", 2 * MIB)
    sizes = [temporaries(xla.token_stats, (0,), vocab=v) for v in (V // 4, V)]
    sizes.append(temporaries(xla.token_stats, (0,), tokens=4 * T))
    assert max(sizes) < 1.3 * min(sizes)
    assert temporaries(xla.token_stats, (0,), vocab=2 * V) > 1.3 * min(sizes)  # a chunk has at least 64 tokens


@pytest.mark.parametrize("platform, budget", [("cpu", 128 * MIB), ("gpu", 1024 * MIB), ("tpu", 1024 * MIB)])
@pytest.mark.parametrize("vocab", [100, 49152, 151936, 2_000_000])
def test_a_chunk_fits_its_budget(platform, budget, vocab):
    chunk = xla.default_chunk(vocab, platform)
    assert chunk % 64 == 0
    assert chunk == 64 or 4 * vocab * chunk <= budget < 4 * vocab * (chunk + 64)

"""What the log-prob head costs, read off compiled programs: matrix products, buffers, temporary memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rlx_kernels.logprob import fused, reference, token_loss, xla
from rlx_kernels.logprob.core import Backend
from rlx_kernels.logprob.tiling import Tile, even_columns

T, V, D, K = 512, 8192, 32, 4
MIB = 1 << 20
SMALL: dict[str, Any] = {"tokens": 128, "vocab": 300, "dtype": jnp.bfloat16}


def sums(out, _):
    return (out.logprob + out.entropy).sum() + out.logsumexp.sum() + out.candidate_logprobs.sum()


def statistics(stats, **options):
    """hidden, head, targets, candidates -> a loss of every output of `stats`."""

    def loss(hidden, head, *ids):
        precision = "bfloat16" if hidden.dtype == jnp.bfloat16 else "float32"
        return sums(stats(hidden, head, *ids, temperature=1.0, vocab_axis=None, precision=precision, **options), ())

    return loss


def tiles(tokens, columns):
    return Backend(xla.moments, xla.d_logits, lambda *_: Tile(tokens, columns))


DENSE, DEFAULT = statistics(reference.token_stats), statistics(xla.token_stats)
ONE_BLOCK = statistics(xla.token_stats, backend=tiles(64, V))  # a rest would be a second copy of the program
SMALL_TILES = statistics(xla.token_stats, backend=tiles(64, 2048))


def forward_gradient(*x):
    return token_loss(sums, *x)[0]


def program(loss, trained, tokens=T, vocab=V, dtype=jnp.float32, wrap=lambda f: f, width=D):
    """(value and gradient of a loss of all outputs, the shapes of its arguments), in hidden (trained (0,)) or in
    hidden and head (trained (0, 1))."""
    shapes = (
        jax.ShapeDtypeStruct((tokens, width), dtype),
        jax.ShapeDtypeStruct((vocab, width), dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens, K), jnp.int32),
    )
    return jax.value_and_grad(wrap(loss), trained), shapes


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


every_wrap = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, in_a_scan], ids=["plain", "jit", "scan"])
both_losses = pytest.mark.parametrize("loss, frozen, trained", [(ONE_BLOCK, 3, 4), (forward_gradient, 2, 3)])


@every_wrap
@both_losses
def test_a_frozen_head_has_no_product_and_no_buffer_of_its_own(loss, frozen, trained, wrap):
    """Logits, the gradient of hidden, and of a trained head; statistics alone need the logits a second time."""
    without, with_head = (traced(loss, which, wrap=wrap, **SMALL) for which in ((0,), (0, 1)))
    assert (without.count("dot_general["), with_head.count("dot_general[")) == (frozen, trained)
    assert not has_gradient_of_head(without)
    assert has_gradient_of_head(with_head)


def has_gradient_of_head(text):
    return f"f32[300,{D}]" in text or f"f32[{D},300]" in text


def test_frozen_hidden_states_have_no_product_of_their_own():
    assert traced(ONE_BLOCK, (1,), **SMALL).count("dot_general[") == 3
    assert traced(forward_gradient, (1,), **SMALL).count("dot_general[") == 2


def test_a_value_alone_has_one_product():
    for loss in (ONE_BLOCK, forward_gradient):
        _, shapes = program(loss, (0,), **SMALL)
        assert str(jax.make_jaxpr(loss)(*shapes)).count("dot_general[") == 1


@both_losses
def test_remat_around_a_frozen_head_keeps_it_frozen(loss, frozen, trained):
    assert not has_gradient_of_head(traced(loss, (0,), wrap=jax.checkpoint, **SMALL))
    assert has_gradient_of_head(traced(loss, (0, 1), wrap=jax.checkpoint, **SMALL))


@pytest.mark.parametrize("trained", [(0,), (0, 1)], ids=["frozen", "trained"])
def test_memory_is_that_of_a_tile(trained):
    """Two tiles, float32 hidden gradients, a block of the head's; the gradient itself is an output."""
    tile, rows, block = 64 * 2048 * 4, T * D * 4, 2048 * D * 4
    assert temporaries(SMALL_TILES, trained) < 2 * tile + 4 * rows + 3 * block + MIB // 2
    assert temporaries(DENSE, trained) > 2 * T * V * 4


def test_memory_is_flat_in_the_vocabulary_and_in_the_tokens():
    sizes = [temporaries(SMALL_TILES, (0, 1), vocab=v) for v in (V // 2, V, 2 * V)]
    assert max(sizes) < 1.1 * min(sizes)
    assert temporaries(SMALL_TILES, (0,), tokens=4 * T) < sizes[1] + 6 * 4 * T * D * 4


@pytest.mark.slow
def test_a_large_vocabulary_fits_a_small_memory():
    """T 4,096, D 256, V 151,936 in bfloat16, where the logits alone would be 2,374 MiB in float32."""
    at = functools.partial(temporaries, DEFAULT, (0, 1), tokens=4096, dtype=jnp.bfloat16, width=256)
    once, twice = at(vocab=151_936), at(vocab=2 * 151_936)
    assert once <= 64 * MIB
    assert twice - once <= 0.1 * 151_936 * 256 * 2  # a tenth of what the gradient grows by: it is an output


@pytest.mark.parametrize("platform, most_bytes", [("cpu", 16 * MIB), ("gpu", 1024 * MIB)])
@pytest.mark.parametrize("tokens", [1, 64, 5000, 100_000])
@pytest.mark.parametrize("vocab", [1, 100, 49_152, 151_936, 248_320, 2_000_003])
def test_a_tile_fits_its_budget_and_is_not_much_smaller(platform, most_bytes, tokens, vocab):
    tile = xla.default_backend(platform).tile(tokens, vocab, True)
    assert 1 <= tile.tokens <= tokens
    assert 1 <= tile.columns <= vocab
    used = 4 * tile.tokens * tile.columns
    assert used <= most_bytes
    assert used > most_bytes / 4 or tile.columns == vocab


@pytest.mark.parametrize(
    "vocab, most, columns", [(100, 200, 100), (49_152, 4096, 4096), (151_936, 16_384, 9496), (7919, 1000, 1000)]
)
def test_blocks_leave_no_rest_where_an_equal_part_is_large_enough(vocab, most, columns):
    assert even_columns(vocab, most) == columns


@pytest.mark.parametrize("vocab", [100, 49_152, 151_936, 2_000_000])
def test_a_chunk_of_whole_rows_fits_its_budget_or_is_the_smallest(vocab):
    size = fused.chunk_tokens(5000, vocab, "cpu")
    assert size == fused.MIN_TOKENS or 4 * vocab * size <= fused.CHUNK_BYTES["cpu"] or size == 5000
    assert fused.chunk_tokens(7, vocab, "gpu") == 7

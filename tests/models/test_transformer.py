"""The forward pass: stored logits of the checkpoints, packed rows against single ones, recomputation, adapters."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models.description import DeltaNet, Group, Layer
from rlx.models.hf import load_params, read_architecture
from rlx.models.transformer import forward, head_matrix, logits, prefix_sharing_unsupported_reason
from tests import tiny_model
from tests.tiny_model import ARCH

FIXTURES = Path(__file__).parent.parent / "fixtures"
LENGTHS = (5, 9, 4, 6)  # of the packed sequences: 24 tokens in a row of 28
ROW = 28
RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(0, ARCH.vocab_size, n) for n in LENGTHS]


def noise():
    """Four rows of padding: segment 0, whatever tokens and positions."""
    tokens, positions = RNG.integers(0, ARCH.vocab_size, (4, ROW)), RNG.integers(0, ROW, (4, ROW))
    return tokens, positions, np.zeros((4, ROW), int)


def put(row, places):
    """Write sequences into `row`, a view of (tokens, positions, segments): [(start, segment, sequence)]."""
    for start, segment, i in places:
        span = slice(start, start + LENGTHS[i])
        row[0][span], row[1][span], row[2][span] = SEQUENCES[i], np.arange(LENGTHS[i]), segment


def alone():
    batch = noise()
    for i in range(4):
        put([x[i] for x in batch], [(0, 1, i)])
    return batch, [(i, 0) for i in range(4)]


def packed():
    """All in row 2, in another order, padding between them, segment ids that are not in order."""
    batch, places = noise(), [(1, 7, 2), (5, 1, 0), (11, 3, 3), (18, 2, 1)]
    put([x[2] for x in batch], places)
    starts = {i: start for start, _, i in places}
    return batch, [(2, starts[i]) for i in range(4)]


@dataclasses.dataclass(frozen=True)
class Options:
    remat: str = "none"
    unrolled: bool = False


@partial(jax.jit, static_argnums=0)
def value_and_gradient(options, params, batch, mixing):
    """Hidden states, and the gradient of Σ mixing · hidden with respect to every parameter."""

    def total(params):
        hidden = forward(ARCH, params, *batch, remat=options.remat, unrolled=options.unrolled)
        return (mixing * hidden).sum(), hidden

    (_, hidden), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return hidden, gradient


def run(layout, options=Options()):
    """(hidden states of each sequence, gradient of the same function of them) in one layout."""
    batch, starts = layout
    mixing = np.zeros((4, ROW, ARCH.hidden_size), np.float32)
    for i, (row, start) in enumerate(starts):
        mixing[row, start : start + LENGTHS[i]] = np.random.default_rng(i).normal(size=(LENGTHS[i], ARCH.hidden_size))
    batch = tuple(jnp.asarray(x, jnp.int32) for x in batch)
    hidden, gradient = jax.device_get(value_and_gradient(options, tiny_model.params(), batch, mixing))
    assert np.isfinite(hidden).all()
    return [hidden[row, start : start + n] for n, (row, start) in zip(LENGTHS, starts, strict=True)], gradient


def assert_same(got, wanted, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_tied"])
def test_stored_logits(name):
    """`rlx verify-model` compares more of them, and gradients."""
    arch, reference = read_architecture(FIXTURES / name), np.load(FIXTURES / name / "reference.npz")
    params = jax.tree.map(jnp.asarray, load_params(FIXTURES / name, arch))

    @jax.jit
    def outputs(tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return logits(params, forward(arch, params, tokens, positions, jnp.ones_like(tokens)))

    got = outputs(jnp.asarray(reference["input_ids"]))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference["logits"], atol=1e-4)


def test_packed_sequences_are_as_alone():
    """In values and in the gradient of every parameter; padding holds random tokens and positions."""
    (hidden, gradient), (wanted, wanted_gradient) = run(packed()), run(alone())
    assert_same(hidden, wanted, 1e-5)
    assert_same(gradient, wanted_gradient, 2e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("remat", ["none", "products", "layer"])
@pytest.mark.parametrize("unrolled", [False, True])
def test_neither_recomputation_nor_a_loop_over_layers_changes_anything(remat, unrolled):
    layout = packed()
    assert_same(run(layout, Options(remat, unrolled)), run(layout), 1e-5)


def test_later_tokens_are_not_seen():
    """Changing a sequence's last token changes its last hidden state and no other of the batch."""
    batch, starts = packed()
    changed = tuple(x.copy() for x in batch)
    row, start = starts[1][0], starts[1][1] + LENGTHS[1] - 1
    changed[0][row, start] += 1
    (before, _), (after, _) = run((batch, starts)), run((changed, starts))
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        same = LENGTHS[i] - (i == 1)
        np.testing.assert_array_equal(x[:same], y[:same])
    assert np.abs(before[1][-1] - after[1][-1]).max() > 1e-2


def test_the_head_is_the_embedding_where_the_two_are_tied():
    params = {"embed": jnp.ones((5, 3)), "head": jnp.zeros((5, 3))}
    assert head_matrix(params) is params["head"]
    del params["head"]
    assert head_matrix(params) is params["embed"]
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert logits(half, jnp.ones((2, 3), jnp.bfloat16)).dtype == jnp.float32


def test_only_models_known_to_be_attention_share_prefixes():
    assert prefix_sharing_unsupported_reason(ARCH) is None
    layer = Layer(DeltaNet(2, 2, 8, 8, 4, "fused", negative_eigenvalues=False, eps=1e-6), ARCH.layers[0].mlp)
    hybrid = dataclasses.replace(ARCH, groups=(*ARCH.groups, Group((layer,), 1)))
    assert "DeltaNet carry a state" in prefix_sharing_unsupported_reason(hybrid)

"""Attention residuals against a list of snapshots in numpy, layer by layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlx.models import residual_bank

EPS, LAYERS, BLOCK, WIDTH = 1e-5, 5, 2, 8


def mixed(entries, norm, score):
    """Σ softmax(score · norm ∘ v / rms(v)) v over a list of [rows, t, d]."""
    v = np.stack(entries)
    scores = (v * norm * score).sum(-1) / np.sqrt((v * v).mean(-1) + EPS)
    gains = np.exp(scores - scores.max(0))
    return ((gains / gains.sum(0))[..., None] * v).sum(0)


def weights():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return draw(1, 3, WIDTH), 1 + draw(LAYERS, 2, WIDTH), draw(LAYERS, 2, WIDTH), draw(LAYERS, 2, 1, 3, WIDTH)


def by_list(embedded, norms, scores, outs):
    """What each sub-layer reads, and the bank in the end; `outs` are what sub-layers add."""
    bank, stream, read = [], embedded, []
    for layer in range(LAYERS):
        read.append(mixed([*bank, stream], norms[layer, 0], scores[layer, 0]) if bank else stream)
        if layer % BLOCK == 0:
            bank, stream = [*bank, stream], np.zeros_like(stream)
        stream = stream + outs[layer, 0]
        read.append(mixed([*bank, stream], norms[layer, 1], scores[layer, 1]))
        stream = stream + outs[layer, 1]
    return np.stack(read), bank, stream


@jax.jit
def scanned(embedded, norms, scores, outs):
    def layer(bank, xs):
        number, norm, score, out = xs
        first = residual_bank.mix(bank, norm[0], score[0], EPS)
        bank = residual_bank.added(residual_bank.snapshot(bank, number, BLOCK), out[0])
        second = residual_bank.mix(bank, norm[1], score[1], EPS)
        return residual_bank.added(bank, out[1]), jnp.stack([first, second])

    bank = residual_bank.begin(embedded, LAYERS, BLOCK)
    bank, read = jax.lax.scan(layer, bank, (jnp.arange(LAYERS), norms, scores, outs))
    return bank, read.reshape(2 * LAYERS, *embedded.shape)


def test_a_scan_over_layers_reads_what_a_list_of_snapshots_holds():
    given = weights()
    bank, read = scanned(*given)
    wanted, snapshots, stream = by_list(*given)
    np.testing.assert_allclose(read, wanted, atol=1e-5)
    np.testing.assert_allclose(bank.snapshots, np.stack(snapshots), atol=1e-5)
    np.testing.assert_allclose(bank.stream, stream, atol=1e-5)
    assert bank.count == len(snapshots) == 3


def test_with_an_empty_bank_the_stream_is_read_and_no_score_is_learnt():
    embedded, norms, scores, _ = (jnp.asarray(x) for x in weights())
    bank = residual_bank.begin(embedded, LAYERS, BLOCK)
    loss = lambda norm, score: (residual_bank.mix(bank, norm, score, EPS) ** 2).sum()  # noqa: E731
    np.testing.assert_array_equal(residual_bank.mix(bank, norms[0, 0], scores[0, 0], EPS), embedded)
    for gradient in jax.grad(loss, (0, 1))(norms[0, 0], scores[0, 0]):
        np.testing.assert_allclose(gradient, 0, atol=1e-6)

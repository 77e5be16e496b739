"""Log-probs of given tokens under the learner's policy, and the loss without its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx import assemble
from rlx.learner.score import score, score_sequences
from rlx.models.transformer import forward, logits
from tests import tiny_run


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """(step config, an adapter that is not 0, frozen parameters)."""
    config = tiny_run.config(tiny_run.write(tmp_path_factory.mktemp("score")), rollout__temperature=0.7)
    model = assemble.load_model(config)
    state = tiny_run.fresh_state(config, model)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    adapter = jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape, x.dtype), state.trainable)
    return assemble.step_config(config, model.arch, 4), adapter, model.params, config


def dense(policy, sequence):
    """The same from dense logits of the merged model, one sequence by itself."""
    step, adapter, frozen, config = policy
    merged = assemble.policy_params(config, assemble.Model(step.arch, frozen, None, ""), adapter)
    length = len(sequence)
    hidden = forward(step.arch, merged, jnp.array(sequence)[None], jnp.arange(length)[None], jnp.ones((1, length), int))
    log_p = jax.nn.log_softmax(logits(merged, hidden)[0] / 0.7)
    return np.array([0.0, *(log_p[t - 1, sequence[t]] for t in range(1, length))])


def test_log_probs_are_those_of_the_merged_model(policy):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 260, length).astype(np.int32) for length in (3, 40, 1)]
    scored = score_sequences(*policy[:3], sequences, longest=160)
    assert [len(values) for values in scored] == [3, 40, 1]
    for values, sequence in zip(scored, sequences, strict=True):
        np.testing.assert_allclose(values, dense(policy, sequence), rtol=1e-4, atol=1e-4)


def test_what_is_beyond_a_row_is_0_and_does_not_matter(policy):
    tokens = jnp.array([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]])
    scored = score(*policy[:3], tokens, jnp.array([3, 5]))
    np.testing.assert_allclose(scored[0, :3], scored[1, :3], rtol=1e-5, atol=1e-6)
    assert scored[0, 3:].tolist() == [0, 0]
    assert scored[:, 0].tolist() == [0, 0]


def test_few_shapes_are_compiled(policy):
    sequences = lambda *lengths: [np.ones(length, np.int32) for length in lengths]  # noqa: E731
    score.clear_cache()
    for lengths in ((3, 9), (60, 64), (64, 2)):
        score_sequences(*policy[:3], sequences(*lengths), longest=160)
    assert score._cache_size() == 1
    assert score_sequences(*policy[:3], [], longest=160) == []


def test_a_sequence_that_is_too_long_is_refused(policy):
    with pytest.raises(ValueError, match="161 tokens is to be scored; at most 160 fit"):
        score_sequences(*policy[:3], [np.ones(161, np.int32)], longest=160)

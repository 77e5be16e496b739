"""The embedded engine against the forward pass and the learner, on the stored checkpoints and the tiny model."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.config.schema import EngineConfig
from rlx.models.hf import load_params, read_architecture
from rlx.models.transformer import forward, logits
from rlx.rollout.engine import EngineError, check_completion
from rlx.types import StopReason, VersionSpan
from tests import tiny_model
from tests.rollout.serving import CONFIG, ask, assert_same, make_engine, serve, trainer_gap
from tests.tiny_model import ARCH

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = ["qwen2", "qwen3", "qwen3_tied"]
STOPS = tuple(range(0, ARCH.vocab_size, 13))


@pytest.fixture(scope="module")
def params():
    return tiny_model.params()


# ------------------------------------------------------------------------------------------------------ stored models


@partial(jax.jit, static_argnums=(0, 3))
def distributions(arch, params, tokens, temperature):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = forward(arch, params, tokens, positions, jnp.ones_like(tokens))
    return jax.nn.log_softmax(logits(params, hidden) / temperature)


@pytest.fixture(scope="module", params=NAMES)
def generated(request):
    """(architecture, parameters, [(request, completion)]): seven samples on four slots, whole vocabularies as heads."""
    arch = read_architecture(FIXTURES / request.param)
    params = jax.tree.map(jnp.asarray, load_params(FIXTURES / request.param, arch))
    config = EngineConfig(
        "local", slots=4, context=40, prefill_buckets=(16,), prefill_rows=2, steps_per_dispatch=5, lanes=1
    )
    engine = make_engine(arch, params, config, head_size=arch.vocab_size)
    requests = [
        ask(i, length, samples, vocab=arch.vocab_size, new=12, temperature=0.8)
        for i, (length, samples) in enumerate([(3, 2), (16, 1), (21, 3), (11, 1)])
    ]
    return arch, params, [(r, c) for r, found in zip(requests, serve(engine, requests)) for c in found]


def test_cached_decoding_is_the_forward_pass(generated):
    """Every candidate of every token, against one pass over prompt and response."""
    arch, params, written = generated
    tokens = np.zeros((len(written), 40), np.int32)
    for i, (request, completion) in enumerate(written):
        tokens[i, : len(request.prompt) + 12] = np.concatenate([request.prompt, completion.tokens])
    wanted = np.asarray(distributions(arch, params, jnp.asarray(tokens), 0.8))
    for i, (request, completion) in enumerate(written):
        rows = wanted[i, len(request.prompt) - 1 : len(request.prompt) + 11]
        np.testing.assert_allclose(
            completion.head.logprobs, np.take_along_axis(rows, completion.head.ids, 1), atol=5e-5
        )
        np.testing.assert_allclose(completion.logprobs, rows[np.arange(12), completion.tokens], atol=5e-5)
        assert (np.sort(completion.head.ids, axis=1) == np.arange(arch.vocab_size)).all()


def test_log_probs_are_the_learners(generated):
    """And a change of one token's by a thousandth is seen."""
    arch, params, written = generated
    assert trainer_gap(arch, params, written, temperature=0.8) < 1e-4
    request, completion = written[3]
    changed = dataclasses.replace(completion, logprobs=completion.logprobs + 1e-3 * (np.arange(12) == 7))
    assert trainer_gap(arch, params, [*written[:3], (request, changed)], temperature=0.8) > 9e-4


# ------------------------------------------------------------------------------------------------ slots and dispatches

REQUESTS = [
    ask(0, 5, 3),
    ask(1, 12, 2),
    ask(2, 8),
    ask(3, 29, 2, new=6),
    ask(4, 1, 3, new=4),
    ask(5, 16, temperature=0.0),
]


@pytest.fixture(scope="module")
def engine(params):
    """Of three slots; used by test after test."""
    return make_engine(ARCH, params, stop_ids=STOPS)


@pytest.fixture(scope="module")
def answers(engine):
    return serve(engine, REQUESTS)


def test_every_request_is_answered_in_its_own_order(answers):
    """Twelve samples on three slots."""
    assert [len(found) for found in answers] == [len(r.seeds) for r in REQUESTS]
    first = [tuple(c.tokens) for c in answers[0]]
    assert len(set(first)) == 3


@pytest.mark.parametrize(
    "slots, rows, steps, buckets, head_size", [(7, 4, 1, (29, 64), 4), (1, 1, 8, (), 0)], ids=["many slots", "one slot"]
)
def test_results_do_not_depend_on_how_they_are_served(params, answers, slots, rows, steps, buckets, head_size):
    """Nor on whether heads are stored."""
    config = EngineConfig("local", slots, CONFIG.context, buckets, prefill_rows=rows, steps_per_dispatch=steps, lanes=1)
    others = serve(make_engine(ARCH, params, config, head_size=head_size, stop_ids=STOPS), REQUESTS)
    for got, wanted in zip(others, answers, strict=True):
        for x, y in zip(got, wanted, strict=True):
            assert_same(x, y if head_size else dataclasses.replace(y, head=None))


def test_results_do_not_depend_on_the_neighbours(engine, answers):
    """Alone, in slots that have served others."""
    for i in (1, 3, 5):
        for got, wanted in zip(serve(engine, [REQUESTS[i]])[0], answers[i], strict=True):
            assert_same(got, wanted)


def test_temperature_zero_is_the_likeliest_and_repeatable(engine, answers):
    (completion,) = answers[5]
    np.testing.assert_array_equal(completion.tokens, completion.head.ids[:, 0])
    np.testing.assert_array_equal(completion.logprobs, completion.head.logprobs[:, 0])
    other_seed = dataclasses.replace(REQUESTS[5], seeds=(99,))
    assert_same(serve(engine, [other_seed])[0][0], completion)


def test_each_way_to_end(answers):
    """A stop token is the last one; otherwise the request's own limit, or the context: 29 of 32 tokens leave 3."""
    limits = [min(r.max_new_tokens, 32 - len(r.prompt)) for r in REQUESTS]
    assert limits[3] == 3
    reasons = set()
    for limit, found in zip(limits, answers, strict=True):
        for c in found:
            stopped = np.isin(c.tokens, STOPS)
            assert not stopped[:-1].any()
            assert c.stop_reason is (StopReason.STOP if stopped[-1] else StopReason.LENGTH)
            assert stopped[-1] or len(c.tokens) == limit
            assert c.version_spans == (VersionSpan(0, 0, len(c.tokens)),)
            assert len(c.logprobs) == len(c.head.ids) == len(c.tokens) <= limit
            reasons.add(c.stop_reason)
    assert reasons == {StopReason.STOP, StopReason.LENGTH}


def test_heads_are_descending_and_agree_with_the_sampled_tokens(answers):
    completions = [c for found in answers for c in found]
    for request, found in zip(REQUESTS, answers, strict=True):
        for completion in found:
            check_completion(request, completion)
    assert all((np.diff(c.head.logprobs, axis=1) <= 0).all() for c in completions)
    hits = [(c.head.logprobs[c.head.ids == c.tokens[:, None]], c.logprobs) for c in completions]
    in_head = [np.isin(h, own) for h, own in hits]
    assert sum(map(len, in_head)) > 10
    assert all(x.all() for x in in_head)


def test_samples_of_a_prompt_share_its_prefill(params):
    engine = make_engine(ARCH, params, stop_ids=STOPS)
    found = serve(engine, [ask(0, 5, 3)])[0]
    assert engine.stats.prompt_tokens == 5
    assert engine.stats.new_tokens == sum(len(c.tokens) for c in found)
    assert engine.stats.slot_steps == 3 * engine.stats.steps
    assert engine.stats.occupancy == engine.stats.new_tokens / engine.stats.slot_steps
    serve(engine, [ask(1, 7, 1), ask(2, 6, 2)])
    assert engine.stats.prompt_tokens == 5 + 7 + 6


def test_what_no_engine_can_serve_is_refused(engine, answers):
    with pytest.raises(EngineError, match="token ids"):
        serve(engine, [dataclasses.replace(ask(0, 5), prompt=np.array([260]))])
    assert_same(serve(engine, [REQUESTS[2]])[0][0], answers[2][0])

"""Mixtures of experts: routing against its definition, replay, padding, losses, adapters of both forms."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from rlx.assemble import device_batch
from rlx.config.schema import EngineConfig, LoraConfig
from rlx.data.packing import PackingConfig, pack
from rlx.data.trajectories import trajectories
from rlx.envs.grading import Grade, Outcome
from rlx.learner.routing import RouterLosses, load_values
from rlx.learner.state import init_state
from rlx.learner.step import update
from rlx.models import lora, moe, sampler
from rlx.models.description import Experts, Router
from rlx.models.hf import load_params, read_architecture
from rlx.models.peft import load_adapter, save_adapter, to_peft
from rlx.models.transformer import forward_routed
from rlx.rollout.local import LocalEngine
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason
from tests.learner import batches
from tests.records import make_task
from tests.rollout.serving import ask, serve

FIXTURES = Path(__file__).parent.parent / "fixtures"
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model():
    arch = read_architecture(FIXTURES / "qwen3_moe")
    return arch, jax.tree.map(jnp.asarray, load_params(FIXTURES / "qwen3_moe", arch))


@partial(jax.jit, static_argnums=0)
def run(arch, params, tokens, segments, routes=None, adapter=None):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward_routed(arch, params, tokens, positions, segments, routes=routes, adapter=adapter, adapter_scale=2.0)


TOKENS = jnp.asarray(RNG.integers(0, 384, (2, 12)), jnp.int32)
ONES = jnp.ones((2, 12), jnp.int32)


# ------------------------------------------------------------------------------------------------------------- routing


def test_groups_are_ranked_by_their_two_best():
    """Two of four groups of three; the best single expert is in a group that loses."""
    router = Router("sigmoid", normalise=True, bias=True, groups=4, top_groups=2, scale=2.5)
    experts = Experts(12, 3, 8, router)
    scores = np.full((1, 12), 0.1, np.float32)
    scores[0, [0, 1]] = 0.6, 0.5
    scores[0, [4, 5]] = 0.5, 0.45
    scores[0, 9] = 0.7
    choices, margin = moe.choose(experts, jnp.asarray(scores), jnp.zeros(12))
    assert sorted(np.asarray(choices[0]).tolist()) == [0, 1, 4]
    assert float(margin[0]) == pytest.approx(0.05, abs=1e-6)
    gains = moe.route_weights(router, jnp.asarray(scores), choices)
    np.testing.assert_allclose(np.sort(np.asarray(gains[0])), 2.5 * np.array([0.5, 0.5, 0.6]) / 1.6, rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh():
    experts = Experts(4, 1, 8, Router("sigmoid", normalise=False, bias=True))
    scores = jnp.array([[0.9, 0.1, 0.2, 0.3]])
    choices, _ = moe.choose(experts, scores, jnp.array([0.0, 1.0, 0.0, 0.0]))
    assert choices.tolist() == [[1]]
    np.testing.assert_allclose(moe.route_weights(experts.router, scores, choices), [[0.1]])


def test_padding_comes_to_no_expert(model):
    arch, params = model
    segments = ONES.at[:, 9:].set(0)
    hidden, routing = run(arch, params, TOKENS, segments)
    other, _ = run(arch, params, TOKENS.at[:, 9:].set(7), segments)
    np.testing.assert_array_equal(hidden[:, :9], other[:, :9])
    assert routing.choices.shape == (2, 2, 12, 2)
    np.testing.assert_array_equal(routing.load.sum(1), [2 * 9 * 2] * 2)


def test_replaying_a_models_own_choices_changes_nothing_and_others_do(model):
    arch, params = model
    hidden, routing = run(arch, params, TOKENS, ONES)
    own = jnp.moveaxis(routing.choices, 0, 2)
    np.testing.assert_allclose(run(arch, params, TOKENS, ONES, own)[0], hidden, atol=1e-5)
    unknown = jnp.full_like(own, -1)
    np.testing.assert_array_equal(run(arch, params, TOKENS, ONES, unknown)[0], hidden)
    moved = unknown.at[:, 5, 1].set((own[:, 5, 1] + 1) % 8)
    replayed, routing = run(arch, params, TOKENS, ONES, moved)
    np.testing.assert_array_equal(routing.choices[1, :, 5], moved[:, 5, 1])
    changed = np.abs(np.asarray(replayed - hidden)).max(axis=(0, 2)) > 1e-6
    np.testing.assert_array_equal(changed, np.arange(12) == 5)  # of the last layer: no other token sees it


def test_losses_are_those_of_their_papers(model):
    arch, params = model
    _, routing = run(arch, params, TOKENS, ONES)
    for layer in range(2):
        load = np.bincount(np.asarray(routing.choices[layer]).ravel(), minlength=8)
        np.testing.assert_array_equal(routing.load[layer], load)
    logits = RNG.normal(size=(50, 8)).astype(np.float32)
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    choices = np.argsort(-scores, 1)[:, :2]
    experts = arch.layers[0].mlp
    _, balance, z = moe.statistics(experts, *map(jnp.asarray, (logits, scores, choices, np.ones(50, bool))))
    share = np.bincount(choices.ravel(), minlength=8) / 100
    assert float(balance) == pytest.approx(8 * (share * scores.mean(0)).sum(), rel=1e-5)
    assert float(z) == pytest.approx((np.log(np.exp(logits).sum(1)) ** 2).mean(), rel=1e-5)


def test_loads_as_numbers(model):
    load, dropped = np.array([[4, 4, 4, 4], [0, 0, 8, 8]]), np.array([0, 8])
    values = load_values(model[0], {"train/moe/load": load, "train/moe/dropped": dropped})
    assert values["train/moe/max_load"] == values["train/moe/max_load_layer_1"] == 2
    assert values["train/moe/max_load_layer_0"] == 1
    assert values["train/moe/dead_experts"] == 2
    assert values["train/moe/dropped_fraction"] == 0.25
    assert values["train/moe/load_cv"] == pytest.approx(0.5)
    assert load_values(model[0], {}) == {}


# ------------------------------------------------------------------------------------------------------------ adapters

FORMS = ["per_expert", "shared_outer"]


def settings(form: str) -> LoraConfig:
    return LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "experts.*"), experts=form)


def random_adapter(arch, config):
    shapes = jax.eval_shape(partial(lora.init_adapter, arch, config), jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), shapes)


@pytest.mark.parametrize("form", FORMS)
def test_merged_and_unmerged(model, form):
    arch, params = model
    adapter = random_adapter(arch, settings(form))
    merged = lora.merge(params, adapter, 2.0)
    beside, _ = run(arch, params, TOKENS, ONES, None, adapter)
    assert float(jnp.abs(beside - run(arch, params, TOKENS, ONES)[0]).max()) > 0.1
    np.testing.assert_allclose(run(arch, merged, TOKENS, ONES)[0], beside, atol=2e-4)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), lora.unmerge(merged, adapter, 2.0), params)


def test_what_experts_share_is_kept_once(model):
    arch, _ = model
    sizes = {
        form: sum(np.prod(x.shape) for x in jax.tree.leaves(random_adapter(arch, settings(form))["0"]["mlp"]))
        for form in FORMS
    }
    layers, experts, rank, hidden, width = 2, 8, 2, 64, 32
    assert sizes["per_expert"] == layers * experts * rank * 3 * (hidden + width)
    assert sizes["shared_outer"] == layers * rank * (2 * hidden + experts * 3 * width)


@pytest.mark.parametrize("form", FORMS)
def test_exported_adapters_reload(model, tmp_path, form):
    """Under the names that SGLang reads: experts one by one, or three axes of which the shared one has size 1."""
    arch, _ = model
    config, adapter = settings(form), random_adapter(arch, settings(form))
    save_adapter(tmp_path / "adapter", arch, adapter, config, "base")
    again, found = load_adapter(tmp_path / "adapter", arch)
    assert (found.rank, found.experts) == (2, form)
    assert {t.name for t in lora.targets(arch, found)} == {t.name for t in lora.targets(arch, config)}
    jax.tree.map(np.testing.assert_array_equal, again, adapter)
    shapes = {name: array.shape for name, array in to_peft(arch, adapter, config)}
    layer = "base_model.model.model.layers.1.mlp.experts"
    if form == "per_expert":
        assert shapes[f"{layer}.7.up_proj.lora_A.weight"] == (2, 64)
        assert shapes[f"{layer}.7.down_proj.lora_B.weight"] == (64, 2)
    else:
        assert shapes[f"{layer}.gate_up_proj.lora_A.weight"] == (1, 2, 64)
        assert shapes[f"{layer}.gate_up_proj.lora_B.weight"] == (8, 64, 2)
        assert shapes[f"{layer}.down_proj.lora_A.weight"] == (8, 2, 32)
        assert shapes[f"{layer}.down_proj.lora_B.weight"] == (1, 64, 2)


def test_patterns(model):
    arch, _ = model
    names = lambda *patterns: {t.name for t in lora.targets(arch, LoraConfig(2, 4.0, patterns))}  # noqa: E731
    assert names("q_proj") == {"self_attn.q_proj"}
    assert names("self_attn.*") == {f"self_attn.{x}_proj" for x in "qkvo"}
    assert names("*") == names("self_attn.*")  # routed experts only where they are named
    assert names("experts.down_proj") == {"mlp.experts.down_proj"}
    with pytest.raises(ValueError, match=r"'gate_proj' is no linear layer .* which has mlp.experts.down_proj"):
        names("gate_proj")


# -------------------------------------------------------------------------------------------------------------- update


@pytest.mark.slow
def test_router_losses_move_the_router_and_loads_are_counted(model):
    """With coefficients the router's gradient is another; without, its loads are counted all the same."""
    arch, params = model
    config = dataclasses.replace(batches.CENTRED, arch=arch, adapter_scale=None)
    off = LoraConfig(0, 1.0, ())
    moved = {}
    for name, losses in (("off", RouterLosses(0.0, 0.0)), ("on", RouterLosses(0.5, 0.01))):
        state = init_state(arch, off, params, optax.sgd(0.1), jax.random.key(0))
        stepped = dataclasses.replace(config, router_losses=losses)
        state, _, metrics = update(stepped, optax.sgd(0.1), state, params, batches.batch())
        router = traverse_util.flatten_dict(state.trainable)["layers", "0", "mlp", "router", "kernel"]
        moved[name] = np.asarray(router)
        values = metrics.values() | load_values(arch, jax.device_get(metrics.counts))
        assert values["train/moe/balance_loss"] >= 1 - 1e-3
        assert values["train/moe/max_load"] > 1
        assert values["train/moe/dropped_fraction"] == 0
    assert np.abs(moved["on"] - moved["off"]).max() > 1e-5


@pytest.mark.slow
def test_an_engines_choices_reach_the_update(model):
    """Recorded of every token that was fed, laid out at the tokens' places, and those of the forward pass."""
    arch, params = model
    config = EngineConfig(
        "local", slots=2, context=32, prefill_buckets=(8,), prefill_rows=2, steps_per_dispatch=3, lanes=1
    )
    engine = LocalEngine(arch, config, params, version=0, head_size=0, stop_ids=(), record_routes=True)
    request = ask(0, 5, samples=2, vocab=arch.vocab_size, new=7)
    (completions,) = serve(engine, [request])
    samples = []
    for i, completion in enumerate(completions):
        transcript = Transcript()
        transcript.observe(request.prompt)
        transcript.write(completion)
        again = Transcript.from_state(transcript.get_state())
        verdict = Verdict(Grade(1.0, "", "", 0.0, Outcome.GRADED), "")
        samples.append(again.sample(make_task(0), 0, i, verdict, StopReason.LENGTH, zero_truncated=False))
    assert all(s.routes.shape == (7, 2, 2) for s in samples)
    laid_out = trajectories(samples, {(0, 0): 1.0, (0, 1): -1.0}, 0, with_head=False)
    packed = pack(laid_out, PackingConfig(32, 16, 1, 1, 0, share_prefixes=True, routes=sampler.routes_shape(arch)))
    (batch,) = device_batch(packed)
    recorded = np.asarray(batch.routes)[..., 0, 0] >= 0
    assert recorded.sum() == 1 + 2 * 6  # the prompt's last token, which both share, and all written but the last
    positions = (batch.tokens, batch.positions, batch.segment_ids, batch.prefix_ids)
    _, routing = jax.jit(forward_routed, static_argnums=0)(arch, params, *positions)
    own = np.moveaxis(np.asarray(routing.choices), 0, 2)
    np.testing.assert_array_equal(np.sort(own[recorded]), np.sort(np.asarray(batch.routes)[recorded]))

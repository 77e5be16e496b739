"""From a configuration to a run's parts, on the tiny model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.base import get_config, source
from rlx import assemble
from rlx.config.errors import ConfigError
from rlx.config.parse import parse
from rlx.learner.state import init_state, make_optimizer
from rlx.models.lora import merge
from rlx.prompt_checks import check_prompts
from rlx.types import RowShape
from tests import tiny_model, tiny_tokenizer
from tests.learner import batches
from tests.records import make_task
from tests.tiny_model import ARCH


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def config(directory):
    """Makes a configuration; changes are by dotted key."""

    def make(**changes):
        c = get_config()
        c.model.path = directory
        c.tasks.sources.sums = source(path="tasks.jsonl")
        c.engine.update({"slots": 3, "context": 32, "prefill_buckets": (8, 16), "prefill_rows": 2})
        c.engine.steps_per_dispatch = 3
        c.rollout.max_new_tokens = 10
        c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
        return parse(c)

    return make


@pytest.fixture
def model(config):
    return assemble.load_model(config())


def adapter(config, model):
    state = init_state(ARCH, config.lora, model.params, make_optimizer(config.learner), jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), state.trainable)


@pytest.mark.parametrize("row_tokens, asked, expected", [(64, 0, 0), (2048, 0, 256), (2048, 128, 128)])
def test_blocks_of_scores_are_those_of_the_machine_unless_asked_for(config, model, row_tokens, asked, expected):
    made = config(learner__row_tokens=row_tokens, model__attention_block=asked)
    assert assemble.step_config(made, model.arch, 4).attention_block == expected


def test_the_model_is_the_directorys(model):
    assert model.arch == ARCH
    jax.tree.map(np.testing.assert_array_equal, model.params, tiny_model.params())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model.params))
    assert model.tokenizer.decode(model.tokenizer.encode_prompt("1+1")).startswith("user\n1+1")


def test_the_model_is_loaded_in_its_dtype(config):
    half = assemble.load_model(config(model__dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}


def test_a_context_beyond_the_models_positions_is_refused(config):
    assert assemble.load_model(config(engine__context=512)).arch.max_positions == 512
    with pytest.raises(ConfigError, match=r"config.engine.context = 513: .* for 512 positions .*; set at most 512"):
        assemble.load_model(config(engine__context=513))


def test_a_tokenizer_of_another_model_is_refused(config, tmp_path):
    small = tiny_model.sized(vocab_size=tiny_tokenizer.VOCAB_SIZE - 1)
    path = tiny_model.build(tmp_path / "small", small)
    with pytest.raises(ValueError, match=r"the tokenizer has 260 ids, the model's embedding 259"):
        assemble.load_model(config(model__path=path))


def test_prompts_must_leave_room_for_a_response(config, model):
    tasks = [dataclasses.replace(make_task(i), question=question) for i, question in enumerate(["1+1", "1+11"])]
    short, long = (len(model.tokenizer.encode_prompt(t.question)) for t in tasks)
    response = config().rollout.max_new_tokens
    lengths = check_prompts(config(engine__context=long + response), model.tokenizer, tasks)
    assert lengths == {"sums/0": short, "sums/1": long}
    with pytest.raises(ConfigError, match=f"1 of 2 tasks; the longest prompt, sums/1, has {long}; set at least"):
        check_prompts(config(engine__context=long + response - 1), model.tokenizer, tasks)
    with pytest.raises(ConfigError, match="2 of 2 tasks"):
        check_prompts(config(engine__context=short + response - 1), model.tokenizer, tasks)


# --------------------------------------------------------------------------------------------------------------- policy


def test_the_policy_is_the_model_with_its_adapter_merged(config, model):
    c = config(lora__rank=2, lora__alpha=8.0)
    trained = adapter(c, model)
    policy = assemble.policy_params(c, model, trained)
    wanted = merge(model.params, trained, 4.0)
    assert jax.tree.structure(policy) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(policy), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert policy["embed"] is model.params["embed"]
    (mixer, mlp), (old_mixer, old_mlp) = (
        (tree["layers"]["0"]["mixer"], tree["layers"]["0"]["mlp"]) for tree in (policy, model.params)
    )
    assert mlp["up_proj"]["kernel"] is old_mlp["up_proj"]["kernel"]
    assert not np.array_equal(mixer["q_proj"]["kernel"], old_mixer["q_proj"]["kernel"])


def test_the_policy_outlives_the_parameters_it_was_made_of(config, model):
    """Without an adapter the engine's copy must not share buffers with a state that the next update overwrites."""
    trained = jax.tree.map(jnp.copy, model.params)
    policy = assemble.policy_params(config(lora__rank=0), model, trained)
    jax.jit(lambda x: x, donate_argnums=0)(trained)
    assert jax.tree.leaves(trained)[0].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, policy, model.params)


def test_the_policy_is_in_the_models_dtype(config, model):
    policy = assemble.policy_params(config(lora__rank=0, model__dtype="bfloat16"), model, model.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(policy)} == {jnp.dtype("bfloat16")}


# --------------------------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("centering, size", [("tis", 7), ("off", 0)])
def test_heads_are_stored_where_the_objective_needs_them(config, centering, size):
    assert assemble.head_size(config(rollout__head_size=7, objective__centering=centering)) == size


def test_the_engine_serves_the_policy_and_stops_at_the_end_of_a_turn(config, model):
    c = config(rollout__head_size=4)
    engine = assemble.make_engine(c, model, model.params, version=5)
    assert set(engine.stop_ids) == {tiny_tokenizer.IM_END, tiny_tokenizer.END_OF_TEXT}
    assert (engine.admission, engine.config.context) == (3, 32)
    assert engine.config.head_size == 4
    assert engine.version == 5
    assert engine.config.ends == (8, 16, 32)


def test_an_engine_of_lanes_shares_its_slots_out(config, model):
    c = config()
    c = dataclasses.replace(c, engine=dataclasses.replace(c.engine, slots=4, lanes=2))
    engine = assemble.make_engine(c, model, model.params, version=5)
    assert (engine.admission, engine.version) == (4, 5)
    assert [lane.admission for lane in engine._lanes] == [2, 2]


def test_lanes_are_refused_on_accelerators(config, model, monkeypatch):
    monkeypatch.setattr(assemble.jax, "default_backend", lambda: "gpu")
    c = config()
    c = dataclasses.replace(c, engine=dataclasses.replace(c.engine, lanes=2))
    with pytest.raises(ConfigError, match=r"engine.lanes = 2: lanes are for CPUs, and this engine is on a gpu"):
        assemble.make_engine(c, model, model.params, version=0)


# -------------------------------------------------------------------------------------------------------------- shapes


def test_evaluation_draws_from_another_stream(config):
    c = config(run__seed=3, eval__temperature=0.5, eval__attempts_per_task=9, rollout__truncated="zero_reward")
    train, evaluation = assemble.sampling(c), assemble.eval_sampling(c)
    assert (train.temperature, train.group_size, train.zero_reward_truncated) == (1.0, 8, True)
    assert (evaluation.temperature, evaluation.group_size, evaluation.zero_reward_truncated) == (0.5, 9, False)
    seeds = [
        s.seed
        for seed in range(4)
        for s in (assemble.sampling(config(run__seed=seed)), assemble.eval_sampling(config(run__seed=seed)))
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_step_is_compiled_for_what_the_configuration_says(config):
    c = config(lora__rank=4, lora__alpha=2.0, rollout__temperature=0.7, model__remat="none", model__dtype="bfloat16")
    step = assemble.step_config(c, ARCH, num_sequences=64)
    assert (step.adapter_scale, step.temperature, step.remat, step.dtype) == (0.5, 0.7, "none", "bfloat16")
    assert (step.arch, step.num_sequences, step.objective) == (ARCH, 64, c.objective)
    assert step.logprob_implementation is None
    full = assemble.step_config(config(lora__rank=0, learner__logprob_implementation="reference"), ARCH, 64)
    assert (full.adapter_scale, full.remat, full.logprob_implementation) == (None, "products", "reference")


def test_what_is_recomputed_is_chosen_by_the_memory_that_it_saves(config):
    """By the configuration alone: a resumed run chooses the same."""
    wide = tiny_model.sized(num_layers=40, hidden_size=8192, intermediate_size=32768)
    assert assemble.remat(config(), ARCH) == "products"
    assert assemble.remat(config(), wide) == "layer"
    assert assemble.remat(config(learner__micro_batch_rows=1, model__dtype="bfloat16"), wide) == "products"
    assert assemble.remat(config(model__remat="none"), wide) == "none"


def test_few_layers_stand_one_after_the_other(config):
    deep = tiny_model.sized(num_layers=assemble.UNROLLED_LAYERS + 1)
    assert assemble.unrolled(config(), ARCH)
    assert not assemble.unrolled(config(), deep)
    assert not assemble.unrolled(config(model__scan_layers="on"), ARCH)
    assert assemble.unrolled(config(model__scan_layers="off"), deep)


def test_the_packing_holds_every_sample(config):
    """63 samples at worst have a row each; four rows are a micro-batch."""
    c = config(learner__row_targets=64)
    packing = assemble.packing_config(c, 63, head=4)
    assert dataclasses.astuple(packing) == (256, 64, 4, 16, 4, True, None, False, (), None)
    assert assemble.packing_config(config(), 64, head=0).row_targets == 256
    assert not assemble.packing_config(config(learner__prefix_sharing=False), 64, head=0).share_prefixes
    shaped = config(learner__row_samples=2, learner__row_prefix=96, learner__row_tokens=416)
    assert assemble.packing_config(shaped, 64, head=0).row_shape == RowShape(96, 2)


def test_the_batch_goes_to_the_device_as_it_is():
    packed = batches.packed(batches.TRAJECTORIES)
    on_device = assemble.device_batch(packed)
    assert len(on_device) == packed.num_micro_batches > 1
    for i, micro_batch in enumerate(on_device):
        for name, array in vars(micro_batch).items():
            whole = getattr(packed, name)
            np.testing.assert_array_equal(array, whole[i] if isinstance(whole, np.ndarray) else whole)
    assert assemble.device_batch(batches.packed(batches.TRAJECTORIES, head=False))[0].head_ids is None

"""Transfers from end to end on tiny models: signals made by commands, scores counted, a killed run resumed."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from absl import flags
from safetensors.numpy import save_file

from rlx import assemble, show, signal, train
from rlx.config.errors import ConfigError
from rlx.config.flags import config_from_argv
from rlx.data.packing import pack
from rlx.distillation import frozen
from rlx.interrupt import EXIT_PREEMPTED
from rlx.learner.score import score_sequences
from rlx.metrics.view import read_run
from rlx.models.hf import save_params
from rlx.proxy.signal import SignalError, check_models, read_signal
from rlx.proxy.vocabulary import VocabularyError
from rlx.train import TrainingStopped
from rlx.types import Group, Sample, StopReason, Task
from tests import tiny_model, tiny_run, tiny_tokenizer
from tests.interrupted import interrupting
from tests.learner import batches

PROXY = {
    "objective__distill__form": "sampled",
    "objective__loss": "reinforce",
    "objective__centering": "off",
    "learner__updates": 4,
    "checkpoint__every": 2,
    "tasks__held_out": 6,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The tiny model as target and as the proxy's base, and another that prefers one digit as its expert."""
    directory = tmp_path_factory.mktemp("popd")
    recipe = tiny_run.write(directory)
    tiny_run.digit_model(directory / "expert", likely="3")
    base, expert = (str(directory / name) for name in ("model", "expert"))
    assert (
        signal.main(["create", f"--base={base}", f"--expert={expert}", f"--to={directory / 'signals' / 'three'}"]) == 0
    )
    return recipe


def made(recipe, name="three"):
    return str(recipe.parent / "signals" / name)


def config_of(recipe, *signals, **changes):
    given = {"frozen__signals": tuple(signals or (made(recipe),)), **PROXY, **changes}
    return tiny_run.config(recipe, **given)


def opened(config):
    """The frozen policies of a run, and its packing."""
    model = assemble.load_model(config)
    step = assemble.step_config(config, model.arch, 16)
    packing = assemble.packing_config(config, 16, assemble.head_size(config))
    return frozen.open_frozen(config, model, step, packing), model, packing


def wide_trajectories():
    return [t for t in batches.TRAJECTORIES if t.mask.any()]


# --------------------------------------------------------------------------------------------------------------- scores


def test_a_base_that_is_the_reference_is_scored_once(recipe):
    """Two forwards a token for one signal and its reference, which has the weights of the signal's base."""
    found, _, _ = opened(config_of(recipe))
    chosen = wide_trajectories()
    targets = sum(int(t.mask.sum()) for t in chosen)
    scored = found.scored(chosen)
    assert found.forwards_per_token == 2
    assert found.scalars(targets) == {"distill/forwards_per_token": 2.0}
    found.policies.score(found.reference, chosen)
    with pytest.raises(AssertionError, match="at most 0"):
        found.scalars(0)
    assert found.policies.models.keys() == {read_signal(made(recipe)).base.hash, read_signal(made(recipe)).expert.hash}
    assert all(set(t.frozen) == {"reference_logprobs", "signal"} for t in scored)


def test_signals_of_one_base_share_its_score(recipe):
    tiny_run.digit_model(recipe.parent / "seven", likely="7")
    words = [f"--base={recipe.parent / 'model'}", f"--expert={recipe.parent / 'seven'}", "--alpha=0.5"]
    assert signal.main(["create", *words, f"--to={made(recipe, 'seven')}"]) == 0
    config = config_of(recipe, made(recipe), made(recipe, "seven"), objective__distill__weights=(0.5, 2.0))
    found, model, _ = opened(config)
    chosen = wide_trajectories()
    scored = found.scored(chosen)
    assert found.forwards_per_token == 3, "one base, which is the reference, and two experts"
    assert found.scalars(sum(int(t.mask.sum()) for t in chosen)) == {"distill/forwards_per_token": 3.0}

    def alone(name):
        params = {"three": "expert", "seven": "seven", "base": "model"}[name]
        loaded = assemble.load_model(tiny_run.config(recipe, model__path=recipe.parent / params))
        step = assemble.step_config(tiny_run.config(recipe, lora__rank=0), model.arch, 16)
        return score_sequences(step, loaded.params, loaded.params, [t.tokens for t in chosen], 64)

    three, seven, base = alone("three"), alone("seven"), alone("base")
    for i, t in enumerate(chosen):
        expected = 0.5 * (three[i] - base[i]) + 2.0 * 0.5 * (seven[i] - base[i])
        np.testing.assert_allclose(scored[i].frozen["signal"], expected[t.mask], atol=2e-4)
        np.testing.assert_allclose(scored[i].frozen["reference_logprobs"], base[i][t.mask], atol=1e-4)


def test_a_cache_scores_the_same_samples_once(recipe, tmp_path):
    config = config_of(recipe, frozen__cache=str(tmp_path / "scores.db"))
    chosen = wide_trajectories()
    first, _, _ = opened(config)
    scored = first.scored(chosen)
    again, _, _ = opened(config_of(recipe, frozen__cache=str(tmp_path / "scores.db"), objective__distill__lam=0.5))
    cached = again.scored(chosen)
    assert again.scalars(9) == {"distill/forwards_per_token": 0.0}, "another lambda asks for the same scores"
    for a, b in zip(scored, cached, strict=True):
        assert {name: x.tobytes() for name, x in a.frozen.items()} == {n: x.tobytes() for n, x in b.frozen.items()}
    changed = [*chosen[1:], batches.trajectory(77, (9, 4))]
    again.scored(changed)
    assert again.scalars(4) == {"distill/forwards_per_token": 2.0}, "two policies score what is new"


@pytest.mark.parametrize("changes", [{"head_precision": "highest"}, {"logprob_implementation": "chunked"}])
def test_a_cache_tells_arithmetics_apart(recipe, changes):
    found, _, _ = opened(config_of(recipe))
    policy, (trajectory, *_) = found.reference, wide_trajectories()
    other = dataclasses.replace(policy, step=dataclasses.replace(policy.step, **changes))
    assert found.policies._key(policy, trajectory) != found.policies._key(other, trajectory)


@pytest.mark.parametrize("form, width", [("top_k", 4), ("full", tiny_model.ARCH.vocab_size)])
def test_other_forms_have_the_scores_of_their_candidates(recipe, form, width):
    found, _, packing = opened(config_of(recipe, objective__distill__form=form, rollout__head_size=4))
    scored = found.scored(wide_trajectories())
    for t in scored:
        assert t.frozen["head_signal"].shape == t.frozen["head_reference_logprobs"].shape == (t.mask.sum(), width)
        if form == "full":
            own = np.take_along_axis(t.frozen["head_signal"], t.tokens[t.mask][:, None], 1)[:, 0]
            np.testing.assert_allclose(own, t.frozen["signal"], atol=1e-5)
    layout = {"frozen": found.arrays(), "row_tokens": 64, "row_targets": 64, "capacity": 8}
    packed = pack(scored, type(packing)(**{**vars(packing), **layout}))
    assert packed.frozen["head_signal"].shape[-1] == width


@pytest.mark.slow
def test_a_mesh_scores_what_one_device_does(recipe):
    """Frozen policies lie over devices as the policy does."""
    changes = {"objective__distill__form": "top_k", "rollout__head_size": 4}
    single, _, _ = opened(config_of(recipe, **changes))
    config = config_of(recipe, **changes, cluster__trainer_layout="TP2 DP2")
    model = assemble.load_model(config, on_mesh=True)
    spread = frozen.open_frozen(config, model, *assemble.shapes(config, model.arch, model.placement))
    chosen = wide_trajectories()
    for found, expected in zip(spread.scored(chosen), single.scored(chosen), strict=True):
        for name, array in expected.frozen.items():
            np.testing.assert_allclose(found.frozen[name], array, atol=1e-4, err_msg=name)


def test_only_rewarded_samples_are_scored_where_only_these_are_trained(recipe):
    changes = {"objective__distill__filter": "rewarded", "objective__advantage": "none"}
    found, _, _ = opened(config_of(recipe, **changes))
    chosen = wide_trajectories()
    targets = [int(t.mask.sum()) for t in chosen if t.advantage > 0]
    found.scored(chosen)
    assert found.policies.forwards == 2 * sum(targets)
    assert 0 < sum(targets) < sum(int(t.mask.sum()) for t in chosen)


def test_the_overlap_is_with_the_samplers_head(recipe):
    found, _, _ = opened(config_of(recipe, objective__distill__calibration="overlap", rollout__head_size=4))
    overlaps = np.concatenate([t.frozen["overlap"] for t in found.scored(wide_trajectories())])
    assert overlaps.size
    assert set((overlaps * 4).round(5).tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}


# ----------------------------------------------------------------------------------------------------------- vocabulary


def other_vocabulary(recipe, name, change, extra=0):
    """A copy of the proxy's base and expert with another tokenizer and a padded width; the signal of them."""
    arch = tiny_model.sized(vocab_size=tiny_model.ARCH.vocab_size + extra)
    for seed, role in enumerate(("base", "expert")):
        directory = recipe.parent / f"{name}_{role}"
        save_params(directory, arch, tiny_model.params(seed, arch), "float32")
        tiny_tokenizer.build(directory)
        file = directory / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        change(tokenizer)
        file.write_text(json.dumps(tokenizer))
    words = [f"--base={recipe.parent / f'{name}_base'}", f"--expert={recipe.parent / f'{name}_expert'}"]
    assert signal.main(["create", *words, f"--to={made(recipe, name)}"]) == 0
    return made(recipe, name)


def swap(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["7"] = vocabulary["7"], vocabulary["3"]


def add(tokenizer):
    number = tiny_tokenizer.VOCAB_SIZE
    added = {"content": "<|tool|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append({"id": number, **added, "special": True})


def test_a_conflicting_id_is_refused_and_named(recipe):
    path = other_vocabulary(recipe, "swapped", swap)
    with pytest.raises(VocabularyError, match=r"token id \d+ is '[37]' in .*swapped.* and '[37]' in the target"):
        opened(config_of(recipe, path))


def test_a_pair_with_added_tokens_and_a_padded_width_trains(recipe):
    path = other_vocabulary(recipe, "added", add, extra=12)
    found, _, _ = opened(config_of(recipe, path))
    names = {array.name for array in found.arrays()}
    assert names == {"reference_logprobs", "signal", "known"}
    chosen = wide_trajectories()
    parts = found._signals(lambda policy: found.policies.score(policy, chosen), chosen)
    assert parts.keys() - names == {"teacher_logprobs"}, "no array over the vocabulary is made to be thrown away"
    config = config_of(recipe, path, learner__updates=1, run__name="added")
    train.train(config)
    (record,) = [r for r in tiny_run.records(config.run.path / "metrics.jsonl") if "policy/loss" in r]
    assert record["distill/masked_vocabulary_fraction"] == 0, "no rollout holds what the proxy alone knows"
    assert record["optimizer/update_norm"] > 0


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.slow
def test_a_killed_transfer_resumes_to_the_same_bits(recipe):
    def run(name):
        return train.main(
            ["rlx train", *tiny_run.arguments(recipe, **PROXY, frozen__signals=(made(recipe),), run__name=name)]
        )

    assert run("left_alone") == 0
    with interrupting("SIGTERM", "update", 3):
        assert run("killed") == EXIT_PREEMPTED
    assert run("killed") == 0
    one, other = (recipe.parent / "runs" / name for name in ("left_alone", "killed"))
    for name in ("adapter/adapter_model.safetensors", "ledger.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert tiny_run.samples(one) == tiny_run.samples(other)


@pytest.mark.slow
def test_a_transfer_moves_the_target_and_its_run_is_a_signal_of_its_own(recipe, capsys):
    """A chain: what was trained by a signal is the expert of the next one."""
    config = config_of(recipe, run__name="hop", learner__updates=3, objective__distill__form="full", lora__rank=0)
    train.train(config)
    records = [r for r in tiny_run.records(config.run.path / "metrics.jsonl") if "policy/loss" in r]
    assert records[0]["policy/reference_kl"] == pytest.approx(0, abs=1e-5)
    assert records[-1]["policy/reference_kl"] > 1e-3
    assert all(r["distill/forwards_per_token"] <= 2 for r in records)

    assert signal.main(["create", f"--run={config.run.path}", f"--to={made(recipe, 'hop')}"]) == 0
    found = read_signal(made(recipe, "hop"))
    assert found.base.path == config.model.path
    assert found.provenance["objective"] == "proxy distillation, lambda 1.5"
    assert found.provenance["updates"] == 3
    capsys.readouterr()
    words = [made(recipe, "hop"), f"--config={recipe}", "--tasks=4"]
    assert signal.main(["verify", *words]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["valid"]
    assert measured["abs_mean"] > 0
    assert 0 <= measured["carrying_share"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("placement, estimator", [("loss", "k3"), ("reward", "k1")])
def test_rl_with_a_kl_to_the_reference(recipe, placement, estimator):
    changes = {"kl_coefficient": 0.5, "kl_placement": placement, "kl_estimator": estimator}
    given = {f"objective__{name}": value for name, value in changes.items()}
    config = tiny_run.config(recipe, **given, learner__updates=2, tasks__held_out=6, run__name=f"kl_{placement}")
    train.train(config)
    first, second = (r for r in tiny_run.records(config.run.path / "metrics.jsonl") if "policy/loss" in r)
    assert first["policy/reference_kl"] == pytest.approx(0, abs=1e-5)
    assert abs(second["policy/reference_kl"]) > 1e-4


def test_the_kl_in_the_reward_is_subtracted_sample_by_sample(recipe):
    given = {"objective__kl_coefficient": 0.5, "objective__kl_placement": "reward", "objective__kl_estimator": "k1"}
    config = tiny_run.config(recipe, **given, lora__rank=0)
    found, model, _ = opened(config)
    step = assemble.step_config(config, model.arch, 16)
    moved = tiny_model.params(5)
    groups = tiny_groups()
    rewards = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
    got = found.penalised(groups, rewards, moved, step)
    samples = [s for g in groups for s in g.samples]
    own, reference = (score_sequences(step, p, p, [s.tokens for s in samples], 64) for p in (moved, model.params))
    expected = [
        reward - 0.5 * float((o - r)[s.mask].sum()) for reward, s, o, r in zip(rewards, samples, own, reference)
    ]
    np.testing.assert_allclose(got[: len(samples)], expected, atol=1e-3)


def tiny_groups():
    task = Task("digits/0", "digits", "?", "3", "exact")
    samples = []
    for index, t in enumerate(wide_trajectories()[:3]):
        grade = {"outcome": "graded", "seconds": 0.0}
        own = (t.tokens, t.mask, t.logprobs, None, (), StopReason.STOP, "", 1.0 * (index == 0), grade)
        samples.append(Sample(task, 0, index, *own))
    return [Group(task, tuple(samples))]


def test_a_collapse_stops_the_run_with_its_reason(recipe):
    config = config_of(recipe, run__name="collapsed", collapse__entropy_low=50.0, collapse__patience=1)
    with pytest.raises(TrainingStopped, match=r"the run has collapsed, 1 updates .*collapse.entropy_low"):
        train.train(config)
    assert (config.run.path / "checkpoints" / "1").is_dir(), "what was learned is saved"
    records = (config.run.path / "metrics.jsonl").read_bytes()
    with pytest.raises(TrainingStopped, match="the run has collapsed"):
        train.train(config)
    assert (config.run.path / "metrics.jsonl").read_bytes() == records, "started again it learns nothing more"
    assert not (config.run.path / "summary.json").exists()
    assert read_run(config.run.path).stopped["kind"] == show.GUARD
    assert "collapse.entropy_low" in read_run(config.run.path).stopped["reason"]


def test_a_collapse_that_the_last_evaluation_shows_is_no_success(recipe, monkeypatch):
    measure = train.measure

    def falling(run, label):
        measure(run, label)
        run.progress.evals[label] = run.progress.evals[label] | {"pass_rate": float(label != "after")}

    monkeypatch.setattr(train, "measure", falling)
    config = config_of(recipe, run__name="late", learner__updates=1, collapse__reward_drop=0.5, eval__every=10)
    for _ in range(2):
        with pytest.raises(TrainingStopped, match=r"at after the held-out pass rate is 0\.000"):
            train.train(config)
    assert not (config.run.path / "summary.json").exists()


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_lambda_of_zero_is_refused(recipe):
    words = tiny_run.arguments(recipe, **PROXY, frozen__signals=(made(recipe),), objective__distill__lam=0.0)
    with pytest.raises(Exception, match=r"config.objective.distill.lam = 0.0: .* collapses to one token"):
        config_from_argv(["rlx", *words], flags.FlagValues())


def test_a_signal_whose_model_changed_is_refused_at_start(recipe, tmp_path):
    shutil.copytree(recipe.parent / "expert", tmp_path / "expert")
    words = [f"--base={recipe.parent / 'model'}", f"--expert={tmp_path / 'expert'}", f"--to={tmp_path / 'signal'}"]
    assert signal.main(["create", *words]) == 0
    weights = tmp_path / "expert" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(SignalError, match="has changed since"):
        check_models(read_signal(tmp_path / "signal"))
    with pytest.raises(SignalError, match="has changed since"):
        opened(config_of(recipe, str(tmp_path / "signal")))


def test_an_expert_that_learned_nothing_is_refused_by_create(recipe, tmp_path):
    """Factors as LoRA begins: each product is 0."""
    model, adapter = recipe.parent / "model", tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": str(model)}))
    factors = {"q.lora_A.weight": np.ones((2, 4), np.float32), "q.lora_B.weight": np.zeros((4, 2), np.float32)}
    save_file(factors, adapter / "adapter_model.safetensors")
    with pytest.raises(SignalError, match="nothing was learned"):
        signal.main(["create", f"--expert={adapter}", f"--to={tmp_path / 'signal'}"])
    assert not (tmp_path / "signal").exists()


def test_a_search_of_lambda_names_its_flags(recipe):
    words = tiny_run.arguments(recipe, **PROXY, frozen__signals=(made(recipe),))
    with pytest.raises(ConfigError) as refused:
        signal.main(["calibrate", *words, "--lambdas=a,-1", "--updates=0"])
    assert [problem.partition(":")[0] for problem in refused.value.problems] == [*["--lambdas=a,-1"] * 2, "--updates=0"]


def test_commands_list_and_show(recipe, capsys):
    assert signal.main(["list", str(recipe.parent / "signals")]) == 0
    assert "three" in capsys.readouterr().out
    assert signal.main(["show", made(recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alpha"] == 1.0
    assert signal.main(["show", made(recipe)]) == 0
    assert "expert" in capsys.readouterr().out
    with pytest.raises(SignalError, match="there is no signal"):
        signal.main(["verify", str(recipe.parent / "nothing")])

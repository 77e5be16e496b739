"""`rlx plan`: parameters counted from descriptions, memory against XLA's own account, costs and what would fit."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from absl import flags

from rlx import plan
from rlx.config.errors import ConfigError
from rlx.config.flags import config_from_argv
from rlx.distillation.frozen import Frozen
from rlx.models.description import DeltaNet, Group
from rlx.models.hf_config import read_config
from rlx.models.lora import adapter_specs
from rlx.models.placed import bubble
from rlx.models.spec import layer_specs, param_specs
from rlx.parallel.layout import Layout, parse_layout, unsupported_reason
from rlx.planning import engine, scoring
from rlx.planning.case import Case, case_of, dealt, flat_specs, groups, numbers_here
from rlx.planning.costs import _shown, attention_flops, costs, flops_of_token, once_more
from rlx.planning.estimate import memory
from rlx.planning.hardware import DEVICES
from rlx.planning.memory import WIDE, held, temporaries
from rlx.planning.search import _laid_out, _single, changed, changes
from rlx.proxy.signal import Part, Signal, write_signal

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"weights", "adapter", "gradients", "optimizer", "frozen", "activations", "kv_and_state", "logits", "buffers"}


def planned(capsys, *words: str) -> dict:
    assert plan.main(["rlx plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "recipe, total, trainable",
    [
        ("configs/full_size.py:qwen3_8b", 8_190_735_360, 30_670_848),
        ("configs/qwen36_35b_proxy.py:final", 34_660_610_688, 36_433_920),
        ("configs/k31_target.py", 2_779_484_478_208, 24_518_066_176),
        ("configs/full_size.py:kimi_k2", 1_026_408_232_448, 122_054_656),
    ],
)
def test_counts(capsys, recipe, total, trainable):
    found = planned(capsys, f"--config={recipe}")
    assert (found["total_parameters"], found["trainable_parameters"]) == (total, trainable)
    assert found["trainable_share"] == pytest.approx(trainable / total)
    assert sum(found["adapted"].values()) == trainable


def test_published_active_parameters(capsys):
    assert planned(capsys, "--config=configs/full_size.py:kimi_k2")["active_parameters"] == 31_687_095_808
    assert planned(capsys, "--config=configs/full_size.py:qwen3_6_35b_a3b")["active_parameters"] == 2_946_429_568


def test_adapters_of_single_experts_are_twice_as_large(capsys):
    found = planned(capsys, "--config=configs/k31_target.py", "--config.lora.experts=per_expert")
    experts = {name: count for name, count in found["adapted"].items() if ".experts." in name}
    assert sum(experts.values()) == 896 * 92 * 32 * 3 * (3584 + 3072)


def test_without_an_adapter_everything_is_trained(capsys):
    found = planned(capsys, "--config=configs/full_size.py:qwen3_8b", "--config.lora.rank=0")
    assert found["trainable_parameters"] == found["total_parameters"]
    assert found["adapted"] == {}


def test_for_people_and_what_is_refused(capsys, tmp_path):
    assert plan.main(["rlx plan", "--config=configs/qwen36_35b_proxy.py:final"]) == 0
    text = capsys.readouterr().out
    assert "34.66B parameters" in text
    assert "trainable: 36.43M, 0.11%" in text
    wrong = f"--config.model.path={tmp_path}"
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        plan.main(["rlx plan", "--config=configs/qwen36_35b_proxy.py:final", wrong])
    pattern = "--config.lora.targets=('self_atn.*',)"
    with pytest.raises(ConfigError, match=r"config\.lora\.targets: 'self_atn.\*' is .* the nearest is 'self_attn.\*'"):
        plan.main(["rlx plan", "--config=configs/qwen36_35b_proxy.py:final", pattern])


# ---------------------------------------------------------------------------------------------------- memory and costs


def case(recipe: str, layout: str, *words: str, **changed) -> Case:
    argv = ["plan", f"--config=configs/{recipe}", f"--config.cluster.trainer_layout={layout}", *words]
    config = config_from_argv(argv, flags.FlagValues(), simulated=True)
    return dataclasses.replace(case_of(config, read_config(config.model.path)), **changed)


@pytest.mark.parametrize("recipe", ["k31_target.py", "qwen36_35b_proxy.py", "quickstart.py", "tiny_moe.py"])
def test_every_recipe_has_a_plan(capsys, recipe):
    # The quickstart's own model is made by `make model`, not part of a checkout.
    model = [f"--config.model.path={ROOT}/tests/fixtures/qwen3"] if recipe == "quickstart.py" else []
    found = planned(capsys, f"--config=configs/{recipe}", *model)
    assert set(found["bytes_per_device"]) == KINDS
    assert sum(found["bytes_per_device"].values()) == found["bytes_in_all"]
    assert found["fits"] == (found["bytes_in_all"] <= found["usable_bytes"])
    assert found["update_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert 0 <= found["bubble"] < 1
    assert 0 < found["mfu"] < 1


def test_weights_of_the_target_by_hand(capsys):
    """Experts over 24 devices, everything else as docs/plan.md works it out."""
    found = planned(capsys, "--config=configs/k31_target.py")
    experts = 3 * 896 * 3584 * 3072
    piped, outside = 88 * experts // 24, 4 * experts // 8  # layers in the pipeline, and those that every stage computes
    assert found["bytes_per_device"]["weights"] > 2 * (piped + outside)
    assert found["bytes_per_device"]["weights"] < 1.2 * 2 * (piped + outside)
    assert found["bubble"] == pytest.approx(2 / 8)
    assert found["links"] == {"pp": "network", "cp": "nvlink", "tp": "nvlink", "ep": "nvlink"}


def test_zero_cuts_weights_gradients_and_moments_over_dp():
    one, eight = (held(case("tiny_dense.py", layout, "--config.lora.rank=0", rows=8)) for layout in ("DP1", "DP8"))
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(eight, kind) / getattr(one, kind) == pytest.approx(1 / 8, rel=0.02)


def test_flops_of_a_dense_token_are_twice_its_parameters():
    small = case("tiny_dense.py", "TP1", tokens=64)
    kernels = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    assert flops_of_token(small).products == 2 * kernels
    assert flops_of_token(small).attention == 4 * 4 * 8 * 8 * 64


def test_more_micro_batches_make_the_bubble_smaller_and_an_update_shorter():
    few, many = (case("tiny_dense.py", "PP4", rows=rows) for rows in (4, 16))
    spent = [costs(each, DEVICES["H100"], held(each)) for each in (few, many)]
    assert [each.bubble for each in spent] == [3 / 7, 3 / 19]
    assert spent[1].seconds["bubble"] < spent[0].seconds["bubble"]


def test_a_circular_pipeline_waits_less_and_moves_weights():
    one, two = (case("tiny_dense.py", "PP2", f"--config.cluster.pipeline_rounds={v}", rows=4) for v in (1, 2))
    spent = [costs(each, DEVICES["H100"], held(each)) for each in (one, two)]
    assert [each.bubble for each in spent] == [1 / 5, 1 / 9]
    assert spent[1].seconds["bubble"] / spent[0].seconds["bubble"] == pytest.approx(1 / 2)
    # Of a micro-batch: a stream each way for each of 5 or 9 ticks and a sum, half of a stage's two layers' weights.
    stream = 4 * case("tiny_dense.py", "PP2").tokens * 64 * one.itemsize
    [group] = groups(two)
    moved = dealt(two, group)
    batches = spent[0].micro_batches
    assert spent[0].sent["pp"] == pytest.approx(batches * (2 * 5 / 4 + 1) * stream)
    assert spent[1].sent["pp"] == pytest.approx(batches * ((2 * 9 / 4 + 1) * stream + moved.sent))
    assert temporaries(two).dealt == moved.copied
    weights = 2 * numbers_here(layer_specs(two.arch, group[0].layer), two.arch, Layout()) * two.itemsize
    adapter = 2 * numbers_here(adapter_specs(two.arch, two.config.lora)[group[0].name], two.arch, two.layout) * WIDE
    assert moved.copied == weights + adapter, "an adapter's gradients too"
    assert moved.sent == moved.copied / 2


def test_changes_keep_to_what_a_circular_pipeline_can_be():
    words = "--config.cluster.pipeline_rounds=2", "--config.learner.micro_batch_rows=8"
    large = case("full_size.py:qwen3_8b", "TP2 PP4", *words, remat="none")
    found = changes(large, DEVICES["H100"])
    assert found
    for change in found:
        other = changed(large, change.keys)
        assert unsupported_reason(other.layout, other.sizes) is None


def test_only_groups_that_go_round_wait_less():
    """Beside one of 7 repeats one of 3, which are too few for two blocks a stage."""
    layer = case("tiny_dense.py", "PP2").arch.layers[0]
    arch = SimpleNamespace(groups=(Group((layer,), 7), Group((layer, layer), 3)))
    once, twice = (bubble(arch, Layout(pp=2), 4, rounds) for rounds in (1, 2))  # type: ignore[arg-type]
    assert once == 1 / 5
    assert twice == (2 + 2 * 2) / (2 * 9 + 2 * 2 * 5)


def test_what_else_spares_memory_is_offered():
    words = "--config.cluster.sequence_parallel=False", "--config.cluster.pipeline_rounds=2"
    offered = [
        keys for each in _single(case("tiny_dense.py", "TP2 PP2 CP2", *words, rows=12, tokens=512)) for keys in each
    ]
    assert {"cluster.sequence_parallel": True} in offered
    assert {"cluster.context_parallel": "ring"} in offered
    assert {"model.attention_block": 128} in offered
    assert [keys["learner.micro_batch_rows"] for keys in offered if "learner.micro_batch_rows" in keys] == [6, 2]
    ring = case("tiny_dense.py", "CP2", "--config.cluster.context_parallel=ring")
    keys = _laid_out(ring, Layout(dp=2))
    assert keys["cluster.context_parallel"] == "gather"
    assert unsupported_reason(Layout(), ring.sizes) is not None
    assert unsupported_reason(Layout(dp=2), changed(ring, keys).sizes) is None


def test_rows_of_one_shape_have_fewer_scores_and_shorter_ones_have_none():
    words = [f"--config.learner.{key}" for key in ("row_tokens=8192", "row_samples=7", "row_prefix=1024")]
    words += ["--config.engine.context=2048", "--config.engine.prefill_buckets=(2048,)", "--config.lora.rank=0"]
    words += ["--config.rollout.max_new_tokens=1024", "--config.model.attention_block=0"]
    shaped = case("full_size.py:qwen3_8b", "TP8", *words)
    whole = changed(shaped, {"learner.row_samples": 0, "learner.row_prefix": 0, "model.attention_block": 8192})
    assert (shaped.seen, whole.seen) == (2048, 8192)
    assert temporaries(shaped).scores == temporaries(whole).scores / 4
    spent = [costs(each, DEVICES["H100"], held(each)).useful_flops for each in (shaped, whole)]
    assert spent[0] < spent[1]
    rollout = shaped.config.rollout
    rows = rollout.tasks_per_update * math.ceil(rollout.group_size / 7)
    assert costs(shaped, DEVICES["H100"], held(shaped)).micro_batches == math.ceil(rows / shaped.rows)
    shorter = [keys for each in _single(shaped) for keys in each if "learner.row_tokens" in keys]
    assert shorter
    assert all(keys["learner.row_samples"] == keys["learner.row_prefix"] == 0 for keys in shorter)
    large = case("full_size.py:qwen3_8b", "TP1", *words)
    assert memory(large).total > DEVICES["H100"].usable
    assert changes(large, DEVICES["H100"])


def test_changes_that_are_named_fit_and_a_plan_that_fits_has_none():
    device = DEVICES["H100"]
    large = case("full_size.py:qwen3_8b", "TP8", rows=8, remat="none")
    assert memory(large).total > device.usable
    found = changes(large, device)
    assert found
    assert all(change.bytes <= device.usable for change in found)
    assert changes(case("tiny_dense.py", "TP1"), device) == []


def test_changes_that_are_named_are_accepted_when_they_are_made(capsys):
    """An engine whose cache is most of it; then rows that are too long, with all that is tied to them."""
    words = [
        "--config=configs/full_size.py:qwen3_8b",
        "--config.plan.device=H100",
        "--config.learner.micro_batch_rows=2",
    ]
    words += ["--config.cluster.trainer_layout=TP4 DP2", "--config.engine.lanes=2"]
    large = planned(capsys, *words)
    assert [next(iter(change["keys"])) for change in large["changes"]] == [
        "engine.slots",
        "engine.context",
        "engine.kind",
    ]
    long = ["--config.engine.slots=2", "--config.engine.prefill_rows=1", "--config.learner.row_tokens=1048576"]
    long += ["--config.producer.train_token_limit=1048576", "--config.plan.sequence_tokens=600000"]
    longer = planned(capsys, *words, *long)
    assert longer["changes"][0]["keys"].keys() >= {"learner.row_tokens", "producer.train_token_limit"}
    for options, change in [*((words, c) for c in large["changes"]), *((words + long, c) for c in longer["changes"])]:
        made = planned(capsys, *options, *(f"--config.{key}={value}" for key, value in change["keys"].items()))
        assert (made["fits"], made["bytes_in_all"]) == (True, change["bytes"])


def test_an_engine_layout_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match=r"config\.cluster\.engine_layout = 'XX3'"):
        plan.main(["rlx plan", "--config=configs/tiny_dense.py", "--config.cluster.engine_layout=XX3"])


@pytest.mark.parametrize("recipe", ["popd_qwen3_17b_to_8b.py", "popd_qwen3_4b_to_8b.py"])
def test_recipes_with_frozen_policies_fit_with_them(capsys, recipe):
    words = f"--config=configs/{recipe}", "--config.model.path=configs/architectures/qwen3_8b"
    found = planned(capsys, *words)
    assert found["fits"]
    without = planned(capsys, *words, "--config.objective.distill.form=off", "--config.frozen.signals=()")
    assert without["bytes_per_device"]["frozen"] == 0
    # Reference, expert and base, which are not there yet, in bfloat16 on eight devices: norms are not cut.
    assert found["bytes_per_device"]["frozen"] == pytest.approx(3 * 2 * 8_190_735_360 / 8, rel=0.01)
    assert found["bytes_per_device"]["buffers"] - without["bytes_per_device"]["buffers"] == 2 * 4 * 8192
    forward = 0.25 * (without["flops"] - 2 * 151_936 * 4096 * 16_777_216)  # of four passes, and of a head's four
    assert found["seconds"]["frozen policies"] > 0
    assert found["flops"] - without["flops"] == pytest.approx(3 * forward, rel=0.1)
    assert found["mfu"] < without["mfu"]


def test_equal_weights_are_held_and_asked_once(tmp_path):
    base, expert = ("configs/architectures/qwen3_4b", "configs/architectures/qwen3_1_7b")
    parts = [Part(path, "", path, path, 0, 0) for path in (base, expert)]
    write_signal(tmp_path / "own", Signal("own", *parts, "", 0, 1.0, {}, {}, ""))
    words = [f"--config.model.path={base}", f"--config.frozen.signals=('{tmp_path / 'own'}',)"]
    scored = case("popd_qwen3_17b_to_8b.py", "DP8", *words, rows=8)
    assert [(policy.path, policy.known) for policy in scoring.policies(scored)] == [(base, True), (expert, True)]
    adapted = dataclasses.replace(
        scored, config=dataclasses.replace(scored.config, lora=dataclasses.replace(scored.config.lora, rank=8))
    )
    own, other = (
        numbers_here(param_specs(read_config(path)), read_config(path), scored.layout) for path in (base, expert)
    )
    assert scoring.weight_bytes(scored) == 2 * (own + other)
    assert scoring.weight_bytes(adapted) == 2 * other  # the base is what the adapter is trained on


@pytest.mark.parametrize("form, filtered", [("sampled", "agreeing"), ("top_k", "all"), ("full", "all")])
def test_arrays_of_frozen_policies_are_those_of_a_run(form, filtered):
    words = [f"--config.objective.distill.form={form}", f"--config.objective.distill.filter={filtered}"]
    words += ["--config.model.path=configs/architectures/tiny_dense", "--config.rollout.head_size=5"]
    planned = case("popd_qwen3_17b_to_8b.py", "DP1", *words)
    model = SimpleNamespace(model=SimpleNamespace(arch=planned.arch), known=None)
    real = Frozen(planned.config, model, object(), ()).arrays()
    sizes = (planned.rows, planned.targets)
    expected = {a.name: (a.dtype, (*sizes, a.candidates) if a.candidates else sizes) for a in real}
    assert scoring.arrays(planned) == expected


def test_linear_attention_over_cp_exchanges_states_and_computes_twice():
    """A row's length does not matter to what is exchanged; what it takes for a token does not grow with cp."""
    short, long = (case("tiny_hybrid.py", "CP2", tokens=tokens) for tokens in (256, 1024))
    deltas = [next(layer.mixer for layer in short.arch.layers if isinstance(layer.mixer, DeltaNet))]
    assert _shown(short, deltas[0]) == _shown(long, deltas[0]) > 0
    two, four = (temporaries(case("tiny_hybrid.py", layout, tokens=1024)).recurrent for layout in ("CP2", "CP4"))
    assert two == 2 * four


def test_a_mesh_computes_experts_and_delta_rules_once_more():
    """Experts only where a layer is not recomputed: then their results are of no use a second time."""
    moe, hybrid = (
        dataclasses.replace(case(f"tiny_{kind}.py", "DP2", tokens=256), remat="none") for kind in ("moe", "hybrid")
    )
    experts, rule = moe.arch.layers[-1], next(x for x in hybrid.arch.layers if isinstance(x.mixer, DeltaNet))
    weights = [
        math.prod(s.shape) for path, s in flat_specs(moe.arch, experts).items() if path[:2] == ("mlp", "experts")
    ]
    assert once_more(moe, experts) == 2 * sum(weights) * experts.mlp.top_k / experts.mlp.count
    assert once_more(dataclasses.replace(moe, remat="layer"), experts) == 0
    assert once_more(hybrid, rule) >= attention_flops(rule.mixer, 256)
    assert once_more(case("tiny_hybrid.py", "DP1", tokens=256), rule) == 0


def test_scores_of_long_rows_are_those_of_a_block():
    """And a ring's keys and values are those of a device's own tokens."""
    short, long, longer = (temporaries(case("tiny_dense.py", "CP2", tokens=n)) for n in (1024, 8192, 16384))
    assert short.scores == temporaries(case("tiny_dense.py", "CP2", tokens=512)).scores * 4
    assert long.scores == longer.scores == 2 * short.scores
    assert longer.heads == 2 * long.heads
    assert short.heads == 0
    ring = temporaries(case("tiny_dense.py", "CP2", "--config.cluster.context_parallel=ring", tokens=8192))
    asked = temporaries(case("tiny_dense.py", "CP2", "--config.model.attention_block=256", tokens=8192))
    assert ring.heads < long.heads
    assert asked.scores == long.scores / 16


def test_caches_of_engines_by_hand():
    found = engine.cache(read_config("configs/architectures/qwen3_6_35b_a3b"), "bfloat16")
    assert found.token == 10 * 2 * 2 * 256 * 2
    assert found.sequence == 30 * (32 * 128 * 128 + 3 * 8192) * 4


def test_a_layout_that_cannot_be_is_refused_with_those_that_can(capsys):
    with pytest.raises(
        ConfigError, match=r"trainer_layout = 'TP3'.*TP3 does not divide attention heads, 8; layouts of"
    ):
        plan.main(["rlx plan", "--config=configs/tiny_dense.py", "--config.cluster.trainer_layout=TP3"])


@pytest.mark.slow
def test_arguments_and_temporaries_are_those_of_the_compiled_update():
    """The same layouts are among those that bench/plan_memory.py prints."""
    assert len(beside_the_compiled("--layouts=TP4;CP2;DP8;PP2")) == 4


@pytest.mark.exhaustive
def test_every_axis_scales_as_planned():
    """1, 2, 4 and 8 devices on each axis; none of the layouts is one that the plan was fitted to."""
    rows = {(row["kind"], row["layout"]): row for row in beside_the_compiled()}
    assert len(rows) == 17
    axes = [("dense", "{}{}".format, axis) for axis in ("TP", "PP", "CP", "DP")] + [("moe", "DP{1} EP{1}".format, "")]
    for kind, named, axis in axes:
        each = [rows[kind, str(parse_layout(named(axis, n)) if n > 1 else Layout())] for n in (1, 2, 4, 8)]
        for few, more in itertools.pairwise(each):
            step = more["temporaries"] / few["temporaries"]
            assert step == pytest.approx(more["planned_temporaries"] / few["planned_temporaries"], rel=0.15), more
            # With PP2 rows are computed one by one; what a layer makes of a row is the same with more stages.
            assert axis == "PP" or step < 0.6, more


@pytest.mark.exhaustive
def test_tokens_over_tp_spare_memory_as_planned():
    layouts = "--layouts=TP2;TP4;TP8"
    for cut, whole in zip(beside_the_compiled(layouts), beside_the_compiled(layouts, "--whole-streams"), strict=True):
        assert cut["layout"] == whole["layout"]
        assert cut["temporaries"] < 0.98 * whole["temporaries"]
        assert cut["planned_temporaries"] < 0.98 * whole["planned_temporaries"]


def beside_the_compiled(*words: str) -> list[dict]:
    """What bench/plan_memory.py says, on virtual devices of a process of its own; refused where a plan is far off."""
    command = [sys.executable, "bench/plan_memory.py", "--json", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "Involuntary full rematerialization" not in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        assert abs(row["planned_arguments"] / row["arguments"] - 1) <= 0.02, row
        assert abs(row["planned_outputs"] / row["outputs"] - 1) <= 0.02, row
        assert abs(row["planned_temporaries"] / row["temporaries"] - 1) <= 0.3, row
    return rows

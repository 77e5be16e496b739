"""Layouts compute what one device computes, in float64, for every kind of model, with and without LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import traverse_util

from rlx import cli
from rlx.config.errors import ConfigError
from rlx.config.flags import config_from_argv
from rlx.config.schema import Config
from rlx.layouts import Comparison, TensorError, compare, largest, make_case, moved
from rlx.models.hf_config import read_config
from rlx.models.lora import adapter_scale, adapter_specs
from rlx.models.spec import param_specs
from rlx.parallel.layout import Layout, LayoutError, parse_layout
from rlx.verify_layout import GRADIENT_TOLERANCE, LOSS_TOLERANCE, UPDATE_TOLERANCE, judged

EIGHT = ("TP1 PP1 CP2 DP4", "TP2 PP2 CP2", "PP4 DP2", "DP8 EP8", "TP2 DP2 CP2 EP4")
LAYOUTS = ("TP4 PP3 CP2 DP1 EP8", *EIGHT, "TP8", "CP4 TP2", "PP2 DP2 TP2 EP2")
# Dense in all of them, the others in two each: their programs take ten times as long to compile.
OFTEN = [
    *(("dense", layout, 4 * (number % 2)) for number, layout in enumerate(LAYOUTS)),
    ("moe", "DP8 EP8", 4),
    ("moe", "PP2 DP2 TP2 EP2", 0),
    ("hybrid", "TP1 PP1 CP2 DP4", 0),
    ("hybrid", "PP4 DP2", 4),
    ("mla", "TP2 DP2 CP2 EP4", 4),
    ("mla", "TP2 PP2 CP2", 0),
    ("k3", "TP2 PP2 CP2", 0),
    ("k3", "TP2 DP2 CP2 EP4", 4),
]
KINDS = ("dense", "moe", "hybrid", "mla", "k3")
ALL = [
    (kind, layout, rank) for kind in KINDS for layout in LAYOUTS for rank in (0, 4) if (kind, layout, rank) not in OFTEN
]


# Attention in other ways than by default: (kind, layout, rank, its keys).
RING, BLOCKS = "cluster.context_parallel=ring", "model.attention_block=8"
ATTENTION = [
    ("dense", "TP2 PP2 CP2", 4, (RING,)),
    ("dense", "CP4", 0, (RING, BLOCKS)),
    ("mla", "TP2 DP2 CP2 EP4", 4, (BLOCKS,)),
]
SHAPED = tuple(f"learner.{key}" for key in ("row_samples=2", "row_prefix=80", "row_tokens=240"))
SHAPED_OFTEN = [("dense", "PP2 DP2 TP2", 4, SHAPED), ("mla", "TP2 DP4 EP4", 0, SHAPED)]
ATTENTION_ALL = [
    (kind, layout, rank, keys)
    for kind in KINDS
    for layout, rank, keys in [
        ("TP4 PP3 CP2 DP1 EP8", 0, (RING,)),
        ("TP1 PP1 CP2 DP4", 4, (BLOCKS,)),
        ("CP4 TP2", 0, (RING, BLOCKS)),
        ("PP2 CP4", 4, (RING, BLOCKS)),
    ]
] + [
    (kind, layout, rank, SHAPED)
    for kind in ("dense", "moe", "mla")
    for layout, rank in [("PP2 DP2 TP2 EP2", 0), ("TP8", 4)]
]

WHOLE = ("cluster.sequence_parallel=False",)
REPLICATED = [("dense", "TP2 PP2 CP2", 4), ("moe", "TP2 DP2 CP2 EP4", 4)]
REPLICATED_ALL = [
    (kind, layout, rank)
    for kind in KINDS
    for layout in ("TP4 PP3 CP2 DP1 EP8", "TP2 PP2 CP2", "TP8", "PP2 DP2 TP2 EP2", "TP2 DP2 CP2 EP4")
    for rank in (0, 4)
    if (kind, layout, rank) not in REPLICATED
]

CIRCULAR = [("k3", "PP2 CP2 TP2", 4), ("k3", "PP2 DP2", 0), ("hybrid", "PP2 CP2", 0), ("moe", "PP2 DP2 EP2", 4)]


def recipe(kind: str, rank: int, *objective: str, rounds: int = 1, keys: tuple[str, ...] = ()) -> Config:
    words = ["verify-layout", f"--config=configs/tiny_{kind}.py", f"--config.lora.rank={rank}"]
    words.append(f"--config.cluster.pipeline_rounds={rounds}")
    words += [f"--config.objective.{word}" for word in objective] + [f"--config.{key}" for key in keys]
    if any(word.startswith("distill.form") for word in objective):
        words += ["--config.frozen.signals=('nowhere',)", "--config.rollout.filter_no_signal=False"]
    return config_from_argv(words, flags.FlagValues(), simulated=True)


def compared(
    kind: str, layout: str, rank: int, dtype: str = "float64", rounds: int = 1, keys: tuple[str, ...] = ()
) -> tuple[Comparison, Comparison | None]:
    config = recipe(kind, rank, rounds=rounds, keys=keys)
    if kind in ("dense", "hybrid"):  # no experts to spread
        layout = " ".join(word for word in layout.split() if not word.startswith("EP"))
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return compare(config, read_config(config.model.path), parse_layout(layout), dtype)


def assert_same(found: Comparison, _: Comparison | None) -> None:
    assert found.loss_error <= LOSS_TOLERANCE
    assert found.worst.error <= GRADIENT_TOLERANCE, found.worst
    assert max(change.error for change in found.changes) <= UPDATE_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout, rank", OFTEN)
def test_a_layout_computes_what_one_device_does(kind, layout, rank):
    assert_same(*compared(kind, layout, rank))


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout, rank, keys", SHAPED_OFTEN)
def test_rows_whose_parts_have_places_compute_what_one_device_does(kind, layout, rank, keys):
    assert_same(*compared(kind, layout, rank, keys=keys))


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout, rank, keys", ATTENTION)
def test_a_ring_and_blocks_of_scores_compute_what_one_device_does(kind, layout, rank, keys):
    assert_same(*compared(kind, layout, rank, keys=keys))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, layout, rank, keys", ATTENTION_ALL)
def test_every_kind_of_attention_computes_what_one_device_does(kind, layout, rank, keys):
    assert_same(*compared(kind, layout, rank, keys=keys))


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout, rank", REPLICATED)
def test_streams_whole_over_tp_compute_what_one_device_does(kind, layout, rank):
    assert_same(*compared(kind, layout, rank, keys=WHOLE))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, layout, rank", REPLICATED_ALL)
def test_every_layout_with_streams_whole_over_tp(kind, layout, rank):
    assert_same(*compared(kind, layout, rank, keys=WHOLE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["kl_coefficient=0.1"],
        ["loss=reinforce", "centering=off", "distill.form=sampled", "distill.signal=proxy", "distill.filter=agreeing"],
        ["loss=reinforce", "centering=off", "distill.form=top_k", "distill.signal=proxy"],
    ],
)
def test_layouts_are_compared_with_what_frozen_policies_say(words):
    config = recipe("dense", 0, *words)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        found, _ = compare(config, read_config(config.model.path), parse_layout("DP2"), "float64")
    assert found.loss_error <= LOSS_TOLERANCE
    assert found.worst.error <= GRADIENT_TOLERANCE, found.worst


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, layout, rank", ALL)
def test_every_layout_computes_what_one_device_does(kind, layout, rank):
    assert_same(*compared(kind, layout, rank))


@pytest.mark.slow
@pytest.mark.parametrize("layout, rank, keys", [("PP2 DP2", 0, ()), ("TP2 PP2 CP2", 4, (RING,))])
def test_a_circular_pipeline_computes_what_one_device_does(layout, rank, keys):
    assert_same(*compared("dense", layout, rank, rounds=2, keys=keys))


@pytest.mark.slow
def test_a_circular_pipeline_of_latent_attention_whose_repeats_the_stages_do_not_divide(tmp_path):
    """7 in 4 blocks. Without experts, which would take most of its time."""
    said = json.loads(Path("configs/architectures/tiny_mla/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 7, "first_k_dense_replace": 7}))
    keys = (f"model.path={tmp_path}", "model.scan_layers=on")
    assert [group.repeats for group in read_config(tmp_path).groups] == [7]
    assert_same(*compared("mla", "PP2", 0, rounds=2, keys=keys))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, layout, rank", CIRCULAR)
def test_every_circular_pipeline_computes_what_one_device_does(kind, layout, rank):
    assert_same(*compared(kind, layout, rank, rounds=2))


@pytest.mark.slow
def test_in_float32_a_layout_is_no_further_off_than_one_device():
    spread, own = compared("dense", "TP2 CP2 DP2", 0, "float32")
    assert spread.worst.error > 1e-12, "float32 sums in another order"
    assert judged(spread, own)["ok"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, layout, rank", [(k, text, rank) for k in KINDS for text in LAYOUTS for rank in (0, 4)])
def test_in_float32_no_layout_is_further_off_than_one_device(kind, layout, rank):
    report = judged(*compared(kind, layout, rank, "float32"))
    assert report["ok"], report


def test_one_devices_error_is_the_largest_of_several_roundings():
    rows = [(TensorError("a", 1e-6), TensorError("b", 3e-6)), (TensorError("a", 2e-6), TensorError("b", 1e-6))]
    found = [Comparison(Layout(), loss, row, row[::-1]) for loss, row in zip((2e-7, 1e-7), rows, strict=True)]
    whole = largest(found)
    assert (whole.loss_error, whole.gradients) == (2e-7, (TensorError("a", 2e-6), TensorError("b", 3e-6)))
    assert whole.changes == (TensorError("b", 3e-6), TensorError("a", 2e-6))


@pytest.mark.parametrize("rank", [0, 4])
def test_another_rounding_has_every_weight_one_unit_away(rank):
    config = recipe("dense", rank)
    case = make_case(config, read_config(config.model.path), 2, 64, "float32")
    for one, other in zip(*(jax.tree.leaves((c.trainable, c.frozen)) for c in (case, moved(case, 0))), strict=True):
        away = np.abs(np.asarray(one) - np.asarray(other))
        assert ((away > 0) & (away <= np.spacing(np.maximum(np.abs(one), np.abs(other))))).all()


@pytest.mark.parametrize("kind, rank", [(kind, rank) for kind in KINDS for rank in (0, 4)])
def test_layers_do_not_outgrow_the_stream_nor_adapters_what_they_are_added_to(kind, rank):
    """Where they do, a rounding in the first layer is another gradient in the last."""
    config = recipe(kind, rank)
    arch = read_config(config.model.path)
    specs = adapter_specs(arch, config.lora) if rank else param_specs(arch)
    case = make_case(config, arch, 2, 64, "float32")
    size = lambda x: float(jnp.std(x))  # noqa: E731
    for path, spec in traverse_util.flatten_dict(specs).items():
        weight = traverse_util.flatten_dict(case.trainable)[path]
        if rank and path[-1] == "a":
            product = weight @ traverse_util.flatten_dict(case.trainable)[(*path[:-1], "b")]
            base = weight.shape[-2] ** -0.5
            assert adapter_scale(config.lora) * size(product) < base
        elif not rank and path[-1] == "kernel" and spec.axes[-1] == "embed":
            assert size(weight) * (spec.shape[-2] * 2 * arch.num_layers) ** 0.5 == pytest.approx(1, rel=0.1)


def test_a_wrong_tensor_is_found_and_named():
    good = (TensorError("a", 1e-15), TensorError("b", 1e-14))
    assert judged(Comparison(Layout(dp=2), 0.0, good, good), None)["ok"]
    for bad in (2e-8, float("nan")):
        report = judged(Comparison(Layout(dp=2), 0.0, (*good, TensorError("c", bad)), good), None)
        assert (report["ok"], report["worst_tensor"], report["devices"]) == (False, "c", 2)
    assert not judged(Comparison(Layout(), 2e-9, good, good), None)["ok"]
    assert not judged(Comparison(Layout(), 0.0, good, (TensorError("c", 2e-5),)), None)["ok"]
    json.dumps(report)


def test_layouts_that_cannot_be_are_refused():
    with pytest.raises(LayoutError, match="DP1 EP2: EP2 for a model without experts"):
        _check("dense", "TP2 EP2")
    with pytest.raises(LayoutError, match="PP8 for 4 repeats of the layer pattern"):
        _check("dense", "PP8")


def test_rows_of_one_shape_are_not_cut_nor_made_for_models_that_share_no_prompts():
    with pytest.raises(LayoutError, match=r"CP2 cuts rows whose parts have places .*: set that to 0"):
        _check("dense", "CP2", SHAPED)
    with pytest.raises(ConfigError, match=r"row_samples = 2: a model .* does not share prompts has no such rows"):
        _check("k3", "TP2", SHAPED)
    config = recipe("dense", 0, keys=SHAPED)
    for tokens in (64, 65, 66, 68, 70):
        made = make_case(config, read_config(config.model.path), 2, tokens, "float32")
        assert made.batch.row_shape is not None
        assert made.batch.row_shape.samples * made.batch.row_shape.own_tokens(tokens) < tokens


def _check(kind: str, layout: str, keys: tuple[str, ...] = ()) -> None:
    config = recipe(kind, 0, keys=keys)
    compare(config, read_config(config.model.path), parse_layout(layout), "float64")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--layout is missing"),
        (["--layout=TP2 XP2"], "'XP2' is none of TPn"),
        (["--layout=TP3"], "TP3 does not divide attention heads, 8; layouts of 3 devices that work: "),
        (
            ["--layout=DP2", "--config.cluster.pipeline_rounds=2"],
            "pipeline_rounds = 2 without a pipeline, PP1: set it to 1",
        ),
        (["--layout=PP2", "--config.cluster.pipeline_rounds=3"], "6 blocks of 4 repeats of the layer pattern for PP2"),
        (["--layout=DP2", "--config.cluster.context_parallel=ring"], "context_parallel = 'ring' with CP1"),
        (["--layout=DP2", "--config.model.path=nowhere"], "config.model.path = 'nowhere'"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, capsys):
    assert cli.run("verify-layout", ["--config=configs/tiny_dense.py", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err

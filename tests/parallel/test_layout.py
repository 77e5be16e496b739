import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.parallel.layout import (
    AXES,
    Divisible,
    Layout,
    LayoutError,
    check,
    nearest,
    parse_layout,
    row_parts,
    unsupported_reason,
)

DENSE = Divisible(heads=8, kv_heads=2, mlp=128, vocab=384, periods=6, row_tokens=96, rows=8)
MOE = dataclasses.replace(DENSE, experts=8)
OVER_TP = dataclasses.replace(DENSE, row_tokens=100, sequence_parallel=True)


@pytest.mark.parametrize("text", ["TP4 PP3 CP2 DP1 EP8", "tp4,pp3,cp2,dp1,ep8", "EP8, CP=2 PP3  TP4"])
def test_a_layout_is_read_in_any_order_and_case(text):
    assert parse_layout(text) == Layout(tp=4, pp=3, cp=2, dp=1, ep=8)
    assert parse_layout(text).devices == 24
    assert str(parse_layout(text)) == "TP4 PP3 CP2 DP1 EP8"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "empty"),
        ("TP4 XP2", "'XP2' is none of TPn"),
        ("TP4 TP2", "names TP twice: 4 and 2"),
        ("TP0", "TP is 0"),
        ("TP-2", "'TP-2' is none of"),
        ("TP2.5", "'TP2.5' is none of"),
        ("DP8 EP4", "EP may be 1, 8"),
        ("TP2 EP8", "EP may be 1, 2"),
    ],
)
def test_a_wrong_layout_is_refused_with_what_is_wrong(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(
    "text, axes",
    [
        ("TP4 PP3 CP2 EP8", ("cp", "tp")),
        ("DP8 EP8", ("dp",)),
        ("TP2 DP2 CP2 EP4", ("cp", "tp")),
        ("TP2 DP4 EP8", ("dp", "tp")),
        ("TP2 DP2 CP2 EP8", ("dp", "cp", "tp")),
        ("TP8", ()),
    ],
)
def test_experts_are_spread_over_a_view_of_the_mesh(text, axes):
    layout = parse_layout(text)
    assert layout.expert_axes == axes
    assert math.prod(layout.size(axis) for axis in axes) == layout.ep


@pytest.mark.parametrize(
    "text, sizes, message",
    [
        ("TP3", DENSE, "TP3 does not divide attention heads, 8"),
        ("TP8 DP2", dataclasses.replace(DENSE, kv_heads=3), "TP8 and the 3 key-value heads"),
        ("TP4", dataclasses.replace(DENSE, vocab=386), "vocabulary, 386"),
        ("TP2 EP2", DENSE, "without experts"),
        ("TP2 CP2 DP4 EP16", dataclasses.replace(MOE, experts=24), "EP16 does not divide the 24 experts"),
        ("PP7", DENSE, "PP7 for 6 repeats"),
        ("DP2", dataclasses.replace(DENSE, rounds=2), "pipeline_rounds = 2 without a pipeline, PP1: set it to 1"),
        ("PP2", dataclasses.replace(DENSE, rounds=4), "8 blocks of 6 repeats .* for PP2, 2 of them empty; set it to 3"),
        ("PP4", dataclasses.replace(DENSE, rounds=2), "8 blocks of 6 repeats .* for PP4, 2 .*; set it to 1"),
        (
            "PP2",
            dataclasses.replace(DENSE, rounds=3, periods=7),
            "6 blocks of 7 repeats .* for PP2, 2 of them empty; set it to 2",
        ),
        ("TP2", dataclasses.replace(DENSE, ring=True), "'ring' with CP1, .* set it to 'gather'; .* work: TP1 .*CP2"),
        (
            "PP3 DP2",
            dataclasses.replace(DENSE, rounds=2),
            "4 rows of a micro-batch on each of DP2 .* groups of PP3, .*; learner.micro_batch_rows = 12 would do",
        ),
        ("CP2", dataclasses.replace(DENSE, fixed_parts=True), "CP2 cuts rows whose parts have places .*; .* work: "),
        ("CP5", DENSE, "CP5 cuts rows into 10 parts, which do not divide 96 tokens; learner.row_tokens = 100 would do"),
        (
            "TP8",
            OVER_TP,
            r"TP8 CP1 with cluster.sequence_parallel .* 8 parts, .* 100 tokens; .*row_tokens = 104 would do",
        ),
        ("TP8 CP2", OVER_TP, "into 16 parts, .* = 112 would do, or cluster.sequence_parallel = False"),
        ("DP16", DENSE, "DP16 does not divide the 8 rows of a micro-batch; learner.micro_batch_rows = 16 would do"),
    ],
)
def test_sizes_that_a_layout_does_not_divide_are_named(text, sizes, message):
    with pytest.raises(LayoutError, match=message):
        check(parse_layout(text), sizes)


def test_tokens_are_cut_into_no_more_parts_than_needed():
    """The two parts of zig-zag order are an even TP's own; of an odd one they are further ones."""
    wanted = {"TP1": 1, "TP3": 3, "CP2": 4, "TP3 CP2": 12, "TP4 CP2": 8}
    assert {text: row_parts(parse_layout(text), sequence_parallel=True) for text in wanted} == wanted
    assert row_parts(parse_layout("TP4 CP2")) == 4


def test_a_refusal_names_the_nearest_layouts_that_work():
    with pytest.raises(LayoutError, match="layouts of 16 devices that work: TP1 PP1 CP2 DP8 EP1"):
        check(Layout(dp=16), DENSE)
    with pytest.raises(LayoutError, match="no layout of 7 devices works"):
        check(Layout(tp=7), DENSE)


@settings(deadline=None)
@given(*(st.sampled_from([1, 2, 3, 4, 8]) for _ in AXES))
def test_every_suggestion_works_and_has_as_many_devices(pp, dp, cp, tp):
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=dp)
    for other in nearest(layout, MOE):
        assert unsupported_reason(other, MOE) is None
        assert other.devices == layout.devices

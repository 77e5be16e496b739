"""Pipelines of a toy, GPipe and circular, against a loop over its layers; and who does what when."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlx.parallel import blocks, pipeline
from rlx.parallel.layout import Layout, ticks
from rlx.parallel.mesh import Placement, make_mesh

ROWS, WIDTH = 3, 5
# stages, blocks of each, repeats, micro-batches
GPIPE = [(3, 1, 7, 4), (2, 1, 4, 1)]
CIRCULAR = [
    (2, 2, 4, 2),
    (2, 2, 10, 4),  # stages divide the repeats and blocks do not
    (2, 3, 11, 4),  # one repeat of twelve is padding
    (3, 2, 22, 3),  # Kimi K3's patterns
    (3, 3, 9, 6),
    (4, 2, 8, 4),
    (4, 6, 24, 4),
]


def placement_of(stages: int, rounds: int, parts: int) -> Placement:
    layout = Layout(pp=stages)
    return Placement(make_mesh(layout), layout, parts, rounds=rounds)


def toy(repeats: int, parts: int) -> tuple[Any, Any, Any]:
    """(inputs, carry, stacked): a stream with a bank that counts beside it, odd and even layers that differ."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(0, 0.5, shape))  # noqa: E731
    inputs = {"shift": draw(parts, ROWS, 1)}
    carry = {"x": draw(parts, ROWS, WIDTH), "bank": jnp.zeros((parts, repeats, WIDTH)), "count": jnp.zeros(parts, int)}
    stacked = {"w": draw(repeats, WIDTH, WIDTH), "b": draw(repeats, WIDTH), "number": jnp.arange(repeats)}
    return inputs, carry, stacked


def step(inputs: Any, carry: Any, parameters: Any) -> tuple[Any, Any]:
    own = blocks.looked_up(parameters)
    y = jnp.tanh((carry["x"] + inputs["shift"]) @ own["w"] + own["b"])
    y = jnp.where(own["number"] % 2 == 0, y, jnp.sin(y))
    bank = carry["bank"].at[carry["count"]].set(y.sum(0))
    new = {"x": carry["x"] + y + carry["bank"].mean(0), "bank": bank, "count": carry["count"] + 1}
    return new, {"norm": (y * y).sum(), "number": own["number"]}


def in_a_loop(inputs: Any, carry: Any, stacked: Any) -> tuple[Any, Any]:
    """One layer after the other, all micro-batches at once."""
    return jax.lax.scan(lambda held, own: jax.vmap(step, (0, 0, None))(inputs, held, own), carry, stacked)


def loss(run: Any, inputs: Any, x: Any, weights: Any, carry: Any, stacked: Any) -> tuple[Any, Any]:
    new, made = run(inputs, carry | {"x": x}, stacked | weights)
    return (jnp.cos(new["x"]).sum() + (new["bank"] ** 2).sum() + made["norm"].sum(), (new, made))


def on_stages(placement: Placement, stacked: Any, repeats: int) -> Any:
    """As a model's parameters lie: neighbouring layers on each stage, where the stages divide them."""
    part = PartitionSpec("pp") if repeats % placement.layout.pp == 0 else PartitionSpec()
    return jax.device_put(stacked, NamedSharding(placement.mesh, part))


REMAT = {
    "layer": partial(jax.checkpoint, prevent_cse=False),
    "weights": partial(jax.checkpoint, prevent_cse=False, policy=blocks.all_but_weights),
}


@pytest.mark.parametrize(
    "stages, rounds, repeats, parts, remat",
    [*((*each, "layer") for each in (*GPIPE, *CIRCULAR)), (2, 2, 10, 4, "weights"), (3, 2, 11, 3, "none")],
)
def test_a_pipeline_computes_what_a_loop_over_the_layers_does(stages, rounds, repeats, parts, remat):
    with jax.enable_x64(True):
        placement, (inputs, carry, stacked) = placement_of(stages, rounds, parts), toy(repeats, parts)
        own = REMAT.get(remat, lambda f: f)(step)
        run = lambda i, c, s: pipeline.run(placement, own, i, c, s, repeats)  # noqa: E731
        of = lambda how: jax.jit(jax.value_and_grad(partial(loss, how), argnums=(0, 1, 2), has_aux=True))  # noqa: E731
        weights = {name: stacked[name] for name in ("w", "b")}
        placed = on_stages(placement, weights, repeats)
        found = of(run)(inputs, carry["x"], placed, carry, stacked)
        wanted = of(in_a_loop)(inputs, carry["x"], weights, carry, stacked)
    for a, b in zip(*map(jax.tree.leaves, jax.device_get((found, wanted))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def loops(jaxpr: Any) -> Iterator[Any]:
    """Scans that are in no other scan."""
    for each in jaxpr.eqns:
        if each.primitive.name == "scan":
            yield each
            continue
        inside = (x for value in each.params.values() for x in (value if isinstance(value, tuple) else (value,)))
        for inner in inside:
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from loops(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("stages, rounds, repeats, parts", [*GPIPE, *CIRCULAR])
def test_the_program_has_the_ticks_of_the_formula(stages, rounds, repeats, parts):
    placement = placement_of(stages, rounds, parts)
    run = lambda i, c, s: pipeline.run(placement, step, i, c, s, repeats)  # noqa: E731
    [loop] = loops(jax.make_jaxpr(run)(*toy(repeats, parts)).jaxpr)
    assert loop.params["length"] == rounds * parts + stages - 1 == ticks(placement.layout, parts, rounds)


def test_weights_are_not_kept_for_every_tick():
    """A block that is chosen as the loop runs would be; with one block a stage jax keeps the stack itself."""
    repeats, (inputs, carry, stacked) = 8, toy(8, 4)
    for remat in REMAT.values():
        placement = placement_of(2, 2, 4)
        run = lambda i, c, s: pipeline.run(placement, remat(step), i, c, s, repeats)  # noqa: B023, E731
        gradient = jax.grad(partial(loss, run), argnums=2, has_aux=True)
        weights = {"w": stacked["w"], "b": stacked["b"]}
        jaxpr = jax.make_jaxpr(gradient)(inputs, carry["x"], weights, carry, stacked).jaxpr
        made = [v.aval.shape for loop in loops(jaxpr) for v in loop.outvars]
        assert made
        assert not [shape for shape in made if shape[:1] == (9,) and shape[-2:] == (WIDTH, WIDTH)]


@pytest.mark.parametrize("stages, rounds, repeats, parts", [*GPIPE, *CIRCULAR])
def test_a_stage_gets_what_the_one_before_made_a_tick_ago(stages, rounds, repeats, parts):
    schedule = pipeline.schedule_of(placement_of(stages, rounds, parts), repeats, parts)
    number, mine = schedule.at(jnp.arange(rounds * parts))
    when = {}  # (block, micro-batch) -> tick
    for s in range(stages):
        for unit in range(rounds * parts):
            when[int(number[unit]) * stages + s, int(mine[unit])] = unit + s
    assert len(when) == stages * rounds * parts
    for (block, part), tick in when.items():
        assert block == 0 or when[block - 1, part] == tick - 1
    assert max(when.values()) + 1 == schedule.ticks
    idle = 1 - len(when) / (stages * schedule.ticks)
    assert idle == pytest.approx((stages - 1) / (rounds * parts + stages - 1))
    np.testing.assert_array_equal(schedule.units()[number, mine], np.arange(rounds * parts))


def test_blocks_that_come_from_other_stages():
    assert blocks.dealt_share(2, 2) == 1 / 2  # 0 1 | 2 3 become 0 2 | 1 3
    assert blocks.dealt_share(4, 2) == 1.0  # 2 3 become 1 5
    assert blocks.dealt_share(2, 1) == 0.0


def test_blocks_without_a_repeat_are_not_made():
    """2 stages of 3 blocks would compute 12 repeats where 8 are enough."""
    assert pipeline.schedule_of(placement_of(2, 3, 4), 7, 4)[:4] == (2, 1, 4, 4)


def test_micro_batches_that_are_no_whole_groups_are_refused():
    placement = placement_of(3, 2, 4)
    with pytest.raises(ValueError, match="4 micro-batches go round 3 stages in groups of 3"):
        pipeline.run(placement, step, *toy(6, 4), 6)

"""What is compiled while a run is opened are the programs that it runs."""

import dataclasses
import gc
import weakref

import jax
import pytest

from rlx import assemble, compiling
from rlx.compiling import Compiler
from rlx.data.packing import pack
from rlx.learner.state import make_optimizer
from rlx.learner.step import update
from rlx.models.hf import read_architecture
from rlx.parallel.runtime import CompilationCounter
from rlx.processes import ALONE
from rlx.run import open_training
from rlx.train import learn, rollout, select
from tests import tiny_run
from tests.rollout.serving import ask, serve

PROMPT = 9


@pytest.mark.parametrize("rank", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_nothing_is_compiled_again(tmp_path, rank):
    config = tiny_run.config(tiny_run.write(tmp_path), lora__rank=rank, rollout__temperature=0.7)
    arch = read_architecture(config.model.path)
    with Compiler(config, arch, None) as compiler:
        compiler.begin_engine([PROMPT - 1, PROMPT])
        model = assemble.load_model(config)
        state, optimizer = assemble.fresh_state(config, model), make_optimizer(config.learner)
        step, packing = assemble.shapes(config, arch, None)
        frozen = model.params if rank else {}
        compiler.update(step, optimizer, state, frozen, packing).result()
        compiler.wait_for_engine()
    engine = assemble.make_engine(config, model, assemble.policy_params(config, model, state.trainable), 0)
    batch = assemble.device_batch(pack([], packing))
    counter = CompilationCounter()
    requests = [ask(i, PROMPT, config.rollout.group_size, new=2) for i in range(config.rollout.tasks_per_update)]
    answers = serve(engine, requests)
    state, *_ = jax.block_until_ready(update(step, optimizer, state, frozen, batch))
    assert counter.count == 0
    assert all(len(each.tokens) for completions in answers for each in completions)


def compiled_by_an_update(run, feed):
    """Programs, in a collection and in the update of it; not those that make one of the other."""
    run.compiled.result()
    before = run.compilations.count
    batch = rollout(run, feed)
    collected = run.compilations.count - before
    packed = select(run, batch)
    before = run.compilations.count
    assert learn(run, feed, batch, packed)["optimizer/update_norm"] > 0
    run.progress.update += 1
    return collected, run.compilations.count - before


def test_a_run_compiles_nothing_after_it_is_open_and_a_resumed_one_keeps_one_state(tmp_path, monkeypatch):
    config = tiny_run.config(tiny_run.write(tmp_path))
    fresh = []

    def remembered(config, model, made=assemble.fresh_state):
        state = made(config, model)
        fresh.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(state))
        return state

    monkeypatch.setattr(assemble, "fresh_state", remembered)
    jax.clear_caches()
    with open_training(config, ALONE) as run, run.open_feed() as feed:
        assert compiled_by_an_update(run, feed) == (0, 0)
        run.save(run.moment(feed), feed)
    del run, feed
    fresh.clear()
    jax.clear_caches()
    with open_training(config, ALONE) as run, run.open_feed() as feed:
        gc.collect()
        assert run.resumed
        assert fresh
        assert all(leaf() is None for leaf in fresh)
        assert compiled_by_an_update(run, feed) == (0, 0)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A tiny configuration, its architecture, and what is compiled for its updates in place of doing so."""
    config = tiny_run.config(tiny_run.write(tmp_path))
    calls = []
    monkeypatch.setattr(compiling, "compile_update", lambda *given: calls.append(given))
    return config, read_architecture(config.model.path), calls


def test_an_update_of_other_shapes_than_expected_is_compiled_for_them(parts):
    config, arch, calls = parts
    model = assemble.load_model(config)
    step, packing = assemble.shapes(config, arch, None)
    given = (step, make_optimizer(config.learner), assemble.fresh_state(config, model), model.params)
    with Compiler(config, arch, None) as compiler:
        compiler.update(*given, packing).result()
        assert len(calls) == 1
        compiler.update(*given, dataclasses.replace(packing, row_targets=packing.row_targets // 2)).result()
        assert [call[-1].source.shape[1] for call in calls] == [packing.row_targets, packing.row_targets // 2]
        bound = jax.device_put(given[2], jax.devices()[0])
        compiler.update(*given[:2], bound, model.params, packing).result()
        assert len(calls) == 3


def test_an_update_that_cannot_be_compiled_is_said_before_anything_is_generated(parts, monkeypatch):
    config, arch, _ = parts

    def fails(*given):
        raise ValueError("no such program")

    monkeypatch.setattr(compiling, "compile_update", fails)
    model = assemble.load_model(config)
    step, packing = assemble.shapes(config, arch, None)
    with Compiler(config, arch, None) as compiler:
        compiler.wait_for_engine()
        state, optimizer = assemble.fresh_state(config, model), make_optimizer(config.learner)
        assert compiler.update(step, optimizer, state, model.params, packing).exception()
        with pytest.raises(ValueError, match="no such program"):
            compiler.wait_for_engine()


REFUSED = """
import sys
from threading import Event
import jax
from rlx import cli, compiling

begun = Event()

def compile_update(*given):
    begun.set()
    for i in range(40):  # small programs: the interpreter is asked for again and again while the process ends
        jax.jit(lambda x: x * i).lower(1.0).compile()

compiling.compile_update = compile_update
load = compiling.assemble.load_model

def load_model(config, **where):
    assert begun.wait(300)
    return load(config, **where)

compiling.assemble.load_model = load_model
sys.exit(cli.run("train", sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_refused_while_its_programs_compile_ends_in_order(tmp_path, monkeypatch):
    (tmp_path / "refused.py").write_text(REFUSED)
    monkeypatch.chdir(tmp_path)
    recipe = tiny_run.write(tmp_path)
    for part in (tmp_path / "model").glob("tokenizer*"):
        part.unlink()
    process = tiny_run.start("refused", *tiny_run.arguments(recipe))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error  # an interpreter that ends beneath XLA aborts
    assert error.startswith("rlx train: there is no tokenizer in")

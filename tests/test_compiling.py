"""What is compiled while a run is opened are the programs that it runs."""

import jax
import pytest

from rlx import assemble
from rlx.compiling import Compiler
from rlx.data.packing import pack
from rlx.learner.state import make_optimizer
from rlx.learner.step import update
from rlx.models.hf import read_architecture
from rlx.parallel.runtime import CompilationCounter
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

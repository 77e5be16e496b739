"""Checkpoints: bits come back, what does not fit is named, and a kill during a save loses that save alone."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.checkpoint import CheckpointError, Checkpoints
from rlx.config.schema import LoraConfig
from rlx.learner.state import init_state, make_optimizer
from tests import tiny_model
from tests.learner.batches import LEARNER
from tests.tiny_model import ARCH
from tests.waiting import gone

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj"))
HOST = {"progress": {"update": 7, "seconds": 1.5, "text": "π"}, "stream": [1, [2, None, True]]}


def make_state(seed=0, lora=LORA, learner=LEARNER):
    """With values of its own in every array, NaN and infinities among them."""
    state = init_state(ARCH, lora, tiny_model.params(), make_optimizer(learner), jax.random.key(0))
    rng = np.random.default_rng(seed)
    drawn = jax.tree.map(lambda x: jnp.asarray(9 * rng.normal(size=x.shape), x.dtype), state)
    odd = jnp.array([jnp.nan, jnp.inf, -0.0])
    return drawn.replace(trainable=jax.tree.map(lambda x: x.at[0, 0, :3].set(odd), drawn.trainable))


def assert_identical(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def opened(tmp_path):
    """Opens the directory's checkpoints; everything is closed at the end."""
    made = []

    def open_again(keep=2, directory=tmp_path / "checkpoints"):
        made.append(Checkpoints(directory, keep))
        return made[-1]

    yield open_again
    for checkpoints in made:
        checkpoints.close()


def steps(checkpoints):
    return sorted(int(path.name) for path in checkpoints.directory.iterdir())


def test_a_saved_state_comes_back_to_the_bit(opened):
    state, checkpoints = make_state(), opened()
    wanted = jax.device_get(state)
    checkpoints.save(7, state, HOST)
    checkpoints.close()
    restored = opened().restore(make_state(seed=1))
    assert restored.step == 7
    assert restored.host == HOST
    assert_identical(restored.state, wanted)
    assert not any(x.committed for x in jax.tree.leaves(restored.state))  # else programs would compile anew


def test_the_state_may_be_given_away_while_it_is_saved(opened):
    """The next update overwrites its buffers."""
    state, checkpoints = make_state(), opened()
    wanted = jax.tree.map(np.array, state)  # a view of a buffer would keep it from being given away
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)
    checkpoints.save(1, state, HOST)
    jax.block_until_ready(overwrite(state))
    assert jax.tree.leaves(state)[0].is_deleted()
    checkpoints.wait()
    assert checkpoints.save_seconds > 0
    assert_identical(checkpoints.restore(make_state(seed=1)).state, wanted)


def test_the_newest_are_kept(opened):
    checkpoints = opened(keep=2)
    assert checkpoints.latest_step is None
    for step in (0, 5, 10, 11):
        checkpoints.save(step, make_state(seed=step), {"step": step})
    checkpoints.wait()
    assert checkpoints.latest_step == 11
    assert steps(checkpoints) == [10, 11]
    assert checkpoints.restore(make_state(), step=10).host == {"step": 10}
    assert_identical(checkpoints.restore(make_state()).state, make_state(seed=11))


def test_a_step_that_is_there_is_left_as_it_is(opened):
    checkpoints = opened()
    checkpoints.save(3, make_state(), {"first": True})
    checkpoints.save(3, make_state(seed=1), {"first": False})
    checkpoints.wait()
    assert checkpoints.restore(make_state()).host == {"first": True}


def test_a_reader_removes_nothing(opened):
    """A save that is under way has a directory of its own until it is complete."""
    writer = opened(keep=2)
    for step in (1, 2):
        writer.save(step, make_state(seed=step), {"step": step})
    writer.wait()
    under_way = writer.directory / "3.orbax-checkpoint-tmp"
    under_way.mkdir()
    reader = opened(keep=None)
    assert reader.latest_step == 2
    assert reader.restore(make_state()).host == {"step": 2}
    assert under_way.is_dir()
    opened(keep=2)
    assert gone(under_way)


def test_nothing_to_restore_is_said(opened):
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*checkpoints"):
        opened().restore(make_state())


@pytest.mark.parametrize(
    "lora, learner, said",
    [
        (
            dataclasses.replace(LORA, rank=4),
            LEARNER,
            r"\(12 of 17 arrays differ\):\n"
            r"  \.optimizer.*q_proj.*: saved float32\[2, 32, 3\], this run has float32\[2, 32, 4\]",
        ),
        (dataclasses.replace(LORA, targets=("q_proj",)), LEARNER, r"v_proj.*saved float32.*this run has nothing"),
        (
            dataclasses.replace(LORA, targets=("q_proj", "v_proj", "o_proj")),
            LEARNER,
            r"o_proj.*saved nothing, this run has float32",
        ),
        (LORA, dataclasses.replace(LEARNER, max_grad_norm=0.0), r"optimizer\[0\].*: saved nothing"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_the_array(opened, lora, learner, said):
    checkpoints = opened()
    checkpoints.save(1, make_state(), HOST)
    with pytest.raises(CheckpointError, match=f"(?s)checkpoint 1 in .* does not fit this run .*{said}") as error:
        checkpoints.restore(init_state(ARCH, lora, tiny_model.params(), make_optimizer(learner), jax.random.key(0)))
    assert "Start a run under another run.name" in str(error.value)
    assert len(str(error.value).splitlines()) <= 7


def test_a_failed_save_is_raised_by_the_next(tmp_path, monkeypatch):
    """And is not seen: the one before stays the newest."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, make_state(), HOST)
    checkpoints.wait()

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "rename", full)
    checkpoints.save(2, make_state(seed=2), HOST)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(3, make_state(seed=3), HOST)
    monkeypatch.undo()
    assert checkpoints.latest_step == 1
    with pytest.raises(OSError, match="no space left"):  # nor can it be overlooked at the end
        checkpoints.close()


# ----------------------------------------------------------------------------------------------------------------- kill

SAVES_TWO = """
import json, os, signal, sys
from pathlib import Path

from rlx.checkpoint import Checkpoints
from tests.test_checkpoint import HOST, make_state

directory, kill_at = Path(sys.argv[1]), json.loads(sys.argv[2])
checkpoints = Checkpoints(directory, 2)
checkpoints.save(1, make_state(), HOST)
checkpoints.wait()

def kill(event, arguments):
    if event == kill_at[0] and str(arguments[0]).endswith(kill_at[1]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
checkpoints.save(2, make_state(seed=2), HOST)
checkpoints.wait()
"""
MOMENTS = {
    "before anything is written": ["os.mkdir", "2.orbax-checkpoint-tmp"],
    "before the arrays are written": ["os.mkdir", "state.orbax-checkpoint-tmp"],
    "when the arrays are written": ["os.rename", "state.orbax-checkpoint-tmp"],
    "when all is written": ["os.rename", "2.orbax-checkpoint-tmp"],
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_during_a_save_leaves_the_one_before(opened, tmp_path, moment):
    directory = tmp_path / "checkpoints"
    command = [sys.executable, "-c", SAVES_TWO, str(directory), json.dumps(MOMENTS[moment])]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    checkpoints = opened()
    assert checkpoints.latest_step == 1
    assert_identical(checkpoints.restore(make_state(seed=1)).state, make_state())
    checkpoints.save(2, make_state(seed=2), {"again": True})
    checkpoints.wait()
    assert steps(checkpoints) == [1, 2]  # nothing of the broken save is left
    restored = checkpoints.restore(make_state())
    assert restored.host == {"again": True}
    assert_identical(restored.state, make_state(seed=2))

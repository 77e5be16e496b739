"""What the processes of a trainer but the first do: on their own devices the same as it, when it says so.

They hold their part of the model, the learner's state and the checkpoints. Tasks, engines, graders and records are
process 0's alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from rlx import assemble, bridges
from rlx.checkpoint import Checkpoints
from rlx.config.schema import Config
from rlx.data.packing import PackedBatch, pack
from rlx.export import policy_of
from rlx.learner.state import LearnerState
from rlx.learner.step import StepConfig, compile_update, update
from rlx.parallel import runtime
from rlx.processes import Follower
from rlx.scoring import score


@dataclasses.dataclass
class Own:
    """What this process has of the run."""

    config: Config
    model: assemble.Model
    optimizer: optax.GradientTransformation
    step: StepConfig
    checkpoints: Checkpoints
    state: LearnerState


def follow(config: Config, leader: Follower) -> int:
    """Until process 0 ends; its exit status.

    Raises:
      PeerLost: it is gone. And whatever this process fails with, of which process 0 learns.
    """
    runtime.use_compilation_cache(config.run.compilation_cache)
    try:
        own = None
        for what, given in leader.orders():
            if what == "end":
                status, why = given
                if why:
                    print(f"rlx train: {why}", file=sys.stderr)
                return status
            if what == "meet":
                leader.met()
                continue
            own = begin(config) if own is None else own
            ORDERS[what](own, *given)
    except Exception as error:
        leader.failed(error)
        raise
    raise AssertionError("the orders end with the last one")


def begin(config: Config) -> Own:
    """As `rlx.run.open_training` begins."""
    model = assemble.load_model(config, on_mesh=True)
    optimizer = assemble.make_optimizer(config.learner)
    state = assemble.fresh_state(config, model)
    checkpoints = Checkpoints(config.run.path / "checkpoints", config.checkpoint.keep)
    if checkpoints.latest_step is not None:
        state = checkpoints.restore(state).state
    model = model if config.lora.rank else dataclasses.replace(model, params={})
    step, packing = assemble.shapes(config, model)
    (padding,) = assemble.device_batch(pack([], packing), model.placement)
    compile_update(step, optimizer, state, model.params, padding)
    return Own(config, model, optimizer, step, checkpoints, state)


def _update(own: Own, packed: PackedBatch) -> None:
    batch = assemble.device_batch(packed, own.step.placement)
    own.state, _, _ = update(own.step, own.optimizer, own.state, own.model.params, batch)


def _published(own: Own) -> None:
    bridges.published(own.config, own.model, own.state.trainable)


def _policy(own: Own) -> None:
    policy_of(own.config, own.model, own.state)


def _score(own: Own, sequences: list[np.ndarray]) -> None:
    score(own.config, own.step, own.state.trainable, own.model.params, sequences)


def _save(own: Own, step: int, host: Mapping[str, Any], flow: bytes) -> None:
    own.checkpoints.save(step, own.state, dict(host), flow)


def _close(own: Own) -> None:
    own.checkpoints.close()


ORDERS: dict[str, Callable[..., None]] = {
    "begin": lambda own: None,
    "update": _update,
    "published": _published,
    "policy": _policy,
    "score": _score,
    "save": _save,
    "close": _close,
}

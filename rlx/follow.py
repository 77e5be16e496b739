"""What the processes of a trainer but the first do: on their own devices the same as it, when it says so.

They hold their part of the model, the learner's state and the checkpoints. Tasks, engines, graders and records are
process 0's alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from rlx import assemble, bridges, compiling
from rlx.checkpoint import Checkpoints
from rlx.config.schema import Config
from rlx.export import policy_of
from rlx.learner.state import LearnerState
from rlx.learner.step import StepConfig, compile_update, update
from rlx.parallel import runtime
from rlx.processes import Follower
from rlx.run import learner_parts
from rlx.scoring import score
from rlx.sync.manifest import StagingError
from rlx.sync.staging import Staging


@dataclasses.dataclass
class Own:
    """What this process has of the run."""

    config: Config
    model: assemble.Model
    optimizer: optax.GradientTransformation
    step: StepConfig
    checkpoints: Checkpoints
    staging: Staging | None
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
    model, optimizer, state, checkpoints = learner_parts(config)
    step, _ = assemble.shapes(config, model.arch, model.placement)
    staging = bridges.make_staging(config, model, config.run.path)
    return Own(config, model, optimizer, step, checkpoints, staging, state)


def _restore(own: Own, checkpoint: int | None) -> None:
    """Process 0 says from which step: a shared file system may not show the newest one everywhere yet."""
    if checkpoint is not None:
        own.state = own.checkpoints.restore(own.state, checkpoint).state
    if not own.config.lora.rank:
        own.model = dataclasses.replace(own.model, params={})
    _, packing = assemble.shapes(own.config, own.model.arch, own.model.placement)
    empty = compiling.padding(packing, own.model.placement)
    compile_update(own.step, own.optimizer, own.state, own.model.params, empty)


def _update(own: Own, rows: assemble.BatchRows) -> None:
    batch = assemble.device_batch(rows, own.step.placement)
    own.state, _, _ = update(own.step, own.optimizer, own.state, own.model.params, batch)


def _published(own: Own) -> None:
    with contextlib.suppress(StagingError):  # process 0 finds the same, and says so
        bridges.published(own.config, own.model, own.state.trainable, int(own.state.version), own.staging)


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
    "restore": _restore,
    "update": _update,
    "published": _published,
    "policy": _policy,
    "score": _score,
    "save": _save,
    "close": _close,
}

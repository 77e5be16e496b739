"""Checkpoints of a run: the learner's state and the host's state (a JSON value) under one step, saved asynchronously.

Everything orbax names is in this file. A step is visible only when it is complete, so a kill during a save leaves the
one before it as the newest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.learner.state import LearnerState


class CheckpointError(RuntimeError):
    """A checkpoint that is missing or does not fit the run."""


@dataclasses.dataclass(frozen=True)
class Restored:
    step: int
    state: LearnerState
    host: dict[str, Any]
    flow: bytes


class Checkpoints:
    """The checkpoints in one directory; the newest `keep` are kept.

    keep=None is for reading, also while another process saves: nothing is removed, not even what looks half saved.
    """

    def __init__(self, directory: Path, keep: int | None):
        # Imported here: programs compile meanwhile.
        from orbax.checkpoint import v1 as ocp

        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        policies = ocp.training.preservation_policies
        self._checkpointer = ocp.training.Checkpointer(
            os.path.abspath(directory),
            preservation_policy=policies.PreserveAll() if keep is None else policies.LatestN(keep),
            cleanup_tmp_directories=keep is not None,
        )
        self._pending: Any = None
        self.save_seconds = 0.0  # of the last save, as far as the trainer waited for it

    @property
    def latest_step(self) -> int | None:
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    @property
    def steps(self) -> list[int]:
        """Of the complete checkpoints, oldest first."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def save(self, step: int, state: LearnerState, host: dict[str, Any], flow: bytes = b"") -> None:
        """Start saving; returns when the state has been copied. Waits for the save before it, and raises its error.

        flow: what was under way, as `rlx.rollout.records` packs it.

        A step that is there already is left as it is: the state of a step does not depend on when it is saved.
        """
        start = time.perf_counter()
        self.wait()
        if step == self.latest_step:
            return
        # The next update overwrites the state's own buffers while orbax is still writing.
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        # The host's state goes as one JSON text: it is a value, not a tree of arrays to be sharded.
        text = json.dumps({"host": host, "arrays": _describe(state)}).encode()
        host_parts = {"json": np.frombuffer(text, np.uint8)}
        if flow:
            host_parts["flow"] = np.frombuffer(flow, np.uint8)
        parts = {"state": copy, "host": host_parts}
        self._pending = self._checkpointer.save_checkpointables_async(step, parts)
        self.save_seconds = time.perf_counter() - start

    def wait(self) -> None:
        """Until the running save is complete. Raises what it failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore(self, abstract: LearnerState, step: int | None = None) -> Restored:
        """The newest (or given) checkpoint, in the shapes, dtypes and sharding of `abstract`.

        Raises CheckpointError where there is none, or where it is damaged or its arrays have other names or shapes.
        """
        self.wait()  # orbax counts a step that is still being written
        step = self.latest_step if step is None else step
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        host = {name: np.asarray(value).tobytes() for name, value in self._load(step, {"host": None})["host"].items()}
        saved = json.loads(host["json"])
        _check_arrays(saved["arrays"], _describe(abstract), f"checkpoint {step} in {self.directory}")
        state = _bound_as(abstract, self._load(step, {"state": abstract}))
        return Restored(step, state, saved["host"], host.get("flow", b""))

    def _load(self, step: int, parts: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._checkpointer.load_checkpointables(step, parts)
        except Exception as error:  # orbax and tensorstore have many kinds for a file that is damaged or missing
            raise CheckpointError(
                f"{self.directory / str(step)} cannot be read ({type(error).__name__}: {str(error)[:200]}); remove "
                "that directory to continue from the checkpoint before it"
            ) from error

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def _bound_as(like: LearnerState, loaded: dict[str, Any]) -> LearnerState:
    """`loaded["state"]`, which is taken out. orbax binds every array to its devices; a program is compiled anew for one
    that was bound to none."""
    arrays, tree = jax.tree.flatten(loaded.pop("state"))
    for i, wanted in enumerate(jax.tree.leaves(like)):  # one at a time: no second copy of the whole
        if isinstance(wanted, jax.Array) and not wanted.committed:
            arrays[i] = jax.device_put(np.asarray(arrays[i]))
    return jax.tree.unflatten(tree, arrays)


def _describe(state: LearnerState) -> dict[str, str]:
    """Path of each array -> its dtype and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_arrays(saved: dict[str, str], wanted: dict[str, str], what: str) -> None:
    different = [
        f"{path}: saved {saved.get(path, 'nothing')}, this run has {wanted.get(path, 'nothing')}"
        for path in sorted(saved.keys() | wanted.keys())
        if saved.get(path) != wanted.get(path)
    ]
    if different:
        shown, total = "\n  ".join(different[:5]), len(saved.keys() | wanted.keys())
        raise CheckpointError(
            f"{what} does not fit this run ({len(different)} of {total} arrays differ):\n  {shown}\n"
            "Were the model, lora.rank, lora.targets or the optimizer changed? Start a run under another run.name."
        )

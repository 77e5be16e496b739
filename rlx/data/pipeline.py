"""The endless stream of tasks that a run trains on. The only file that knows grain."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.types import Task

if TYPE_CHECKING:
    import grain


class TaskInstance(NamedTuple):
    """One occurrence of a task in the stream: what a group is sampled for."""

    task: Task
    epoch: int  # how often all tasks of its source came before
    group: int  # position in the stream: unique in a run, and the same after a resume


class TaskStream:
    """Tasks without end: sources mixed by weight, each source's tasks in a new order every epoch.

    The mix is exact: of any n instances in a row, each source has its share to within one or two. The whole stream is
    a function of (tasks, weights, seed) and its state one number, so a resumed run sees what it would have seen.
    """

    def __init__(self, tasks: Sequence[Task], weights: Mapping[str, float], seed: int):
        """weights: of the sources, by name. seed: any integer; of the shuffles.

        Raises:
            ValueError: there are no tasks, or a source of theirs has no positive weight.
        """
        by_source: dict[str, list[Task]] = {}
        for task in tasks:
            by_source.setdefault(task.source, []).append(task)
        if not by_source:
            raise ValueError("there are no tasks to train on")
        if bad := {name: weights.get(name) for name in by_source if not weights.get(name, 0.0) > 0}:
            raise ValueError(f"every source needs a weight above 0, found {bad}")
        names = sorted(by_source)
        self._iterator: Any = iter(_mixed({name: by_source[name] for name in names}, weights, seed))
        self._identity = {
            "seed": seed,
            "weights": {name: float(weights[name]) for name in names},
            "tasks": digest(tasks),
        }

    def next_tasks(self, n: int) -> list[TaskInstance]:
        return [next(self._iterator) for _ in range(n)]

    def get_state(self) -> dict[str, Any]:
        """JSON-serialisable. Saved after n instances, it continues with instance n."""
        return {"iterator": self._iterator.get_state(), **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of a stream of the same tasks.

        Raises:
            ValueError: the state is of other tasks, weights or another seed; says which.
        """
        for key, value in self._identity.items():
            if state[key] != value:
                raise ValueError(
                    f"the saved task stream has other {key} ({state[key]!r}) than this run ({value!r}): continue with "
                    "the configuration that it was saved with, or start a new run"
                )
        self._iterator.set_state(state["iterator"])


def _mixed(by_source: Mapping[str, list[Task]], weights: Mapping[str, float], seed: int) -> grain.IterDataset:
    # Imported here: it takes a quarter of a second, and jax with it, which readers of tasks alone can do without.
    import grain

    def endless(tasks: list[Task], seed: int) -> grain.MapDataset:
        shuffled = grain.MapDataset.source(tasks).seed(seed).shuffle().repeat()
        size = len(tasks)
        return shuffled.map_with_index(lambda index, task: (task, index // size))

    sources = [endless(tasks, _seed(f"{seed}/{name}")) for name, tasks in by_source.items()]
    mixed = grain.MapDataset.mix(sources, weights=[float(weights[name]) for name in by_source])
    numbered = mixed.map_with_index(lambda group, item: TaskInstance(item[0], item[1], group))
    # Tasks are in memory: threads that read ahead would only make the order of effects harder to follow.
    return numbered.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def _seed(text: str) -> int:
    # grain shuffles epoch e with seed + e: seeds of different runs and sources must not be neighbours.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def digest(tasks: Sequence[Task]) -> str:
    content = "\n".join(repr((t.id, t.question, t.answer, t.grader)) for t in tasks)
    return hashlib.sha256(content.encode()).hexdigest()[:16]

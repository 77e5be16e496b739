"""Grading in a pool of processes, each with a time limit that holds whatever the response does to the grader."""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future

from rlx.config.schema import GraderConfig
from rlx.envs.extract import Extract
from rlx.envs.grading import GRADERS, Grade, Outcome, ScoreFunction, grade, score_answer, warm_up
from rlx.envs.workers import Worker, WorkerDied, WorkerTimeout
from rlx.types import Task

CHEAP = ("exact", "number")  # graders of microseconds


@dataclasses.dataclass(frozen=True)
class _Job:
    task: Task
    text: str
    future: Future[Grade]


class GraderPool:
    """A context manager whose `grade` returns at once with a future, from any thread:

        with GraderPool(config.grader) as pool:
            grade = await asyncio.wrap_future(pool.grade(task, text))

    A future resolves to a Grade whatever happens in the worker; the caller counts the outcomes. Leaving the context
    cancels what has not started and kills what has (`Outcome.ERROR`).

    graders: the names whose libraries the workers import at the start; others are imported with the first grading
    that needs them, inside its time limit. score: another scoring function, importable by name.
    """

    def __init__(
        self, config: GraderConfig, graders: Iterable[str] = GRADERS, score: ScoreFunction = score_answer
    ) -> None:
        if config.workers < 1:
            raise ValueError(f"grader.workers = {config.workers}: at least 1 process is needed")
        if config.timeout_s <= 0:
            raise ValueError(f"grader.timeout_s = {config.timeout_s}: it must be above 0 seconds")
        self.extract = config.extract
        self._timeout_s = config.timeout_s
        function = functools.partial(grade, mode=config.extract, score=score)
        prepare = functools.partial(warm_up, tuple(graders))
        self._workers = [Worker(function, prepare) for _ in range(config.workers)]
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of _open and of what is put behind it
        self._open = False

    def __enter__(self) -> GraderPool:
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.wait_ready()
        except WorkerDied as error:
            for worker in self._workers:
                worker.stop()
            raise RuntimeError(f"a grader could not start ({error}): what it printed above says why") from error
        self._open = True
        for worker in self._workers:
            self._threads.append(threading.Thread(target=self._serve, args=(worker,), name="grader", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._open = False
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    job.future.cancel()
            for _ in self._workers:
                self._jobs.put(None)
        for worker in self._workers:
            worker.interrupt()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.stop()
        self._threads.clear()

    def grade(self, task: Task, text: str) -> Future[Grade]:
        """Grade a response to a task. A future that was cancelled before its turn is skipped."""
        job = _Job(task, text, Future())
        with self._lock:
            if not self._open:
                raise RuntimeError("the grader pool is closed: use it inside `with GraderPool(config) as pool:`")
            self._jobs.put(job)
        return job.future

    def _serve(self, worker: Worker) -> None:
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(self._grade(worker, job))

    def _grade(self, worker: Worker, job: _Job) -> Grade:
        start = time.perf_counter()
        try:
            return worker.call(job.task, job.text, timeout_s=self._timeout_s)
        except WorkerTimeout as error:
            outcome, detail = Outcome.TIMEOUT, str(error)
        except Exception as error:  # a dead worker, a task that cannot be pickled: never the end of the run
            outcome, detail = Outcome.ERROR, f"{type(error).__name__}: {error}"
        return Grade(0.0, "", detail, time.perf_counter() - start, outcome)


def check_gold_answers(pool: GraderPool, tasks: Iterable[Task], per_source: int = 4) -> None:
    """Grade gold answers as if a model had written them: all of the cheap graders', a few of each source's others.

    Raises:
        ValueError: one does not get reward 1, so that no response could: the grader or `grader.extract` does not fit.
    """
    chosen: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        of_kind = chosen.setdefault((task.source, task.grader), [])
        if task.answer is not None and (task.grader in CHEAP or len(of_kind) < per_source):
            of_kind.append(task)
    grades = [(t, pool.grade(t, _perfect_response(t, pool.extract))) for ts in chosen.values() for t in ts]
    for task, future in grades:
        got = future.result()
        if got.reward != 1.0:
            raise ValueError(
                f"task {task.id}: its own answer {task.answer!r} gets reward {got.reward:g} from grader "
                f"{task.grader!r}, which saw {got.extracted!r} ({got.detail}). Choose another "
                f"tasks.sources.{task.source}.grader or grader.extract (last_number reads numbers only)."
            )


def _perfect_response(task: Task, mode: Extract) -> str:
    if mode == "tagged":
        return f"<answer>{task.answer}</answer>"
    return f"\\boxed{{{task.answer}}}" if task.grader == "math_verify" else f"{task.answer}"

"""How fast engines are, from when they were asked and when they had answered.

A response of W tokens beside on average n - 1 others takes

    request_seconds + W (step_seconds + n step_seconds_per_request) + prefill of all prompts that began meanwhile

which is linear in what is sought: nonnegative least squares. Prefill is every request's, as decoding stops for it.
While the trainer trains on the same device all of it takes `slowdown` times as long; that factor is searched for.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.optimize

from rlx.config import profiles
from rlx.config.schema import Config
from rlx.config.simulation import SimulatedEngines
from rlx.simulation.steps import StepFunction

SLOWDOWNS = np.linspace(1.0, 4.0, 61)
# Relative deviation below which records do not tell two coefficients apart. Of responses that are all alike in length
# nothing is put down to the request itself; where always as many ran, nothing is put down to how many: an engine
# decodes a batch of fixed shape, or is bound by reading its weights.
ALIKE = 0.1
FASTEST = 1e9  # tokens/s: a prefill that cannot be seen

Record = Mapping[str, Any]


@dataclasses.dataclass
class _Request:
    sent: float
    done: float
    tokens: int
    prompt: int
    fresh: int  # tokens to prefill
    start: float = 0.0  # it left the engine's queue


def fit_engines(
    responses: Sequence[Record],
    loads: Sequence[Record],
    updates: Sequence[Record],
    recorded: Config,
    base: SimulatedEngines,
) -> tuple[SimulatedEngines, float]:
    """The engines, and the slowdown while the trainer trains."""
    admission = recorded.producer.engine_admission or profiles.admission(recorded)
    training = [(u["taken"], u["trained"]) for u in updates]
    # Before these updates everything was compiled and filled.
    since = updates[0]["began"]
    by_engine: defaultdict[str, list[Record]] = defaultdict(list)
    for record in responses:
        by_engine[record["engine"]].append(record)
    tables = []
    for name, records in by_engine.items():
        own = [load for load in loads if load["engine"] == name]
        requests = _requests(records, own, admission, base.prefix_cache)
        tables.append(_table(requests, own, training, since))
    columns = np.concatenate(tables)
    coefficients, slowdown = _solve(columns)
    step, step_per_request, held, prefill = coefficients
    return (
        dataclasses.replace(
            base,
            count=len(by_engine),
            step_seconds=max(float(step), 1e-9),
            step_seconds_per_request=float(step_per_request),
            request_seconds=float(held),
            prefill_tokens_per_s=min(1.0 / prefill, FASTEST) if prefill > 0 else FASTEST,
            load_seconds=float(np.mean([load["done"] - load["sent"] for load in loads])) if loads else 0.0,
        ),
        slowdown,
    )


def _requests(records: Sequence[Record], loads: Sequence[Record], admission: int, prefix_cache: bool) -> list[_Request]:
    """In the order of their start: an engine runs `admission` of them, first come, first served."""
    found = []
    flushed = sorted(load["done"] for load in loads)
    known: dict[str, tuple[float, int]] = {}  # when and how much of a session the engine had seen
    for record in sorted(records, key=lambda r: r["sent"]):
        session = record["id"].rsplit(":", 2)[0]
        at, length = known.get(session, (0.0, 0))
        cached = length if prefix_cache and not any(at <= t <= record["sent"] for t in flushed) else 0
        known[session] = (record["done"], record["prompt_tokens"] + record["tokens"])
        fresh = max(1, record["prompt_tokens"] - cached)
        found.append(_Request(record["sent"], record["done"], record["tokens"], record["prompt_tokens"], fresh))
    running: list[float] = []  # ends
    for request in found:
        request.start = request.sent
        while running and running[0] <= request.sent:
            heapq.heappop(running)
        if len(running) >= admission:
            request.start = heapq.heappop(running)
        heapq.heappush(running, request.done)
    return found


def _table(
    requests: Sequence[_Request], loads: Sequence[Record], training: Sequence[tuple[float, float]], since: float
) -> np.ndarray:
    """float64 [requests, 6]: tokens, tokens x mean running, 1, prefilled tokens; seconds beside training, during it."""
    starts = np.array([r.start for r in requests])
    dones = np.array([r.done for r in requests])
    running = StepFunction(np.concatenate([starts, dones]), np.repeat([1.0, -1.0], len(requests)))
    prefilled = StepFunction(starts, np.array([float(r.fresh) for r in requests]))
    edges = [edge for pair in training for edge in pair]
    busy = StepFunction(np.array(edges), np.tile([1.0, -1.0], len(training)))
    loading = StepFunction(
        np.array([t for load in loads for t in (load["sent"], load["done"])]), np.tile([1.0, -1.0], len(loads))
    )
    refilled = StepFunction(*_refills(requests, loads))
    rows = []
    for r in requests:
        seconds = r.done - r.start
        if r.start < since or not r.tokens or seconds <= 0:
            continue
        # What began at the same moment counts, what ended it does not.
        prompts = prefilled.step(r.done) - prefilled.step(r.start, before=True)
        prompts += refilled.step(r.done) - refilled.step(r.start)
        mean_running = running.area(r.start, r.done) / seconds
        trained = busy.area(r.start, r.done)
        rest = max(0.0, seconds - trained - loading.area(r.start, r.done))
        rows.append((r.tokens, r.tokens * mean_running, 1.0, prompts, rest, trained))
    return np.array(rows, float).reshape(-1, 6)


def _refills(requests: Sequence[_Request], loads: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """When how many tokens were prefilled again: those of running requests, after each load."""
    times = np.array(sorted(load["done"] for load in loads))
    tokens = np.zeros(len(times))
    for i, time in enumerate(times):
        for r in requests:
            if r.start < time < r.done:
                tokens[i] += r.prompt + r.tokens * (time - r.start) / (r.done - r.start)
    return times, tokens


def _solve(rows: np.ndarray) -> tuple[np.ndarray, float]:
    """Coefficients of the first four columns, and the slowdown, that explain the seconds best."""
    columns, rest, trained = rows[:, :4].copy(), rows[:, 4], rows[:, 5]
    running = columns[:, 1] / columns[:, 0]
    if columns[:, 0].std() < ALIKE * columns[:, 0].mean():
        columns[:, 2] = 0.0
    if running.std() < ALIKE * running.mean():
        columns[:, 1] = 0.0
    scales = np.maximum(np.abs(columns).mean(0), 1e-12)
    best = (np.inf, np.zeros(4), 1.0)
    for slowdown in SLOWDOWNS if trained.any() and rest.any() else (1.0,):
        work = rest + trained / slowdown
        stretch = (rest + trained) / np.maximum(work, 1e-12)
        found, error = scipy.optimize.nnls(columns / scales * stretch[:, None], work * stretch)
        if error < best[0]:
            best = (error, found / scales, float(slowdown))
    return best[1], best[2]

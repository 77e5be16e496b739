"""Whole runs of the trainer on real servers: they learn, and they outlive what happens to their engines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import rlx.train
from rlx.metrics.ledger import Ledger
from rlx.rollout import engine_state, servers
from rlx.run import Run
from tests import tiny_run
from tests.sglang.conftest import ADMIN_KEY, API_KEY, PYTHON
from tests.sglang.faulty_proxy import FaultyProxy
from tests.sglang.trainer import load_base

pytestmark = pytest.mark.sglang

WAIT_S = 400.0  # for an engine to be back: a server starts anew on two busy cores
CHANGES = {
    "engine__kind": "sglang",
    "inference__device": "cpu",
    "inference__python": PYTHON,
    "inference__distributed_backend": "gloo",
    "inference__health_every_s": 1.0,
    "inference__health_timeout_s": 10.0,
    "producer__backoff_s": 0.5,
    "metrics__tensorboard": False,
    "checkpoint__every": 100,
}
OVERLAPPED = {"producer__max_policy_lag": 2, "producer__sessions_in_flight": 48}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return tiny_run.write(tmp_path_factory.mktemp("training"))


@pytest.fixture
def given(two_servers, recipe, monkeypatch) -> dict[str, object]:
    """The two servers of the session, by address, with the recipe's base model."""
    monkeypatch.setenv("RLX_TEST_KEY", API_KEY)
    monkeypatch.setenv("RLX_TEST_ADMIN_KEY", ADMIN_KEY)
    load_base(two_servers, str(recipe.parent / "model"))
    return {
        "inference__addresses": tuple(live.url for live in two_servers),
        "inference__api_key_variable": "RLX_TEST_KEY",
        "inference__admin_key_variable": "RLX_TEST_ADMIN_KEY",
    }


def train(recipe: Path, name: str, script: dict[int, Callable[[Run], None]] | None = None, **changes) -> Path:
    """A run to its end, in this process. script: what happens after the update of a number, while it waits."""
    after = rlx.train.stop_where_hopeless

    def happen(run: Run, groups) -> None:
        if script and run.progress.update in script:
            script[run.progress.update](run)
        after(run, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlx.train, "stop_where_hopeless", happen)
        arguments = tiny_run.arguments(recipe, **{**CHANGES, "run__name": name, **changes})
        assert rlx.train.main(["rlx train", *arguments]) == 0
    return recipe.parent / "runs" / name


def books(run: Path) -> Ledger:
    ledger = Ledger()
    ledger.set_state(json.loads((run / "ledger.json").read_text()))
    ledger.check()
    return ledger


def timing(run: Path, kind: str, engine: str) -> list[dict]:
    return [r for r in tiny_run.records(run / "timing.jsonl") if r["kind"] == kind and r["engine"] == engine]


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {WAIT_S} s"
        time.sleep(0.1)


def out(run: Run, index: int) -> float:
    """Waits until the engine of this number is out of service, whoever noticed first: its supervisor, its health or a
    request. A moment from which on nothing is sent to it."""
    member = run.serving.fleet.members[index]
    until(lambda: not member.in_service, "the failure is noticed")
    return run.preemption.call(time.monotonic)  # on the loop, behind what was under way to be sent


def all_back(run: Run) -> None:
    """Waits until both engines serve, and then they serve the current version."""
    fleet = run.serving.fleet
    until(lambda: len(fleet.in_service) == 2, "both engines in service")
    assert [member.engine.version for member in fleet.members] == [fleet.version] * 2


def check_books(run: Path) -> None:
    """Every token is in one bin, and every trained one was written by a version within the lag."""
    ledger = books(run)
    assert ledger["trained"].tokens > 0
    records = [r for r in tiny_run.records(run / "metrics.jsonl") if "offpolicy/age_max" in r]
    assert max(r["offpolicy/age_max"] for r in records) <= 2
    lost = [r for r in tiny_run.records(run / "samples.jsonl") if r["phase"] == "train" and not r["logprobs"]]
    assert lost == []


# ----------------------------------------------------------------------------------------------------- runs that learn


@pytest.mark.parametrize(
    "name, changes",
    [
        ("disk", {"inference__transport": "disk", "audit__at_start": True, "audit__every": 2}),
        ("adapter", {"inference__weights": "adapter", "inference__max_lora_rank": 8, "inference__transport": "tensor"}),
        ("distributed", {"inference__transport": "distributed", "lora__rank": 0, "learner__learning_rate": 1e-3}),
        ("overlapped", {"inference__transport": "tensor", **OVERLAPPED}),
    ],
)
def test_a_run_learns_from_what_servers_write(recipe, given, name, changes):
    run = train(recipe, name, learner__updates=4, **given, **changes)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["version"] == 4
    assert books(run)["evaluated"].tokens
    samples = [s for s in tiny_run.samples(run) if s["phase"] == "train"]
    versions = {version for s in samples for version, _, _ in s["versions"]}
    assert max(versions) >= 1
    if "producer__max_policy_lag" not in changes:
        assert versions == {0, 1, 2, 3}
        # trainer and server agree on every token
        records = tiny_run.records(run / "metrics.jsonl")
        assert max(r["offpolicy/logprob_gap_max"] for r in records if "offpolicy/logprob_gap_max" in r) < 1e-4


def test_requests_go_to_a_router_and_weights_to_the_servers_behind_it(recipe, given):
    with FaultyProxy(*given["inference__addresses"]) as router:
        run = train(recipe, "router", learner__updates=3, inference__router=router.url, **given, **OVERLAPPED)
    loads = [r for r in tiny_run.records(run / "timing.jsonl") if r["kind"] == "load"]
    assert {r["engine"] for r in loads} == {router.url}
    check_books(run)


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_killed_and_a_stopped_server_come_back_with_the_current_weights(recipe):
    """SIGKILL of one server, SIGSTOP of the other, and queues that are full all the time."""
    moments: dict[str, float] = {}

    def pid(run: Run, index: int) -> int:
        return engine_state.read(run.directory / "engines.json").servers[index].process.pid

    def kill(run: Run) -> None:
        os.kill(pid(run, 0), signal.SIGKILL)
        moments["killed"] = out(run, 0)

    def stop(run: Run) -> None:
        all_back(run)  # the killed one; one engine made the updates since
        stopped = pid(run, 1)
        servers.signal_group(stopped, signal.SIGSTOP)
        moments["stopped"] = out(run, 1)
        servers.signal_group(stopped, signal.SIGCONT)

    queues = ("--max-running-requests=4", "--max-queued-requests=4")
    run = train(
        recipe,
        "faults",
        {2: kill, 4: stop, 6: all_back},
        learner__updates=12,
        inference__count=2,
        inference__arguments=queues,
        **OVERLAPPED,
    )
    assert json.loads((run / "summary.json").read_text())["updates"] == 12
    check_books(run)
    state = engine_state.read(run / "engines.json")
    assert not any(server.process.alive for server in state.servers)
    for server, moment in zip(state.servers, ("killed", "stopped"), strict=True):
        back = min(r["done"] for r in timing(run, "load", server.url) if r["done"] > moments[moment])
        between = [r for r in timing(run, "response", server.url) if moments[moment] < r["sent"] < back]
        assert all(r["tokens"] == 0 for r in between), "it served before it had the current weights"
        assert [r for r in timing(run, "response", server.url) if r["sent"] > back and r["tokens"]]


def test_cut_connections_full_queues_and_errors_cost_no_run(recipe, given):
    """The faults that a real server cannot be made to have, by a proxy before each of the two. Each ejects its engine
    for a reason of its own: a cut one is missed by whoever asks first; a full queue is waited for."""
    addresses, updates = given["inference__addresses"], 25
    reasons = {"cut": ("connection", "health", "load"), "errors": ("status_500",), "nonsense": ("malformed",)}
    unchecked: list[tuple[str, int]] = []  # a fault, and the ejections for its reasons before it
    assert isinstance(addresses, tuple)
    with FaultyProxy(addresses[0]) as first, FaultyProxy(addresses[1]) as second:
        faults = [(first, "cut"), (second, "errors"), (first, "full"), (second, "nonsense")]

        def next_fault(run: Run) -> None:
            """The next one, as soon as the last one was met and is over; until it was met the run goes on with it."""
            if first.waits or second.waits:
                return
            until(lambda: first.mode == second.mode == "through", "the fault is over")
            ejected = run.serving.fleet.ejected
            if unchecked:
                mode, before = unchecked.pop()
                until(lambda: count(ejected, mode) > before, f"an engine is ejected for {reasons[mode]}")
            all_back(run)
            if faults:
                proxy, mode = faults.pop(0)
                if mode in reasons:
                    unchecked.append((mode, count(ejected, mode)))
                proxy.fail(mode)

        def count(ejected: Counter[str], mode: str) -> int:
            return sum(ejected[reason] for reason in reasons[mode])

        changes = {**given, "inference__addresses": (first.url, second.url)}
        script = dict.fromkeys(range(1, updates), next_fault)
        run = train(recipe, "cut", script, learner__updates=updates, **changes, **OVERLAPPED)
        assert (first.faults, second.faults) == (["cut", "full"], ["errors", "nonsense"])
        assert first.mode == second.mode == "through"
    assert not unchecked
    check_books(run)
    assert not any("engine/ejections_overloaded" in record for record in tiny_run.records(run / "metrics.jsonl"))

"""Training with generation beside it: ages, versions, books, and what a stop or a kill leaves."""

import json
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from rlx import assemble, train
from rlx.checkpoint import Checkpoints
from rlx.interrupt import EXIT_PREEMPTED
from rlx.learner.score import score_sequences
from rlx.metrics.ledger import Ledger
from tests import tiny_run

pytestmark = pytest.mark.slow

LAG = 2
CHANGES = {
    "learner__updates": 6,
    "producer__max_policy_lag": LAG,
    "producer__sessions_in_flight": 48,
    "checkpoint__every": 1,
    "checkpoint__keep": 100,
    "metrics__tensorboard": False,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("overlapped"))


def arguments(recipe: Path, name: str, **changes) -> list[str]:
    return tiny_run.arguments(recipe, **{**CHANGES, "run__name": name, **changes})


@pytest.fixture(scope="module", params=["refresh", "drain", "barrier"])
def run(request, recipe) -> Path:
    name = request.param
    assert train.main(["rlx train", *arguments(recipe, name, producer__publication=name)]) == 0
    return recipe.parent / "runs" / name


def trained(run: Path) -> list[dict]:
    return [s for s in tiny_run.samples(run) if s["phase"] == "train"]


def ledger(run: Path) -> Ledger:
    books = Ledger()
    books.set_state(json.loads((run / "ledger.json").read_text()))
    return books


def test_ages_stay_within_the_lag_and_some_are_above_zero(run):
    records = [r for r in tiny_run.records(run / "metrics.jsonl") if "offpolicy/age_max" in r]
    assert len(records) == CHANGES["learner__updates"]
    ages = [r["offpolicy/age_max"] for r in records]
    assert 0 < max(ages) <= LAG


def test_every_token_is_in_one_bin(run):
    books = ledger(run)
    books.check()
    assert books["trained"].tokens
    assert books["evaluated"].tokens
    written = sum(len(s["logprobs"]) for s in trained(run))
    ended = sum(books[name].tokens for name in ("trained", "no_signal", "masked", "too_long"))
    failed = books["failed"].tokens  # of a group that is still buffered: booked at once, recorded with its group
    assert ended <= written <= ended + failed
    others = ("evaluated", "stale", "in_flight", "buffered")
    assert books.total.tokens == ended + failed + sum(books[name].tokens for name in others)


def test_no_group_is_trained_twice(run):
    keys = [(s["group"], s["index"]) for s in trained(run)]
    assert len(keys) == len(set(keys))


def gaps(recipe: Path, run: Path, samples: list[dict]) -> list[float]:
    """Largest |recorded - recomputed| log-prob of each sample, every token under the weights of its own version."""
    config = tiny_run.config(recipe, **{**CHANGES, "run__name": run.name})
    model = assemble.load_model(config)
    step = assemble.step_config(config, model.arch, 8)
    checkpoints = Checkpoints(run / "checkpoints", keep=None)
    worst = [0.0] * len(samples)
    for version in sorted({v for s in samples for v, _, _ in s["versions"]}):
        state = checkpoints.restore(tiny_run.fresh_state(config, model), version).state
        assert int(state.version) == version
        scored = score_sequences(
            step, state.trainable, model.params, [np.array(s["tokens"]) for s in samples], config.learner.row_tokens
        )
        for i, (sample, values) in enumerate(zip(samples, scored, strict=True)):
            for _, start, end in (span for span in sample["versions"] if span[0] == version):
                written = np.array(sample["logprobs"])[start - sample["prompt_tokens"] : end - sample["prompt_tokens"]]
                worst[i] = max(worst[i], float(np.abs(written - values[start:end]).max()))
    checkpoints.close()
    return worst


def test_a_token_is_of_the_version_that_is_recorded(recipe, run):
    samples = trained(run)
    assert len({v for s in samples for v, _, _ in s["versions"]}) > 2
    assert max(gaps(recipe, run, samples)) < 1e-4


def test_one_mislabelled_token_is_found(recipe, run):
    samples = trained(run)
    newest = max(v for s in samples for v, _, _ in s["versions"])
    sample = next(s for s in samples if s["versions"][-1][0] == newest)
    version, start, end = sample["versions"][-1]
    lie = {**sample, "versions": [*sample["versions"][:-1], [version, start, end - 1], [0, end - 1, end]]}
    assert gaps(recipe, run, [{**sample, "versions": [v for v in sample["versions"] if v[1] < v[2]]}])[0] < 1e-4
    assert gaps(recipe, run, [{**lie, "versions": [v for v in lie["versions"] if v[1] < v[2]]}])[0] > 1e-4


def test_what_the_run_took_is_recorded(run):
    kinds = {r["kind"] for r in tiny_run.records(run / "timing.jsonl")}
    assert kinds == {"response", "load", "session", "update"}


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_goes_on(recipe, kind):
    """Stopped: nothing is lost. Killed: what is beyond the last checkpoint and the journal is booked as lost."""
    name = f"stopped{kind}"
    command = arguments(recipe, name, learner__updates=30, checkpoint__every=4, checkpoint__keep=2)
    run = recipe.parent / "runs" / name
    process = tiny_run.start("rlx.train", *command)
    deadline = time.monotonic() + 300
    while process.poll() is None and not (
        (run / "metrics.jsonl").exists()
        and any(r.get("update", 0) >= 6 for r in tiny_run.records(run / "metrics.jsonl"))
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(kind)
    process.communicate(timeout=400)
    assert process.returncode == (EXIT_PREEMPTED if kind == signal.SIGTERM else -kind)
    before = json.loads((run / "ledger.json").read_text())["generated"]

    assert train.main(["rlx train", *command]) == 0
    books = ledger(run)
    books.check()
    assert books.total.tokens >= before[0]
    keys = [(s["group"], s["index"]) for s in trained(run)]
    assert len(keys) == len(set(keys))
    updates = [r["update"] for r in tiny_run.records(run / "metrics.jsonl") if "policy/loss" in r]
    assert updates == sorted(set(updates))
    assert updates[-1] == 30
    if kind == signal.SIGTERM:
        assert books["lost"].tokens == 0
    assert jax.tree.all(
        jax.tree.map(
            lambda x: bool(np.isfinite(x).all()),
            tiny_run.newest_checkpoint(tiny_run.config(recipe, **{**CHANGES, "run__name": name}))[1].state.trainable,
        )
    )

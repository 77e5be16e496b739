"""`rlx train` on sessions with a tool: several turns in what is recorded, trained and resumed, in both loops."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from rlx import train
from rlx.envs.chat import load_chat_tokenizer
from rlx.metrics.ledger import Ledger
from tests import tiny_run, tiny_tools

UPDATES = 2
CHANGES = {"learner__updates": UPDATES, "metrics__tensorboard": False, "checkpoint__every": 1}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_tools.write(tmp_path_factory.mktemp("tools"))


def arguments(recipe: Path, name: str, **changes) -> list[str]:
    return tiny_run.arguments(recipe, **{**CHANGES, "run__name": name, **changes})


def run_to_the_end(recipe: Path, name: str, **changes) -> Path:
    assert train.main(["rlx train", *arguments(recipe, name, **changes)]) == 0
    return recipe.parent / "runs" / name


@pytest.fixture(scope="module")
def synchronous(recipe):
    return run_to_the_end(recipe, "synchronous")


@pytest.fixture(scope="module")
def samples(synchronous):
    return tiny_run.samples(synchronous)


def turns(sample) -> int:
    """Stretches that the policy wrote."""
    written = np.zeros(len(sample["tokens"]) + 1, bool)
    for _, start, end in sample["versions"]:
        written[start:end] = True
    return int((written[1:] & ~written[:-1]).sum())


def test_sessions_have_turns_and_end_for_reasons(samples):
    assert {turns(s) for s in samples} >= {1, 2}
    reasons = {s["stop_reason"] for s in samples}
    assert {"stop", "length"} <= reasons
    told = [s for s in samples if "\n[1] 7\n" in s["response"]]
    assert told
    assert all(turns(s) == 2 + s["response"].count("\n[2] ") for s in told if s["stop_reason"] == "stop")


def test_what_is_recorded_is_the_conversation(recipe, samples):
    chat = load_chat_tokenizer(str(recipe.parent / "model"), "", "")
    for sample in samples:
        whole = chat.written_out(np.array(sample["tokens"], np.int32))
        assert whole.startswith("<|im_start|>system\n")
        assert whole.count("<|im_start|>assistant\n") == turns(sample)


def test_the_trainer_means_what_the_engine_wrote(synchronous):
    for record in tiny_run.records(synchronous / "metrics.jsonl"):
        if "policy/loss" in record:
            assert record["offpolicy/logprob_gap_max"] < 1e-3
            assert record["response/stop_reason_stop"] > 0


def test_the_books_balance(synchronous):
    books = Ledger()
    books.set_state(json.loads((synchronous / "ledger.json").read_text()))
    books.check()
    assert books["trained"].samples == UPDATES * 4 * 4
    assert books["failed"].samples == 0


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_killed_run_ends_as_one_that_was_not(recipe, synchronous, phase):
    name = f"killed_{phase}"
    command = ["tests.interrupted", "SIGKILL", phase, "4" if phase == "rollout" else "2"]
    process = tiny_run.start(*command, *arguments(recipe, name))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    again = run_to_the_end(recipe, name)
    assert tiny_run.samples(again) == tiny_run.samples(synchronous)
    for file in ("ledger.json", "adapter/adapter_model.safetensors"):
        assert (again / file).read_bytes() == (synchronous / file).read_bytes()


@pytest.mark.slow
def test_sessions_go_on_beside_training_and_after_a_stop(recipe):
    changes = {"producer__max_policy_lag": 2, "producer__sessions_in_flight": 24, "learner__updates": 3}
    process = tiny_run.start("tests.interrupted", "SIGTERM", "update", "2", *arguments(recipe, "overlapped", **changes))
    process.communicate()
    assert process.returncode == 75
    run = run_to_the_end(recipe, "overlapped", **changes)
    books = Ledger()
    books.set_state(json.loads((run / "ledger.json").read_text()))
    books.check()
    assert books["lost"].tokens == 0
    found = [s for s in tiny_run.samples(run) if s["phase"] == "train"]
    assert {turns(s) for s in found} >= {1, 2}
    assert len({(s["group"], s["index"]) for s in found}) == len(found)


@pytest.mark.slow
def test_a_session_at_its_token_limit_shows_as_such(recipe):
    """In metrics, samples and the ledger, with the grade of its work so far."""
    chat = load_chat_tokenizer(str(recipe.parent / "model"), "", "")
    tight = run_to_the_end(recipe, "tight", producer__session_token_limit=200, learner__updates=1)
    found = tiny_run.samples(tight)
    limited = [s for s in found if s["stop_reason"] == "session_limit" and s["phase"] == "train"]
    assert limited
    for sample in limited:
        assert sample["grade"]["outcome"] == "graded"
        assert "no answer was given" in sample["grade"]["detail"]
        assert chat.written_out(np.array(sample["tokens"][-1:], np.int32)) == "<|im_end|>"
    (record,) = [r for r in tiny_run.records(tight / "metrics.jsonl") if "policy/loss" in r]
    train_samples = [s for s in found if s["phase"] == "train"]
    assert record["response/stop_reason_session_limit"] == len(limited) / len(train_samples)
    books = Ledger()
    books.set_state(json.loads((tight / "ledger.json").read_text()))
    assert books.ended["session_limit"].samples >= len(limited)

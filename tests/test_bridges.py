"""Audits of a run's servers, which are stubs here: off the event loop, once for all, and fatal only where one lies."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx import audit_engine, bridges
from rlx.audit_engine import AuditFailed, Reference
from rlx.config.errors import ConfigError
from rlx.models.hf import read_architecture
from rlx.probing import Policy
from rlx.rollout.engine import EngineError
from tests import tiny_model, tiny_run

TEXTS = [np.arange(5, 15, dtype=np.int32)]
POLICY = Policy("published", tiny_model.ARCH, tiny_model.params(), 1)
SAID = -np.ones(len(TEXTS[0]) - 1, np.float32)


@dataclasses.dataclass
class Engine:
    """Says `said` of every text; raises `fails` instead, where it is one."""

    name: str
    said: np.ndarray = dataclasses.field(default_factory=lambda: SAID)
    fails: EngineError | None = None

    @property
    def http(self) -> Engine:
        return self

    async def get(self, path: str) -> dict[str, Any]:
        return {"device": "cuda", "tp_size": 1}

    async def served(self) -> Any:
        if self.fails is not None:
            raise self.fails
        return SimpleNamespace(label="1")

    async def score(self, texts: Any, start: int) -> list[Any]:
        return [SimpleNamespace(logprobs=self.said) for _ in texts]


class Fleet:
    def __init__(self, engines: list[Engine]):
        self.members = [SimpleNamespace(engine=engine, versions=[1], in_service=True) for engine in engines]
        self.ejected: list[tuple[str, str]] = []

    def eject(self, member: Any, reason: str, said: str) -> None:
        self.ejected.append((member.engine.name, reason))


@pytest.mark.parametrize("weights", ["adapter", "full"])
def test_adapters_of_models_whose_served_layout_is_not_known_are_refused_at_the_start(tmp_path, weights):
    changes = {"engine__kind": "sglang", "inference__addresses": ("http://127.0.0.1:9",), "inference__weights": weights}
    config = tiny_run.config(tiny_run.write(tmp_path), lora__targets=("q_proj",), **changes)
    bridges.check_adapters(config, SimpleNamespace(arch=tiny_model.ARCH))
    experts = SimpleNamespace(arch=read_architecture(tiny_run.ROOT / "tests" / "fixtures" / "qwen3_moe"))
    if weights == "full":
        bridges.check_adapters(config, experts)
    else:
        with pytest.raises(ConfigError, match=r"inference\.weights = 'adapter'.*qwen3_moe.*'full'"):
            bridges.check_adapters(config, experts)


@pytest.fixture
def config(tmp_path):
    return tiny_run.config(tiny_run.write(tmp_path))


@pytest.fixture
def audit(config, monkeypatch):
    """Audits these engines; the trainer's log-probs are `SAID`."""
    monkeypatch.setattr(audit_engine, "logprobs", lambda policy, text: SAID)
    monkeypatch.setattr(bridges, "_reference", lambda *_: Reference(POLICY, None, TEXTS))

    def run(engines: list[Engine], fleet: Fleet) -> None:
        asyncio.run(bridges.audit(config, None, fleet, engines, None, 1))

    return run


def test_an_engine_that_cannot_be_asked_is_ejected_and_the_others_are_audited(audit):
    engines = [Engine("dead", fails=EngineError("no connection", reason="connection")), Engine("well")]
    fleet = Fleet(engines)
    audit(engines, fleet)
    assert fleet.ejected == [("dead", "audit")]
    with pytest.raises(AuditFailed, match="wrong"):
        audit([engines[0], Engine("wrong", said=SAID + 1)], fleet)


def test_behind_a_router_the_router_is_ejected(audit):
    fleet = Fleet([Engine("router")])
    audit([Engine("dead", fails=EngineError("no connection", reason="connection"))], fleet)
    assert fleet.ejected == [("router", "audit")]


def test_an_engine_that_was_restarted_meanwhile_is_not_held_to_it(audit):
    wrong = Engine("wrong", said=SAID + 1)
    fleet = Fleet([wrong])
    fleet.members[0].in_service = False
    audit([wrong], fleet)
    assert fleet.ejected == []


def test_an_audit_leaves_the_event_loop_alone_and_computes_once(monkeypatch):
    went_on, asked = threading.Event(), []

    def slow(policy, text):
        asked.append(went_on.wait(300))
        return SAID

    monkeypatch.setattr(audit_engine, "logprobs", slow)

    async def main():
        asyncio.get_running_loop().call_later(0.01, went_on.set)
        reference = Reference(POLICY, None, TEXTS)
        return [await audit_engine.audit_engine(Engine(name), reference) for name in "ab"]

    assert all(found.ok for found in asyncio.run(main()))
    assert asked == [True]

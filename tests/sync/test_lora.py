"""Adapters are staged, sent, retired and cleared away; a stub takes the commands that a server would get."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
from flax import traverse_util

from rlx.config.schema import LoraConfig
from rlx.models.lora import adapter_specs
from rlx.rollout.engine import EngineError
from rlx.sync.lora import AdapterBridge
from tests import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:adapters are not checked")

CONFIG = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",))


def adapter(seed: int) -> Any:
    flat = traverse_util.flatten_dict(adapter_specs(tiny_model.ARCH, CONFIG))
    filled = {path: jnp.full(spec.shape, 0.01 * (seed + 1), jnp.float32) for path, spec in flat.items()}
    return traverse_util.unflatten_dict(filled)


@dataclasses.dataclass
class Stub:
    """Keeps the names that are loaded, as a server does. forgets: those that it lost when it was started again."""

    forgets: set[str] = dataclasses.field(default_factory=set)
    loaded: list[str] = dataclasses.field(default_factory=list)
    asked: list[tuple[str, dict[str, Any], float]] = dataclasses.field(default_factory=list)

    async def command(self, path: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        self.asked.append((path, body, timeout_s))
        if path == "/unload_lora_adapter":
            if body["lora_name"] in self.forgets:
                raise EngineError("no such adapter", reason="refused")
            self.loaded.remove(body["lora_name"])
        else:
            self.loaded.append(body["lora_name"])
        return {}


def bridge(directory, send="disk", **options) -> AdapterBridge:
    return AdapterBridge(directory, tiny_model.ARCH, CONFIG, "base", send, probe=None, **options)


def directories(path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_version_below_those_of_an_earlier_process_is_staged(tmp_path):
    async def main():
        for version in (9, 10, 11):
            await bridge(tmp_path).prepare(adapter(version), version)
        resumed = bridge(tmp_path, keep=1)
        await resumed.link()(Stub(), adapter(4), 4)

    asyncio.run(main())
    assert directories(tmp_path) == ["a00000004", "a00000011"]


def test_nothing_is_left_when_a_run_ends(tmp_path):
    async def main():
        made, stubs = bridge(tmp_path), [Stub(), Stub()]
        links = [made.link() for _ in stubs]
        for version in (1, 2, 3):
            for link, stub in zip(links, stubs, strict=True):
                await link(stub, adapter(version), version)
        assert [len(stub.loaded) for stub in stubs] == [3, 3]
        lost = stubs[1].loaded[0]
        stubs[1].forgets.add(lost)
        await made.close()
        return stubs, lost

    stubs, lost = asyncio.run(main())
    assert [stub.loaded for stub in stubs] == [[], [lost]]
    assert directories(tmp_path) == []


@pytest.mark.parametrize("send", ["disk", "tensor"])
def test_a_load_has_the_time_and_the_copies_that_it_was_given(tmp_path, send):
    async def main():
        stub = Stub()
        await bridge(tmp_path, send, ranks=2, timeout_s=1234.0).link()(stub, adapter(1), 1)
        return stub.asked

    ((_, body, timeout_s),) = asyncio.run(main())
    assert timeout_s == 1234.0
    if send == "tensor":
        first, second = body["serialized_named_tensors"]
        assert first == second


@pytest.mark.parametrize("reason", ["timeout", "connection"])
def test_an_adapter_whose_load_lost_its_answer_does_not_stay(tmp_path, reason):
    """Unloaded at once where the server answers, else before the next load."""

    class Lossy(Stub):
        lost, away = 0, False

        async def command(self, path: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
            if self.away:
                raise EngineError("no answer", reason=reason)
            answer = await super().command(path, body, timeout_s=timeout_s)
            if path != "/unload_lora_adapter" and self.lost:
                self.lost -= 1
                self.away = self.lost == 0
                raise EngineError("no answer", reason=reason)
            return answer

    async def main():
        stub, left = Lossy(), []
        link = bridge(tmp_path).link()
        stub.lost = 2
        for _ in range(2):  # after the second the server is away for a while
            with pytest.raises(EngineError, match="no answer"):
                await link(stub, adapter(1), 1)
            left.append(len(stub.loaded))
        stub.away = False
        name = await link(stub, adapter(1), 1)
        return left, stub.loaded, name

    left, loaded, name = asyncio.run(main())
    assert left == [0, 1]
    assert loaded == [name]


def test_a_load_that_was_refused_leaves_nothing_to_unload(tmp_path):
    class Refusing(Stub):
        async def command(self, path: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
            self.asked.append((path, body, timeout_s))
            raise EngineError("no", reason="bad_request")

    async def main():
        stub, link = Refusing(), bridge(tmp_path).link()
        for _ in range(2):
            with pytest.raises(EngineError):
                await link(stub, adapter(1), 1)
        return [path for path, _, _ in stub.asked]

    assert asyncio.run(main()) == ["/load_lora_adapter", "/unload_lora_adapter"] * 2


def test_servers_whose_adapters_nothing_checks_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="adapters are not checked"):
        bridge(tmp_path)

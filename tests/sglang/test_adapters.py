"""LoRA adapters as publications to two real servers: exact, a name a version, probed before they are used."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orjson
import pytest
from flax import traverse_util

from rlx.config.schema import LoraConfig
from rlx.models.lora import adapter_scale, adapter_specs
from rlx.models.peft import WEIGHTS_FILE, save_adapter
from rlx.rollout.engine import EngineError
from rlx.sync.lora import AdapterBridge, Probe, file_checksums
from rlx.sync.manifest import StagingError
from tests import tiny_model
from tests.sglang.test_transports import TOLERANCE
from tests.sglang.trainer import (
    ARCH,
    PATIENCE_S,
    TEXTS,
    differences,
    logprobs,
    served_logprobs,
    with_servers,
    write_along,
)

pytestmark = pytest.mark.sglang

CONFIG = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
BASE = tiny_model.params(0)  # of the servers' checkpoint


def adapter(seed: int):
    rng = np.random.default_rng(seed)
    flat = traverse_util.flatten_dict(adapter_specs(ARCH, CONFIG))
    drawn = {path: jnp.asarray(0.3 * rng.normal(size=spec.shape), jnp.float32) for path, spec in flat.items()}
    return traverse_util.unflatten_dict(drawn)


def expected(weights):
    return [logprobs(BASE, tokens, weights, adapter_scale(CONFIG)) for tokens in TEXTS]


def bridge_to(directory, server, send, keep=8):
    probe = Probe(TEXTS, expected, ARCH.vocab_size, TOLERANCE)
    return AdapterBridge(directory, ARCH, CONFIG, server.model_path, send, probe=probe, keep=keep)


async def difference(http, name, weights):
    served = [await served_logprobs(http, tokens, name) for tokens in TEXTS]
    return max(float(np.abs(a - b).max()) for a, b in zip(served, expected(weights), strict=True))


async def with_base(http, server):
    body = {"model_path": server.model_path, "weight_version": "0", "flush_cache": True}
    await http.command("/pause_generation", {"mode": "retract"})
    await http.command("/update_weights_from_disk", body)
    await http.command("/continue_generation", {})


@pytest.mark.parametrize("send", ["disk", "tensor"])
def test_two_servers_serve_each_version_under_its_name(two_servers, tmp_path, send):
    async def main(*https):
        bridge, found, names = bridge_to(tmp_path / "a", two_servers[0], send, keep=2), [], []
        links = [bridge.link() for _ in https]
        for http, server in zip(https, two_servers, strict=True):
            await with_base(http, server)
        for version in (1, 2, 3, 4):
            names.append([await link(http, adapter(version), version) for link, http in zip(links, https, strict=True)])
            found += [await difference(http, n, adapter(version)) for http, n in zip(https, names[-1], strict=True)]
        # Requests that began with the version before go on with it.
        found.append(await difference(https[0], names[2][0], adapter(3)))
        base = await differences(https[0], BASE)
        return found, base, names

    found, base, names = with_servers(two_servers, main)
    assert max(found) < TOLERANCE
    assert base < TOLERANCE
    assert len({name for pair in names for name in pair}) == 8


def _scaled(staged, directory):
    return _rewritten(staged, directory, lambda p: jax.tree.map(lambda x: 1.2 * x, p))


def _zero(staged, directory):
    return _rewritten(staged, directory, lambda p: jax.tree.map(jnp.zeros_like, p))


def _stale(staged, directory):
    return _rewritten(staged, directory, lambda p: adapter(1))


def _layers_swapped(staged, directory):
    return _rewritten(staged, directory, lambda p: jax.tree.map(lambda x: x[::-1], p))


def _rewritten(staged, directory, change):
    shutil.rmtree(directory, ignore_errors=True)
    save_adapter(directory, ARCH, jax.device_get(change(adapter(2))), CONFIG, "base")
    return dataclasses.replace(staged, path=directory, checksums=file_checksums(directory))


def _alpha(staged, directory):
    shutil.rmtree(directory, ignore_errors=True)
    save_adapter(directory, ARCH, jax.device_get(adapter(2)), dataclasses.replace(CONFIG, alpha=4.0), "base")
    return dataclasses.replace(staged, path=directory, checksums=file_checksums(directory))


def _copied(staged, directory, change):
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(staged.path, directory)
    change(directory / WEIGHTS_FILE)
    return dataclasses.replace(staged, path=directory)


WEIGHTS = {
    "NaN": lambda p: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), p),
    "of another rank": lambda p: jax.tree.map(lambda x: x[..., :2] if x.shape[-1] == 4 else x, p),
    "of another tree": lambda p: {"other": next(iter(p.values()))},
}
FILES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "one byte changed": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"),
    "missing": lambda path: path.unlink(),
}
SENT = {"scaled": _scaled, "zero": _zero, "stale": _stale, "layers swapped": _layers_swapped, "alpha": _alpha}


@pytest.mark.parametrize("send", ["disk", "tensor"])
def test_every_fault_of_an_adapter_is_caught(server, tmp_path, send):
    async def main(http):
        await with_base(http, server)
        bridge = bridge_to(tmp_path / "a", server, send)
        link, table = bridge.link(), {}
        for name, plant in WEIGHTS.items():
            with pytest.raises(StagingError):
                await bridge.prepare(plant(adapter(2)), 2)
            table[name] = "before"
        staged = await bridge.prepare(adapter(2), 2)
        for name, change in FILES.items():
            table[name] = await caught(link, http, _copied(staged, tmp_path / "copy", change))
        for name, plant in SENT.items():
            table[name] = await caught(link, http, plant(staged, tmp_path / "sent"))
        name = await link(http, staged, 2)
        return table, await difference(http, name, adapter(2))

    table, found = with_servers([server], main)
    assert table == dict.fromkeys([*WEIGHTS, *FILES], "before") | dict.fromkeys(SENT, "audit")
    assert found < TOLERANCE


async def caught(link, http, staged):
    try:
        await link(http, staged, staged.version)
    except EngineError as error:
        return {"staging": "before", "probe": "audit"}.get(error.reason, f"{error.reason}: {error}")
    return "not caught"


def test_a_request_goes_on_under_the_adapter_that_it_began_with(server, tmp_path):
    async def main(http):
        await with_base(http, server)
        bridge = bridge_to(tmp_path / "a", server, "tensor")
        link = bridge.link()
        first = await link(http, adapter(1), 1)
        second = await bridge.prepare(adapter(2), 2)
        body = {
            "input_ids": TEXTS[0].tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True},
            "return_logprob": True,
            "lora_path": first,
        }
        # Several, so that they take long enough: the new adapter is there before they end.
        posts = (http.post("/generate", orjson.dumps(body), timeout_s=PATIENCE_S) for _ in range(8))
        running = [asyncio.create_task(post) for post in posts]
        await write_along(http, 16)
        await link(http, second, 2)
        unfinished = not any(task.done() for task in running)
        return unfinished, [orjson.loads(await task) for task in running]

    unfinished, (answer, *_) = with_servers([server], main)
    assert unfinished
    tokens = np.concatenate([TEXTS[0], np.array(answer["output_ids"], np.int32)])
    recorded = np.array([triple[0] for triple in answer["meta_info"]["output_token_logprobs"]])
    recomputed = logprobs(BASE, tokens, adapter(1), adapter_scale(CONFIG))[len(TEXTS[0]) - 1 :]
    assert np.abs(recorded - recomputed).max() < TOLERANCE

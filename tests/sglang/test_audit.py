"""`rlx audit --engine` against a real server: what it serves is told from what it should serve."""

from __future__ import annotations

import asyncio
import json

import jax
import numpy as np
import pytest

from rlx import audit
from rlx.audit_engine import AuditFailed, Reference, audit_engine, audit_start, check
from rlx.models.hf import save_params
from rlx.probing import Policy
from rlx.rollout.sglang import SglangEngine, SglangOptions
from rlx.rollout.sglang_http import Server
from rlx.rollout.sglang_requests import Limits
from tests import tiny_model, tiny_tokenizer
from tests.sglang.trainer import PATIENCE_S

pytestmark = pytest.mark.sglang
TEXTS = [np.arange(5, 25, dtype=np.int32), np.arange(200, 160, -2, dtype=np.int32)]


def moved(seed: int, size: float) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + np.float32(size) * rng.normal(size=x.shape).astype("float32"), tiny_model.params()
    )


SERVED = Policy("served", tiny_model.ARCH, tiny_model.params(), 0)
TRAINED = Policy("trained", tiny_model.ARCH, moved(1, 0.03), 0)


def command(server, monkeypatch, capsys, *arguments: str) -> tuple[int, dict]:
    monkeypatch.setenv("RLX_API_KEY", server.api_key)
    monkeypatch.setenv("RLX_ADMIN_API_KEY", server.admin_key)
    status = audit.main(["--engine", server.url, *arguments, "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out.splitlines()[-1])


def with_engine(server, scenario):
    async def main():
        address = Server(server.url, server.api_key, server.admin_key)
        options = SglangOptions(Limits(tiny_model.ARCH.vocab_size, 256), parse_processes=0)

        async def from_disk(http, path, version):
            body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
            await http.command("/update_weights_from_disk", body)

        engine = SglangEngine(address, options, from_disk)
        try:
            return await asyncio.wait_for(scenario(engine), PATIENCE_S)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_the_checkpoint_that_is_served(server, monkeypatch, capsys):
    status, found = command(server, monkeypatch, capsys, "--checkpoint", server.model_path, "--version", "0")
    assert (status, found["ok"], found["problems"]) == (0, True, [])
    assert found["tensors"] == 18
    assert found["logprob_max"] < 1e-4


def test_weights_that_never_arrived(server, tmp_path, monkeypatch, capsys):
    """The engine should serve a trained version, and serves the one that training began with."""
    save_params(tmp_path / "trained", tiny_model.ARCH, TRAINED.params, "float32")
    tiny_tokenizer.build(tmp_path / "trained")
    status, found = command(
        server,
        monkeypatch,
        capsys,
        *("--checkpoint", str(tmp_path / "trained"), "--version", "3", "--initial", server.model_path),
    )
    assert (status, found["nearer"]) == (1, "initial")
    assert found["distance_initial"] < 1e-4 < found["distance_published"]
    assert any("never arrived" in problem for problem in found["problems"])
    assert any("calls its weights '0', not '3'" in problem for problem in found["problems"])
    assert len(found["different"]) == 18


def test_a_published_version_is_nearer_than_the_initial_one(server):
    async def scenario(engine):
        return await audit_engine(engine, Reference(SERVED, TRAINED, TEXTS))

    found = with_engine(server, scenario)
    check(found)
    assert found.nearer == "published"
    assert found.distance_published < 1e-4 < found.distance_initial


def test_one_tensor_that_differs_is_named(server):
    params = tiny_model.params()
    embed = np.array(params["embed"])
    embed[5, 0] += 1e-3
    wrong = Policy("wrong", tiny_model.ARCH, {**params, "embed": jax.numpy.asarray(embed)}, 0)

    async def scenario(engine):
        return await audit_engine(engine, Reference(wrong, None, TEXTS))

    found = with_engine(server, scenario)
    assert found.different == ("model.embed_tokens.weight",)
    with pytest.raises(AuditFailed, match=r"model\.embed_tokens\.weight"):
        check(found)


def test_at_the_start_everything_is_overwritten_and_must_come_back(server):
    async def whole(engine):
        return await audit_start(engine, lambda: engine.load(server.model_path, 0))

    async def nothing():
        return None

    async def never(engine):
        try:
            await audit_start(engine, nothing)
        finally:
            await engine.load(server.model_path, 0)

    assert with_engine(server, whole) == 18
    with pytest.raises(AuditFailed, match="did not arrive"):
        with_engine(server, never)


def test_no_server_cannot_be_told(server, tiny_checkpoint, capsys):
    assert audit.main(["--engine", "http://127.0.0.1:9", "--checkpoint", tiny_checkpoint]) == 2
    assert "no connection" in capsys.readouterr().err

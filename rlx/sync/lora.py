"""Transport `lora`: an adapter a version, from disk or as tensors, beside the base weights that never change.

An engine keeps several adapters, so nothing is paused: running requests end under the adapter that they began with,
new ones name the new adapter. A name is used once: a server may bring an unloaded adapter back from its old directory.
What a server makes of an adapter has no checksum, so it scores given tokens with it before it is put to use.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import struct
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import traverse_util

from rlx.config.schema import LoraConfig
from rlx.models.description import Architecture, Params
from rlx.models.files import read_json
from rlx.models.peft import CONFIG_FILE, WEIGHTS_FILE, save_adapter
from rlx.rollout.engine import EngineError
from rlx.rollout.sglang_http import SglangHttp
from rlx.rollout.sglang_requests import adapter_name, new_rid, score_body
from rlx.rollout.sglang_responses import parse_score
from rlx.sync.manifest import StagingError
from rlx.sync.staging import prune
from rlx.sync.tensors import Leaves, check_finite
from rlx.sync.torch_pickle import tensors_by_name

Send = Literal["disk", "tensor"]
CLOSE_S = 30.0  # for a server to unload what it has of a run that ends
CLEAR_S = 30.0  # for it to unload what nobody can use; one that hangs is asked again before the next load
UNLOAD_S = 3600.0  # for the requests under an adapter to end
ABSENT = ("bad_request", "refused")  # what a server answers that does not have the adapter


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """Tokens whose log-probs tell whether an engine has an adapter.

    sequences: int32 [T] each. expected: the trainer's log-probs of tokens 1 to T - 1 of each, temperature 1, given the
    adapter. tolerance: of their largest difference, nats.
    """

    sequences: tuple[np.ndarray, ...]
    expected: Callable[[Params], Sequence[np.ndarray]]
    vocab_size: int
    tolerance: float


@dataclasses.dataclass(frozen=True, eq=False)
class StagedAdapter:
    """A PEFT directory that is ready to be sent. `expected`: of the probe, () without one."""

    path: Path
    version: int
    checksums: Mapping[str, str]  # of its files
    expected: tuple[np.ndarray, ...]


class AdapterBridge:
    """`rlx.sync.bridge.Bridge` for adapters. `weights` are an adapter's tree.

    Args:
      directory: for the adapters, theirs alone; with send = "disk" on a file system that the engines share.
      base_path: what the adapter was trained on, and the engines serve.
      keep: adapters that stay loaded, and on the disk, for the requests that began with them.
      probe: None checks nothing of what an engine makes of an adapter; a warning says so.
      ranks: of an engine; with send = "tensor" each gets a copy.
      timeout_s: for an engine to load an adapter, and again to answer the probe.
    """

    def __init__(
        self,
        directory: Path,
        arch: Architecture,
        config: LoraConfig,
        base_path: str,
        send: Send,
        *,
        probe: Probe | None,
        keep: int = 8,
        ranks: int = 1,
        timeout_s: float = 600.0,
    ):
        self.directory, self.arch, self.config, self.base_path = directory, arch, config, base_path
        self.send, self.probe, self.keep = send, probe, keep
        self.ranks, self.timeout_s = ranks, timeout_s
        self._links: list[AdapterLink] = []
        self._staging = asyncio.Lock()
        self._staged: tuple[StagedAdapter, Leaves] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        if probe is None:
            said = "adapters are not checked after publications: only a trainer of one process has log-probs to compare"
            warnings.warn(said, stacklevel=2)

    def link(self) -> AdapterLink:
        """The loader of one engine (`rlx.rollout.sglang.Loader`)."""
        self._links.append(AdapterLink(self))
        return self._links[-1]

    async def prepare(self, weights: Any, version: int) -> StagedAdapter:
        """`weights` as a directory; no engine is touched. Raises StagingError, OSError."""
        if isinstance(weights, StagedAdapter):
            return weights
        async with self._staging:
            if self._staged is None or self._staged[0].version != version or self._staged[1].changed(weights):
                self._staged = await asyncio.to_thread(self._stage, weights, version), Leaves(weights)
            return self._staged[0]

    async def close(self) -> None:
        """No adapter stays loaded on a server that answers, and none on the disk."""
        await asyncio.gather(*(link.close() for link in self._links))
        await asyncio.to_thread(prune, self.directory, set(), 0, "a*")

    def _stage(self, adapter: Params, version: int) -> StagedAdapter:
        check_finite(traverse_util.flatten_dict(adapter, sep="/"))
        path = self.directory / f"a{version:08d}"
        if path.exists():  # of an earlier process that came this far
            shutil.rmtree(path)
        try:
            save_adapter(path, self.arch, jax.device_get(adapter), self.config, self.base_path)
        except (ValueError, KeyError) as error:
            raise StagingError(f"the adapter is not one of this model and these settings: {error}") from error
        prune(self.directory, {path}, self.keep + 1, "a*")
        expected = tuple(self.probe.expected(adapter)) if self.probe else ()
        return StagedAdapter(path, version, file_checksums(path), expected)


class AdapterLink:
    """One engine's end: `name = await link(http, weights, version)`."""

    def __init__(self, bridge: AdapterBridge):
        self.bridge = bridge
        self._token = uuid.uuid4().hex[:6]
        self._count = itertools.count()
        self._loaded: deque[str] = deque()  # oldest first
        self._alone = asyncio.Lock()
        self._unsure: list[str] = []  # the server may have them, and no request will name them
        self._unloading: asyncio.Task[None] | None = None
        self._http: SglangHttp | None = None

    async def __call__(self, http: SglangHttp, weights: Any, version: int, /) -> str:
        """The name that requests must give. Raises EngineError where the engine does not have the adapter."""
        try:
            staged = await self.bridge.prepare(weights, version)
            await asyncio.to_thread(check_adapter_files, staged)
        except (StagingError, OSError) as error:
            raise EngineError(f"version {version} is not published: {error}", reason="staging") from error
        async with self._alone:
            name, self._http = f"{adapter_name(version)}-{self._token}{next(self._count)}", http
            await self._clear(http)
            await self._load(http, staged, name)
            self._retire(http)
        return name

    async def close(self) -> None:
        """Unload what is loaded. Requests under it have ended; a server that does not answer is left alone."""
        if self._http is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._unloading is not None:
                    await self._unloading
                await self._clear(self._http)
                while self._loaded:
                    await self._unload_oldest(self._http)

    async def _load(self, http: SglangHttp, staged: StagedAdapter, name: str) -> None:
        path, body = await asyncio.to_thread(_command, self.bridge.send, staged, name, self.bridge.ranks)
        self._unsure.append(name)  # a load that loses its answer may have succeeded
        try:
            await http.command(path, body, timeout_s=self.bridge.timeout_s)
            if self.bridge.probe is not None:
                await check_probe(http, name, self.bridge.probe, staged.expected, self.bridge.timeout_s)
        except BaseException:
            await self._clear(http)
            raise
        self._unsure.remove(name)
        self._loaded.append(name)

    def _retire(self, http: SglangHttp) -> None:
        """Unload the oldest adapter beyond `keep`. It waits for the adapter's requests, so nobody waits for it."""
        if len(self._loaded) > self.bridge.keep and (self._unloading is None or self._unloading.done()):
            self._unloading = asyncio.create_task(self._unload_oldest(http))

    async def _unload_oldest(self, http: SglangHttp) -> None:
        with contextlib.suppress(EngineError):  # a server that restarted does not have it
            await _unload(http, self._loaded.popleft(), UNLOAD_S)

    async def _clear(self, http: SglangHttp) -> None:
        """Unload what no request will name. A server that does not answer is asked again the next time."""
        for name in tuple(self._unsure):
            try:
                await _unload(http, name, CLEAR_S)
            except EngineError as error:
                if error.reason not in ABSENT:
                    return
            self._unsure.remove(name)


def _command(send: Send, staged: StagedAdapter, name: str, ranks: int) -> tuple[str, Mapping[str, Any]]:
    if send == "disk":
        return "/load_lora_adapter", {"lora_name": name, "lora_path": str(staged.path.resolve())}
    content = (staged.path / WEIGHTS_FILE).read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8:start])
    entries.pop("__metadata__", None)
    placed = {n: (e["data_offsets"][0] // 4, tuple(e["shape"])) for n, e in entries.items()}  # adapters are float32
    body = base64.b64encode(tensors_by_name(content[start:], "float32", placed)).decode()
    config = read_json(staged.path / CONFIG_FILE)
    return "/load_lora_adapter_from_tensors", {
        "lora_name": name,
        "config_dict": config,
        "serialized_named_tensors": [body] * ranks,
    }


async def _unload(http: SglangHttp, name: str, timeout_s: float) -> None:
    await http.command("/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)


def file_checksums(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in (CONFIG_FILE, WEIGHTS_FILE)}


def check_adapter_files(staged: StagedAdapter) -> None:
    """Raises StagingError where the directory is not what was staged, OSError where files are missing."""
    changed = [name for name, checksum in file_checksums(staged.path).items() if checksum != staged.checksums[name]]
    if changed:
        raise StagingError(f"{staged.path}: {', '.join(changed)} changed since version {staged.version} was staged")


async def check_probe(
    http: SglangHttp, name: str, probe: Probe, expected: Sequence[np.ndarray], timeout_s: float
) -> None:
    """Raises EngineError where the engine's log-probs under the adapter are not the trainer's."""
    rids = [new_rid() for _ in probe.sequences]
    bodies = [score_body(tokens, 1, rid, 0, name) for tokens, rid in zip(probe.sequences, rids, strict=True)]
    answers = await asyncio.gather(*(http.post("/generate", body, timeout_s=timeout_s) for body in bodies))
    scored = [
        parse_score(answer, tokens, 1, 0, probe.vocab_size, rid).logprobs
        for answer, tokens, rid in zip(answers, probe.sequences, rids, strict=True)
    ]
    difference = max(float(np.abs(a - b).max()) for a, b in zip(scored, expected, strict=True))
    if not difference <= probe.tolerance:
        said = (
            f"log-probs under {name} are up to {difference:.2g} nats from the trainer's ({probe.tolerance:g} allowed)"
        )
        raise EngineError(f"{http.server.url}: {said}", reason="probe")

"""From the trainer's weights to what engines serve: staged once, delivered to each engine, checked, or not served.

    bridge = Bridge(Staging(...), Disk)
    engine = SglangEngine(server, options, bridge.link(), version=0)
    publisher = Publisher(fleet, "refresh", prepare=bridge.prepare)

A delivery pauses the engine (running requests are retracted and keep what they have), loads, flushes the prefix cache,
compares the checksum of every served tensor, and lets it go on. One that fails leaves the engine paused: nothing is
served from it until a whole delivery has succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlx.models.hf_names import hf_tensors
from rlx.rollout.engine import EngineError
from rlx.rollout.sglang_http import SglangHttp
from rlx.rollout.sglang_requests import version_label
from rlx.sync.manifest import MAX_NAMED, StagingError, check_files
from rlx.sync.naming import served_layout_unsupported_reason
from rlx.sync.served import served_checksums
from rlx.sync.staging import Staged, Staging, prune
from rlx.sync.tensors import Leaves

CONTROL_S = 60.0  # for a call that moves no weights


class Transport(Protocol):
    """How the files of a staged version get into one engine."""

    async def connect(self, http: SglangHttp) -> None:
        """What can be done while the engine still generates. Raises EngineError."""
        ...

    async def deliver(self, http: SglangHttp, staged: Staged, files: Sequence[str]) -> None:
        """The engine, which is paused, has all tensors of `files` when this returns, is labelled with the version, and
        has no cached prefix. Raises EngineError; then it may have any part of them."""
        ...

    async def forget(self) -> None:
        """Give up what outlasts a delivery: the engine failed, restarted, or is no longer needed."""
        ...


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of one delivery. idle: the engine generated nothing; deliver and check are in it."""

    deliver: float
    check: float
    idle: float


class Bridge:
    """Use one for a fleet, from one event loop.

    Args:
      transport: makes an engine's own.
      check: compare the checksums of what each engine serves after each delivery. Costs the engine a pass over its
        weights; without it only names, shapes and sizes are checked, on the way out.
        Where these checksums are not known a warning says so, once.
      keep: versions left in the staging directory beside those that an engine has.
    """

    def __init__(self, staging: Staging, transport: Callable[[], Transport], *, check: bool = True, keep: int = 2):
        self.staging, self.transport, self.check, self.keep = staging, transport, check, keep
        self.stage_seconds = 0.0  # of the last `prepare`
        self._links: list[Link] = []
        self._staging, self._hashing = asyncio.Lock(), asyncio.Lock()
        self._pruning = threading.Lock()  # held by threads, which go on when who waits for them is cancelled
        self._hashed: tuple[Staged, str, Mapping[str, str]] | None = None  # checksums of the last version by device
        self._staged: tuple[Staged, Leaves] | None = None

    def link(self) -> Link:
        """The loader of one engine (`rlx.rollout.sglang.Loader`)."""
        link = Link(self, self.transport())
        self._links.append(link)
        return link

    async def prepare(self, weights: Any, version: int) -> Staged:
        """`weights` staged as `version`; no engine is touched. What is staged already is returned as it is.

        Raises StagingError for weights that must not be served, OSError where they cannot be written.
        """
        if isinstance(weights, Staged):
            return weights
        async with self._staging:
            if self._staged is None or self._staged[0].version != version or self._staged[1].changed(weights):
                began = time.monotonic()
                staged = await asyncio.to_thread(self.staging.stage, weights, version)
                if staged is None:
                    raise RuntimeError("only the first process of a run has engines to publish to")
                self._staged, self.stage_seconds = (staged, Leaves(weights)), time.monotonic() - began
            return self._staged[0]

    async def expected(self, staged: Staged, device: str) -> Mapping[str, str]:
        """What an engine of one rank on `device`, cpu or cuda, reports when it has all of it."""
        if device == "cpu" and staged.manifest.served:
            return staged.manifest.served
        async with self._hashing:
            if self._hashed is None or self._hashed[0] is not staged or self._hashed[1] != device:
                entries, dtype = staged.manifest.tensors, staged.manifest.dtype
                found = await asyncio.to_thread(served_checksums, staged.path, entries, dtype, device, None)
                self._hashed = staged, device, found
            return self._hashed[2]

    async def close(self) -> None:
        """Engines keep what they have loaded; the staged versions are removed."""
        await asyncio.gather(*(link.transport.forget() for link in self._links))
        await asyncio.to_thread(self._prune, set(), 0)

    async def tidy(self) -> None:
        """Remove what no engine needs. While one has not loaded yet, it may serve any of them: nothing is removed."""
        if all(link.served is not None or link.loading is not None for link in self._links):
            in_use = [staged for link in self._links for staged in (link.served, link.loading) if staged is not None]
            in_use += [self._staged[0]] if self._staged else []  # what is published next
            await asyncio.to_thread(self._prune, {staged.path for staged in in_use}, self.keep)

    def _prune(self, needed: set[Path], keep: int) -> None:
        with self._pruning:  # every link asks for it, and two would remove one directory
            prune(self.staging.directory, needed, keep)


class Link:
    """One engine's end of the bridge: `await link(http, weights, version)`.

    served: what the engine certainly has, whole; None before the first delivery and after one that failed.
    """

    def __init__(self, bridge: Bridge, transport: Transport):
        self.bridge, self.transport = bridge, transport
        self.served: Staged | None = None
        self.loading: Staged | None = None
        self.seconds: Seconds | None = None  # of the last delivery
        self.device = ""  # that the engine runs on, as it says
        self._unchecked = False
        self._alone = asyncio.Lock()  # a server dies of two loads at once
        self._expected: Mapping[str, str] | None = None  # checksums of the version that is being delivered

    async def __call__(self, http: SglangHttp, weights: Any, version: int, /) -> None:
        """Raises EngineError where the engine does not serve `weights` as `version` now. None: there is no adapter."""
        try:
            staged = await self.bridge.prepare(weights, version)
        except (StagingError, OSError) as error:
            raise EngineError(f"version {version} is not published: {error}", reason="staging") from error
        async with self._alone:
            self.loading = staged
            try:
                files = await self._needed(http, staged)
                await self._check_files(staged, files)
                await self._connect(http)
                if self.bridge.check and await self._is_known(http):
                    self._expected = await self.bridge.expected(staged, self.device)
                await self._load(http, staged, files)
            finally:
                self.loading = None
        await self.bridge.tidy()

    async def _is_known(self, http: SglangHttp) -> bool:
        """Are the checksums of what this engine serves known here?"""
        if not self.device:
            info = await http.get("/server_info")
            self.device = str(info["device"])
            reason = served_layout_unsupported_reason(hf_tensors(self.bridge.staging.arch))
            if self.device not in ("cpu", "cuda") or info["tp_size"] != 1:
                reason = f"checksums are known of one rank on cpu or cuda, not of {info['tp_size']} on {self.device}"
            if reason is not None:
                self._unchecked = True
                warnings.warn(f"{http.server.url} is not checked after publications: {reason}", stacklevel=2)
        return not self._unchecked

    async def _check_files(self, staged: Staged, files: Sequence[str]) -> None:
        try:
            await asyncio.to_thread(check_files, staged.path, staged.manifest, files)
        except StagingError as error:
            raise EngineError(str(error), reason="staging") from error

    async def _connect(self, http: SglangHttp) -> None:
        try:
            await self.transport.connect(http)
        except BaseException:
            await self.transport.forget()
            raise

    async def _load(self, http: SglangHttp, staged: Staged, files: Sequence[str]) -> None:
        """From the pause on it may have a part of each version; where this fails it stays paused."""
        self.served = None
        paused = time.monotonic()
        try:
            await http.command("/pause_generation", {"mode": "retract"}, timeout_s=CONTROL_S)
            began = time.monotonic()
            await self._deliver(http, staged, files)
            delivered = time.monotonic()
            await check_label(http, staged.version)
            if self._expected is not None:
                await check_served(http, self._expected)
            checked = time.monotonic()
            await http.command("/continue_generation", {}, timeout_s=CONTROL_S)
        except BaseException:
            with contextlib.suppress(EngineError):  # what it was asked ends here, and is asked elsewhere
                await http.command("/abort_request", {"abort_all": True, "rid": ""}, timeout_s=CONTROL_S)
            raise
        self.served = staged
        self.seconds = Seconds(delivered - began, checked - delivered, time.monotonic() - paused)

    async def _deliver(self, http: SglangHttp, staged: Staged, files: Sequence[str]) -> None:
        if not files:  # every tensor is as it was
            relabel = {"new_version": version_label(staged.version), "abort_all_requests": False}
            await http.command("/update_weight_version", relabel, timeout_s=CONTROL_S)
            return
        try:
            await self.transport.deliver(http, staged, files)
        except BaseException:
            await self.transport.forget()
            raise

    async def _needed(self, http: SglangHttp, staged: Staged) -> list[str]:
        """Files whose tensors the engine does not have. All of them, unless it is known what it has."""
        had = self.served
        if had is not None and await label(http) != version_label(had.version):
            await self.transport.forget()  # another process answers at this address
            had = None
        known = set() if had is None else set(had.digests.values())
        return [file for file in staged.manifest.files if staged.digests[file] not in known]


async def label(http: SglangHttp) -> str:
    """What the server says that its weights are."""
    return str((await http.get("/model_info")).get("weight_version"))


async def check_label(http: SglangHttp, version: int) -> None:
    """Raises EngineError where the server would write another version beside its tokens."""
    found = await label(http)
    if found != version_label(version):
        raise EngineError(f"{http.server.url} calls its weights {found!r} after loading {version}", reason="version")


async def check_served(http: SglangHttp, expected: Mapping[str, str]) -> None:
    """Raises EngineError where what the server has is not what was staged, tensor by tensor."""
    answer = await http.command("/weights_checker", {"action": "checksum"}, timeout_s=10 * CONTROL_S)
    found = answer["ranks"][0]["checksums"]
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        said = f"{len(wrong)} of {len(expected)} tensors differ from what was staged: {', '.join(wrong[:MAX_NAMED])}"
        raise EngineError(f"{http.server.url}: {said}", reason="checksum")

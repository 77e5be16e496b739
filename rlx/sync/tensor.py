"""Transport `tensor`: the tensors themselves as HTTP bodies, a file of the staged version at a time."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path

from rlx.rollout.sglang_http import SglangHttp
from rlx.sync.manifest import ITEMSIZE, Manifest
from rlx.sync.session import update_session
from rlx.sync.staging import Staged
from rlx.sync.torch_pickle import named_tensors


class Tensor:
    """See `rlx.sync.bridge.Transport`. Needs nothing but the server's port.

    Base64 makes a file a third larger, and the server takes a body for each of its `ranks`: 4/3 x `ranks` times the
    bytes of `disk`, in one request a file (a bucket of 256 MiB is 2.7 GiB for eight ranks).
    """

    def __init__(self, ranks: int = 1, timeout_s: float = 600.0):
        self.ranks, self.timeout_s = ranks, timeout_s

    async def connect(self, http: SglangHttp) -> None:
        """There is nothing to connect."""
        return

    async def deliver(self, http: SglangHttp, staged: Staged, files: Sequence[str]) -> None:
        async with update_session(http, self.timeout_s):
            body = asyncio.create_task(asyncio.to_thread(file_body, staged.path, staged.manifest, files[0], self.ranks))
            for i, _ in enumerate(files):
                content = await body
                if i + 1 < len(files):  # made while this one is loaded
                    following = asyncio.to_thread(file_body, staged.path, staged.manifest, files[i + 1], self.ranks)
                    body = asyncio.create_task(following)
                last = i + 1 == len(files)
                command = {
                    "serialized_named_tensors": content,
                    "flush_cache": last,
                    "weight_version": str(staged.version) if last else None,
                }
                await http.command("/update_weights_from_tensor", command, timeout_s=self.timeout_s)

    async def forget(self) -> None:
        """Nothing outlasts a delivery."""
        return


def file_body(directory: Path, manifest: Manifest, file: str, ranks: int) -> list[str]:
    """The tensors of a staged file, whole, for each of the server's ranks: a rank reads the entry of its own number."""
    names = manifest.names(file)
    start = manifest.tensors[names[0]].offset
    with (directory / file).open("rb") as stream:
        stream.seek(start)
        data = stream.read()
    itemsize = ITEMSIZE[manifest.dtype]
    placed = [(n, (manifest.tensors[n].offset - start) // itemsize, manifest.tensors[n].shape) for n in names]
    return [base64.b64encode(named_tensors(data, manifest.dtype, placed)).decode()] * ranks

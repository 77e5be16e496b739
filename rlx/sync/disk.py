"""Transport `disk`: an engine reads a staged version from a file system that it shares with the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.rollout.sglang_http import SglangHttp
from rlx.sync.staging import Staged


class Disk:
    """See `rlx.sync.bridge.Transport`. The directory is a whole checkpoint: an engine that restarts finds it, too."""

    def __init__(self, timeout_s: float = 600.0):
        self.timeout_s = timeout_s

    async def connect(self, http: SglangHttp) -> None:
        """There is nothing to connect."""
        return

    async def deliver(self, http: SglangHttp, staged: Staged, files: Sequence[str]) -> None:
        """Reads all of it, whatever `files` says: the server takes a directory."""
        body = {
            "model_path": str(staged.path.resolve()),
            "weight_version": str(staged.version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        await http.command("/update_weights_from_disk", body, timeout_s=self.timeout_s)

    async def forget(self) -> None:
        """Nothing outlasts a delivery."""
        return

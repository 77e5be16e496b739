"""The bracket that SGLang wants around weights that come as tensors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from rlx.rollout.engine import EngineError
from rlx.rollout.sglang_http import SglangHttp


@contextlib.asynccontextmanager
async def update_session(http: SglangHttp, timeout_s: float) -> AsyncIterator[None]:
    """Between `begin_weight_update` and `end_weight_update`. One that an earlier, broken delivery left open is closed.

    Where the block fails it stays open: what is half loaded must not be finished, and the next delivery starts anew.
    """
    try:
        await http.command("/begin_weight_update", {}, timeout_s=timeout_s)
    except EngineError as error:
        if "already open" not in str(error):
            raise
        await http.command("/end_weight_update", {}, timeout_s=timeout_s)
        await http.command("/begin_weight_update", {}, timeout_s=timeout_s)
    yield
    await http.command("/end_weight_update", {}, timeout_s=timeout_s)

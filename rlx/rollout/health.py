"""Is an engine alive while nobody waits for it, or while somebody waits too long? Asked every few seconds.

An engine that loads weights is busy, not dead: it answers no such question meanwhile, and none is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlx.rollout.engine import EngineError
from rlx.rollout.fleet import Fleet, Member

Probe = Callable[[], Awaitable[object]]


async def watch(fleet: Fleet, member: Member, probe: Probe, every_s: float) -> None:
    """Ejects `member` whenever `probe` raises EngineError, for as long as the task lives."""
    while True:
        await asyncio.sleep(every_s)
        if not member.in_service or member.loading.locked():
            continue
        loads = len(member.versions)
        try:
            await probe()
        except EngineError as error:
            # A publication that began meanwhile explains it; the engine is asked again after that.
            if member.in_service and len(member.versions) == loads:
                fleet.eject(member, "health", str(error))

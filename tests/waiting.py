"""Waiting for what another thread or process does, with an end to it."""

import time
from collections.abc import Callable
from pathlib import Path


def comes(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Does it hold within `seconds`?"""
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def gone(path: Path, seconds: float = 30.0) -> bool:
    """Does `path` vanish within `seconds`? orbax removes what a killed save left in a thread of its own."""
    return comes(lambda: not path.exists(), seconds)

"""Waiting for what another thread or process does, with an end to it."""

import time
from pathlib import Path


def gone(path: Path, seconds: float = 30.0) -> bool:
    """Does `path` vanish within `seconds`? orbax removes what a killed save left in a thread of its own."""
    until = time.monotonic() + seconds
    while path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return not path.exists()

"""What the section `sandbox` must not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlx.config.schema import Config

WHOLE = ("memory_bytes", "processes", "file_bytes", "disk_bytes", "files", "output_bytes")
SECONDS = ("wall_s", "cpu_s", "cores")
MAX_OPEN = 512  # users of sandboxes that a process has
MIN_MEMORY = 16 * 2**20  # bytes, for an interpreter


def sandbox_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    sandbox, limits = config.sandbox, vars(config.sandbox.limits)
    problems = [_said(f"limits.{key}", limits[key], "must be at least 1") for key in WHOLE if limits[key] < 1]
    problems += [_said(f"limits.{key}", limits[key], "must be above 0") for key in SECONDS if not limits[key] > 0]
    if 1 <= sandbox.limits.memory_bytes < MIN_MEMORY:
        problems.append(_said("limits.memory_bytes", limits["memory_bytes"], f"a program needs {MIN_MEMORY} or more"))
    if not 1 <= sandbox.max_open <= MAX_OPEN:
        problems.append(_said("max_open", sandbox.max_open, f"must be from 1 to {MAX_OPEN}"))
    if sandbox.max_running < 0:
        problems.append(_said("max_running", sandbox.max_running, "must be 0 (two for each core) or more"))
    problems += [
        _said("read_only", directory, "is not the absolute path of a directory of this machine")
        for directory in sandbox.read_only
        if not (Path(directory).is_absolute() and Path(directory).is_dir())
    ]
    if sandbox.kind == "daytona" and not sandbox.url.startswith(("http://", "https://")):
        problems.append(_said("url", sandbox.url, "kind 'daytona' needs the address of its service, https://..."))
    if sandbox.kind != "daytona" and sandbox.url:
        problems.append(_said("url", sandbox.url, f"is of kind 'daytona', and config.sandbox.kind = {sandbox.kind!r}"))
    return problems


def _said(key: str, value: Any, demand: str) -> str:
    return f"config.sandbox.{key} = {value!r}: {demand}"

"""What the section `sandbox` must not say."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.config.sandbox import SandboxConfig
from rlx.config.schema import Config

SECONDS = ("wall_s", "cpu_s")
MAX_SECONDS = 1e9
CORES = (0.01, 4096.0)  # what the kernel takes as a share of its period, to what it takes at all
MAX_OPEN = 512  # users of sandboxes that a process has
MOST = 2**50  # bytes and files; no machine has more
LEAST = {
    "memory_bytes": (16 * 2**20, "a program needs {} or more"),  # for an interpreter
    "disk_bytes": (2**16, "a workspace needs {} or more"),
    "files": (16, "a workspace, whose own directory counts, needs {} or more"),
    "file_bytes": (1, ""),
    "output_bytes": (1, ""),
}
PROCESSES = (4, 2**15)  # bubblewrap itself takes two
OF_SANDBOXES = ("/proc", "/sys", "/dev", "/etc", "/tmp")  # sandboxes have their own, or none


def sandbox_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    sandbox = config.sandbox
    problems = [*_limits(sandbox), *_read_only(sandbox)]
    if not 1 <= sandbox.max_open <= MAX_OPEN:
        problems.append(_said("max_open", sandbox.max_open, f"must be from 1 to {MAX_OPEN}"))
    if sandbox.max_running < 0:
        problems.append(_said("max_running", sandbox.max_running, "must be 0 (two for each core) or more"))
    if sandbox.kind != "daytona" and sandbox.directory and not _writable(sandbox.directory):
        demand = "must be a directory of this machine that may be written, such as /var/tmp"
        problems.append(_said("directory", sandbox.directory, demand))
    if sandbox.kind == "daytona" and not sandbox.url.startswith(("http://", "https://")):
        problems.append(_said("url", sandbox.url, "kind 'daytona' needs the address of its service, https://..."))
    if sandbox.kind != "daytona" and sandbox.url:
        problems.append(_said("url", sandbox.url, f"is of kind 'daytona', and config.sandbox.kind = {sandbox.kind!r}"))
    return problems


def _limits(sandbox: SandboxConfig) -> Iterator[str]:
    limits = vars(sandbox.limits)
    for key, (least, demand) in LEAST.items():
        if limits[key] < 1:
            yield _said(f"limits.{key}", limits[key], f"must be at least {least}")
        elif limits[key] < least:
            yield _said(f"limits.{key}", limits[key], demand.format(least))
        elif limits[key] > MOST:
            yield _said(f"limits.{key}", limits[key], f"must be at most {MOST}")
    for key in SECONDS:
        if not 0 < limits[key] <= MAX_SECONDS:
            yield _said(f"limits.{key}", limits[key], f"must be above 0 and at most {MAX_SECONDS:g} seconds")
    least_cores, most_cores = CORES
    if not least_cores <= limits["cores"] <= most_cores:
        yield _said("limits.cores", limits["cores"], f"must be from {least_cores:g} to {most_cores:g}")
    least, most = PROCESSES if sandbox.kind == "bubblewrap" else (1, PROCESSES[1])
    if not least <= limits["processes"] <= most:
        why = ", two of which are bubblewrap's own" if least > 1 else ""
        yield _said("limits.processes", limits["processes"], f"must be from {least} to {most}{why}")


def _read_only(sandbox: SandboxConfig) -> Iterator[str]:
    workspaces = Path(sandbox.directory or tempfile.gettempdir()).resolve()
    for directory in sandbox.read_only:
        path = Path(directory)
        if not (path.is_absolute() and path.is_dir()):
            yield _said("read_only", directory, "is not the absolute path of a directory of this machine")
        elif own := [own for own in OF_SANDBOXES if path.resolve().is_relative_to(own)]:
            yield _said("read_only", directory, f"a sandbox does not show {own[0]} of this machine; take another place")
        elif workspaces.is_relative_to(path.resolve()):
            yield _said("read_only", directory, f"has the workspaces of all sandboxes in it, {workspaces}")


def _writable(directory: str) -> bool:
    return Path(directory).is_dir() and os.access(directory, os.W_OK | os.X_OK)


def _said(key: str, value: Any, demand: str) -> str:
    return f"config.sandbox.{key} = {value!r}: {demand}"

"""Control groups, of either version: the limits that hold for all processes of a sandbox together.

Version 1 has a hierarchy for each controller, version 2 one for all. A group of ours is made under the one that this
process is in, so that limits around it (of a container) go on holding.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from rlx.config.sandbox import SandboxLimits

_PERIOD_US = 100_000  # the scheduler's; `cores` are so much of each period


class Hierarchies(NamedTuple):
    """Where groups can be made: the directory of each controller, which in version 2 are the same."""

    version: int  # 0 = there are none
    directories: dict[str, Path]
    reason: str  # why there are none

    def has(self, controller: str) -> bool:
        return controller in self.directories


def find(mounts: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> Hierarchies:
    """What this process may use: version 2 if it has memory and pids there, else what it has of version 1."""
    places = _places(Path(mounts).read_text(encoding="utf-8"))
    groups = _own_groups(Path(own).read_text(encoding="utf-8"))
    unified = places.get("") and _inside(places[""], groups.get("", "/"))
    if unified and (held := _unified(unified)):
        return Hierarchies(2, held, "")
    held = {}
    for controller in ("memory", "pids", "cpu", "cpuacct"):
        if controller in places:
            directory = _inside(places[controller], groups.get(controller, "/"))
            if _writable(directory):
                held[controller] = directory
    if "memory" in held and "pids" in held:
        return Hierarchies(1, held, "")
    return Hierarchies(0, {}, "no writable cgroup with the controllers memory and pids, of version 1 or 2")


class Cgroup:
    """A group for the processes of one sandbox."""

    def __init__(self, hierarchies: Hierarchies, name: str, limits: SandboxLimits):
        self._version = hierarchies.version
        self._of = {controller: parent / name for controller, parent in hierarchies.directories.items()}
        try:
            for directory in set(self._of.values()):
                directory.mkdir()
            self._limit(limits)
        except OSError:
            self.remove()
            raise
        self._kills = self._oom_kills()

    @property
    def joins(self) -> list[str]:
        """The files to which a process writes 0 to join."""
        return sorted({str(directory / "cgroup.procs") for directory in self._of.values()})

    def cpu_seconds(self) -> float | None:
        """All that its processes have used, None where nothing counts it."""
        if self._version == 2 and "cpu" in self._of:
            return _numbers(self._of["cpu"] / "cpu.stat").get("usage_usec", 0) / 1e6
        if "cpuacct" in self._of:
            return int((self._of["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
        return None

    def out_of_memory(self) -> bool:
        """Whether the system has killed a process of it for memory since the last call."""
        before, self._kills = self._kills, self._oom_kills()
        return self._kills > before

    def peak_bytes(self) -> int:
        """The most memory that it has had at once, caches of files included."""
        file = "memory.peak" if self._version == 2 else "memory.max_usage_in_bytes"
        return int((self._of["memory"] / file).read_text())

    def processes(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):  # it has been removed
            return [int(pid) for pid in (self._of["pids"] / "cgroup.procs").read_text().split()]
        return []

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """Raises OSError where one has processes after two seconds."""
        for directory in set(self._of.values()):
            remove(directory)

    def _limit(self, limits: SandboxLimits) -> None:
        quota = int(limits.cores * _PERIOD_US)
        if self._version == 2:
            self._write("memory", "memory.max", limits.memory_bytes)
            self._write("memory", "memory.swap.max", 0, optional=True)
            self._write("pids", "pids.max", limits.processes)
            self._write("cpu", "cpu.max", f"{quota} {_PERIOD_US}")
            return
        self._write("memory", "memory.limit_in_bytes", limits.memory_bytes)
        self._write("memory", "memory.memsw.limit_in_bytes", limits.memory_bytes, optional=True)
        self._write("pids", "pids.max", limits.processes)
        self._write("cpu", "cpu.cfs_quota_us", quota)

    def _write(self, controller: str, file: str, value: int | str, *, optional: bool = False) -> None:
        if controller in self._of and not (optional and not (self._of[controller] / file).exists()):
            (self._of[controller] / file).write_text(str(value))

    def _oom_kills(self) -> int:
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        return _numbers(self._of["memory"] / file).get("oom_kill", 0)


def _places(mountinfo: str) -> dict[str, tuple[Path, str]]:
    """Controller -> (mount point, the group that is mounted there); "" is version 2."""
    places = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        (root, point), (kind, _, options) = before.split()[3:5], after.split(maxsplit=2)
        if kind == "cgroup2":
            places[""] = (Path(point), root)
        elif kind == "cgroup":
            places.update({option: (Path(point), root) for option in options.split(",")})
    return places


def _own_groups(text: str) -> dict[str, str]:
    groups = {}
    for line in text.splitlines():
        _, controllers, group = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), group))
    return groups


def _inside(place: tuple[Path, str], group: str) -> Path:
    """The directory of `group`; the mount point where the mount does not show it (a container's view)."""
    point, root = place
    relative = os.path.relpath(group, root)
    inside = point / relative
    return inside if not relative.startswith("..") and inside.is_dir() else point


def _unified(directory: Path) -> dict[str, Path]:
    """The controllers that groups under `directory` have, switched on where they are not and that is allowed."""
    for controller in {"memory", "pids", "cpu"} - _words(directory / "cgroup.subtree_control"):
        with contextlib.suppress(OSError):  # not there, or the group has processes of its own: seen below
            (directory / "cgroup.subtree_control").write_text(f"+{controller}")
    on = _words(directory / "cgroup.subtree_control")
    usable = {"memory", "pids"} <= on and _writable(directory)
    return {c: directory for c in ("memory", "pids", "cpu") if c in on} if usable else {}


def _writable(directory: Path) -> bool:
    probe = directory / f"rlx-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def remove(directory: Path) -> None:
    """A group is busy for some milliseconds after its last process. Raises OSError where it stays so."""
    for _ in range(200):
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
    directory.rmdir()


def _words(file: Path) -> set[str]:
    return set(file.read_text(encoding="utf-8").split()) if file.exists() else set()


def _numbers(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}

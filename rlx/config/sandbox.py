"""The settings of sandboxes."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Of one command, but for disk and files: those are the workspace's."""

    wall_s: float
    cpu_s: float  # of all its processes together
    cores: float  # CPUs it may use at once, where control groups exist
    memory_bytes: int  # of all its processes and temporary files; without control groups, of each process
    processes: int  # threads count
    file_bytes: int  # a single file
    disk_bytes: int
    files: int
    output_bytes: int  # stdout and stderr


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    kind: Literal["bubblewrap", "subprocess", "daytona"]
    max_open: int
    max_running: int  # commands at once, 0 = two for each core
    directory: str  # where workspaces are made, "" = the system's temporary directory
    read_only: tuple[str, ...]  # directories of this machine that programs see, beside /usr
    url: str  # of the service of kind daytona
    api_key: str  # the name of the environment variable that has it
    limits: SandboxLimits

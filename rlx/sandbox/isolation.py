"""The command lines that isolate a program: bubblewrap's namespaces, limits of resources, a user of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rlx.config.sandbox import SandboxLimits
from rlx.sandbox.cgroups import Hierarchies

WORKSPACE = "/workspace"
USER = 1000  # what the program sees itself as
_OOM_SCORE = 500  # of 1000
_BASE_UID, _UIDS_OF_A_PROCESS = 1_000_000_000, 513  # sandbox.max_open is at most 512, and one probes
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
# Is the first to go when the machine runs out of memory, joins the control groups named before "--", then becomes the
# command after it. No code of ours runs between fork and exec, so that the fork is cheap however large this process is.
_BEGIN = (
    f'echo {_OOM_SCORE} > /proc/self/oom_score_adj; while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; '
    'shift; exec "$@"'
)
# What programs below /usr read of /etc, copied once: nothing else of this machine is seen there, and a command needs
# one mount for all of it, not a dozen.
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ssl/openssl.cnf", "fonts")
_ETC_MORE = ("localtime", "mime.types", "chromium", "chromium.d")
# The files of /etc that name people and machines; a sandbox gets these instead.
ETC_FILES = {
    "passwd": f"root:x:0:0::/:/bin/sh\nuser:x:{USER}:{USER}::{WORKSPACE}:/bin/sh\n",
    "group": f"root:x:0:\nuser:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def user_of(slot: int) -> int:
    """The user and group of sandbox number `slot` of this process; no other process's sandboxes have it.

    Where this process is root of a container with few users, it is one of the upper half of those, and those of
    another process's sandboxes may be the same: control groups and namespaces keep them apart still.
    """
    if slot >= _UIDS_OF_A_PROCESS:
        raise ValueError(f"sandbox number {slot}: there are users for {_UIDS_OF_A_PROCESS} at once")
    with open("/proc/self/uid_map", encoding="utf-8") as mapped:
        users = max(int(line.split()[2]) for line in mapped)
    wanted = _BASE_UID + os.getpid() * _UIDS_OF_A_PROCESS + slot
    return wanted if wanted < min(users, 2**32 - 2) else users // 2 + slot


def become(user: int | None, joins: Sequence[str]) -> list[str]:
    """Join control groups, then become another user for good; None = stay."""
    argv = ["/bin/sh", "-c", _BEGIN, "sh", *joins, "--"]
    if user is not None:
        argv += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all", "--"]
    return argv


def limited(limits: SandboxLimits, *, grouped: bool, of_user: bool) -> list[str]:
    """Limits of each process.

    Args:
      grouped: control groups limit memory for all processes together, so that addresses need no limit.
      of_user: the user has no other processes, so that a limit on its processes is one on the sandbox's.
    """
    cpu = max(1, int(limits.cpu_s + 0.999))
    argv = ["prlimit", f"--cpu={cpu}:{cpu + 1}", f"--fsize={limits.file_bytes}", "--core=0", "--nofile=1024"]
    argv += ["--memlock=65536", "--msgqueue=0"]
    argv += [] if grouped else [f"--as={limits.memory_bytes}"]
    argv += [f"--nproc={limits.processes}"] if of_user else []
    return [*argv, "--"]


def namespaces(
    workspace: str,
    limits: SandboxLimits,
    env: Mapping[str, str],
    read_only: Sequence[str],
    etc: str,
) -> list[str]:
    """bubblewrap, without its handles: nothing of this machine but its programs, read-only, and the workspace.

    Args:
      etc: the directory that `write_etc` has made.
    """
    argv = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
        "--disable-userns",
        "--cap-drop",
        "ALL",
    ]
    argv += ["--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
    argv += system(read_only)
    argv += ["--ro-bind", etc, "/etc"]
    # Not writable: where root has no CAP_SYS_RESOURCE, a program could exempt itself from ending for want of memory.
    argv += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
    for temporary in ("/tmp", "/dev/shm"):
        argv += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", temporary]
    argv += ["--remount-ro", "/dev", "--bind", workspace, WORKSPACE, "--remount-ro", "/", "--chdir", WORKSPACE]
    argv += ["--clearenv"]
    for name, value in {**ENVIRONMENT, "HOME": WORKSPACE, "TMPDIR": "/tmp", **env}.items():
        argv += ["--setenv", name, value]
    return argv


def handles(info: int, seccomp: int | None = None) -> list[str]:
    """Open files for bubblewrap, which ends its options: where it says what it started, and the filter."""
    filtered = [] if seccomp is None else ["--seccomp", str(seccomp)]
    return ["--info-fd", str(info), *filtered, "--"]


def system(read_only: Sequence[str]) -> list[str]:
    """bubblewrap's arguments for this machine's programs, read-only, and such directories."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        path = Path(name)
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            argv += ["--ro-bind", name, name]
    for directory in read_only:
        argv += ["--ro-bind", directory, directory]
    return argv


def write_etc(directory: Path) -> None:
    """What sandboxes have for /etc: copies of what programs need of this machine's, and names of their own."""
    for name in (*_ETC, *_ETC_MORE):
        source, copy = Path("/etc", name), directory / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        elif source.exists():
            shutil.copy(source, copy)
    for name, text in ETC_FILES.items():
        (directory / name).write_text(text, encoding="utf-8")
        (directory / name).chmod(0o644)


def missing_tools(kind: Literal["bubblewrap", "subprocess"]) -> list[str]:
    """Programs that a kind of sandbox needs and PATH does not have."""
    needed = ("bwrap", "prlimit", "setpriv") if kind == "bubblewrap" else ("prlimit",)
    return [tool for tool in needed if shutil.which(tool) is None]


def describe(
    kind: Literal["bubblewrap", "subprocess"], groups: Hierarchies, *, in_memory: bool, filtered: bool
) -> dict[str, str]:
    """What protects from what, for people: a line for each thing that a program could harm."""
    by_group = f"control groups, version {groups.version}"
    grouped = bool(groups.version)
    common = {
        "memory": f"{by_group}, all processes together" if grouped else f"of each process only ({groups.reason})",
        "cpu seconds": f"{by_group}, all processes together"
        if groups.has("cpuacct") or groups.version == 2
        else "of each process only",
        "cores": by_group if groups.has("cpu") else "not limited",
        "disk": "a file system in memory of this size and number of files"
        if in_memory
        else "looked at ten times a second while a program runs; a file's size by RLIMIT_FSIZE",
        "output": "cut while it is read",
    }
    if kind == "subprocess":
        return common | {
            "processes": by_group if grouped else "not limited; one that leaves its process group is not ended",
            "files": "NOT PROTECTED: it reads and writes whatever this process's user may",
            "network": "NOT PROTECTED",
            "other processes": "NOT PROTECTED: it may signal and trace those of this process's user",
            "system calls": "NOT PROTECTED",
        }
    own_user = "a user of its own" if os.geteuid() == 0 else "the user of this process, in a user namespace"
    return common | {
        "processes": f"{by_group} and RLIMIT_NPROC" if grouped else "RLIMIT_NPROC",
        "files": f"a private file system: /usr read-only, the workspace, a small /tmp; {own_user}",
        "network": "a network namespace with nothing but its own loopback",
        "other processes": "a PID namespace, ended as a whole",
        "system calls": "a seccomp filter, no user namespaces inside, no capabilities"
        if filtered
        else "no user namespaces inside, no capabilities (no seccomp filter for this machine's architecture)",
    }

"""Parts of sandboxes that one machine cannot show: control groups of both versions, other machines' system calls."""

from __future__ import annotations

import dataclasses
import os
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from configs import base
from rlx.config.parse import parse
from rlx.config.sandbox_checks import MAX_OPEN, sandbox_problems
from rlx.sandbox import cgroups, files, isolation, processes, seccomp
from rlx.sandbox.base import Limit, SandboxError
from rlx.sandbox.storage import Root
from tests import waiting
from tests.envs.code.test_grading import LIMITS


def hierarchies(tmp_path, mounts: str, own: str) -> cgroups.Hierarchies:
    (tmp_path / "mountinfo").write_text(mounts)
    (tmp_path / "own").write_text(own)
    return cgroups.find(str(tmp_path / "mountinfo"), str(tmp_path / "own"))


def version_2(tmp_path, controllers: str) -> cgroups.Hierarchies:
    """A file system that looks like one, but does not make files in a new group."""
    own = tmp_path / "cgroup" / "user.slice"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text(controllers)
    mounts = f"30 23 0:26 / {tmp_path}/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    return hierarchies(tmp_path, mounts, "0::/user.slice\n")


def test_version_2_is_found_where_memory_and_pids_are_on(tmp_path):
    found = version_2(tmp_path, "memory pids cpu\n")
    own = tmp_path / "cgroup" / "user.slice"
    assert (found.version, found.directories) == (2, dict.fromkeys(("memory", "pids", "cpu"), own))


def test_version_2_limits_are_written_and_read(tmp_path):
    found = version_2(tmp_path, "memory pids cpu\n")
    group = tmp_path / "cgroup" / "user.slice" / "s"
    real_mkdir = cgroups.Path.mkdir

    def mkdir(path, *arguments, **options):
        """As the kernel does it."""
        real_mkdir(path, *arguments, **options)
        for name, text in {
            "memory.events": "oom 0\noom_kill 0\n",
            "memory.swap.max": "max",
            "cgroup.procs": "",
        }.items():
            (path / name).write_text(text)
        (path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups.Path, "mkdir", mkdir)
        sandbox = cgroups.Cgroup(found, "s", dataclasses.replace(LIMITS, cores=0.5))
    read = {name: (group / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert read == {
        "memory.max": str(LIMITS.memory_bytes),
        "memory.swap.max": "0",
        "pids.max": str(LIMITS.processes),
        "cpu.max": "50000 100000",
    }
    assert sandbox.joins == [str(group / "cgroup.procs")]
    assert sandbox.cpu_seconds() == 1.5
    assert not sandbox.out_of_memory()
    (group / "memory.events").write_text("oom 3\noom_kill 1\n")
    assert (sandbox.out_of_memory(), sandbox.out_of_memory()) == (True, False)


def test_version_1_is_found_under_the_own_group_or_at_the_mount(tmp_path):
    lines, own = [], []
    for number, controller in enumerate(("memory", "pids", "cpu,cpuacct"), start=1):
        (tmp_path / controller / "docker" / "x").mkdir(parents=True)
        lines.append(f"3{number} 23 0:2{number} / {tmp_path}/{controller} rw - cgroup cgroup rw,{controller}")
        own.append(f"{number}:{controller}:/docker/{'x' if controller == 'memory' else 'unseen'}")
    found = hierarchies(tmp_path, "\n".join(lines), "\n".join(own))
    assert found.version == 1
    assert found.directories == {
        "memory": tmp_path / "memory" / "docker" / "x",
        "pids": tmp_path / "pids",
        "cpu": tmp_path / "cpu,cpuacct",
        "cpuacct": tmp_path / "cpu,cpuacct",
    }


def test_without_control_groups_there_is_a_reason_and_limits_of_each_process(tmp_path):
    found = hierarchies(tmp_path, "22 1 254:0 / / rw - ext4 /dev/vda rw\n", "0::/\n")
    assert found.version == 0
    said = isolation.describe("bubblewrap", found, in_memory=False, filtered=True)
    assert said["memory"] == f"of each process only ({found.reason})"
    alone = isolation.limited(LIMITS, grouped=False, of_user=True)
    assert f"--as={LIMITS.memory_bytes}" in alone
    assert f"--nproc={LIMITS.processes}" in alone
    assert not any("--as" in word for word in isolation.limited(LIMITS, grouped=True, of_user=True))


def run_filter(code: bytes, number: int, audit: int) -> int:
    """What the kernel's packet filter says of a system call: the few instructions that ours is made of."""
    steps = list(struct.iter_unpack("=HBBI", code))
    at, value = 0, 0
    while True:
        operation, yes, no, operand = steps[at]
        match operation:
            case 0x20:
                value = {0: number, 4: audit}[operand]
            case 0x15:
                at += yes if value == operand else no
            case 0x35:
                at += yes if value >= operand else no
            case 0x06:
                return operand
        at += 1


@pytest.mark.parametrize(
    "machine, audit, ptrace, read", [("x86_64", 0xC000003E, 101, 0), ("aarch64", 0xC00000B7, 117, 63)]
)
def test_the_filter_refuses_what_it_names_and_nothing_else(machine, audit, ptrace, read):
    code = seccomp.program(machine)
    assert code is not None
    refused = {number for number in range(600) if run_filter(code, number, audit) == 0x00050001}
    assert len(refused) == len(seccomp.refused_calls(machine))
    assert ptrace in refused
    assert read not in refused
    assert run_filter(code, read, audit) == 0x7FFF0000
    assert run_filter(code, read, 0x40000003) == 0x80000000  # a 32-bit program
    assert run_filter(code, 0x40000000 | read, audit) == 0x00050001
    alone = seccomp.program(machine, grouped=False)
    assert alone is not None
    assert len({number for number in range(600) if run_filter(alone, number, audit) == 0x00050001} - refused) == 3
    assert seccomp.program("riscv64") is None


def test_users_are_unique():
    users = {isolation.user_of(slot) for slot in range(MAX_OPEN + 1)}  # and one for the probe
    assert len(users) == MAX_OPEN + 1
    assert max(users) + isolation._UIDS_OF_A_PROCESS * 2**22 < 2**32, "whatever number a process has"
    with pytest.raises(ValueError, match="513 at once"):
        isolation.user_of(MAX_OPEN + 1)


def test_a_workspace_that_has_grown_too_far_is_found(tmp_path):
    limits = dataclasses.replace(LIMITS, files=10, disk_bytes=100_000)
    assert files.over_limit(str(tmp_path), limits) is None
    (tmp_path / "big").write_bytes(b"x" * 150_000)
    assert files.over_limit(str(tmp_path), limits) == Limit.DISK
    (tmp_path / "big").unlink()
    for number in range(11):
        (tmp_path / str(number)).touch()
    assert files.over_limit(str(tmp_path), limits) == Limit.FILES
    deep = tmp_path / "deep"
    deep.joinpath(*["d"] * 60).mkdir(parents=True)
    assert files.over_limit(str(deep), dataclasses.replace(LIMITS, files=1000)) == Limit.FILES
    files.remove(str(deep))
    assert not deep.exists()


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("max_open", 513, "must be from 1 to 512"),
        ("max_running", -1, "must be 0"),
        ("read_only", ("/nowhere",), "is not the absolute path"),
        ("url", "https://x", "is of kind 'daytona'"),
        ("limits.memory_bytes", 1000, "a program needs"),
        ("limits.wall_s", 0.0, "must be above 0"),
        ("limits.files", 0, "must be at least 16"),
        ("limits.files", 1, "needs 16 or more"),
        ("limits.disk_bytes", 1, "needs 65536 or more"),
        ("limits.memory_bytes", 10**23, "must be at most"),
        ("limits.processes", 1, "must be from 4 to 32768, two of which are bubblewrap's own"),
        ("limits.cores", 0.0001, "must be from 0.01"),
        ("limits.cpu_s", float("inf"), "at most 1e+09 seconds"),
        ("directory", "/nope", "must be a directory"),
        ("directory", "/etc/passwd", "must be a directory"),
        ("read_only", ("/proc/self",), "does not show /proc"),
        ("read_only", ("/",), "has the workspaces of all sandboxes in it"),
    ],
)
def test_settings_that_cannot_be_are_refused(key, value, said):
    tree = base.get_config()
    tree.sandbox.update_from_flattened_dict({key: value})
    (problem,) = sandbox_problems(parse(tree))
    assert problem.startswith(f"config.sandbox.{key} = ")
    assert said in problem


def test_a_root_needs_its_directory(tmp_path):
    with pytest.raises(SandboxError, match="there is no such directory"):
        Root(str(tmp_path / "nope"), version_2(tmp_path, ""), own_users=False)


def test_the_service_needs_its_address():
    tree = base.get_config()
    tree.sandbox.kind = "daytona"
    (problem,) = sandbox_problems(parse(tree))
    assert problem.startswith("config.sandbox.url = ''")


def test_what_was_adopted_is_waited_for_and_children_of_ones_own_are_not():
    processes.adopt_orphans(True)
    processes.adopt_orphans(True)
    processes.adopt_orphans(False)  # another still needs it
    try:
        said = subprocess.run(
            ["sh", "-c", "sleep 64.5 >/dev/null 2>&1 & echo $!"], start_new_session=True, capture_output=True
        )
        orphan = Path(f"/proc/{int(said.stdout)}")
        own = subprocess.Popen(["sh", "-c", "exit 3"])
        os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)

        def reaped() -> bool:
            processes.reap_adopted()
            return not orphan.exists()

        assert f"PPid:\t{os.getpid()}\n" in (orphan / "status").read_text()
        os.kill(int(said.stdout), signal.SIGKILL)
        assert waiting.comes(reaped)
        assert own.wait() == 3
    finally:
        processes.adopt_orphans(False)

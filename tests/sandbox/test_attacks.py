"""No attack harms this machine, another sandbox or itself going on; nothing of it is left; each ends in time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import re
import socket
from pathlib import Path

import pytest

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.sandbox.base import Execution
from rlx.sandbox.local import LocalSandbox, LocalSandboxes
from tests.sandbox.attack import REFUSED, Attack
from tests.sandbox.attacks import ATTACKS

SECRET = "the-other-session's-secret-4711"
LIMITS = SandboxLimits(
    wall_s=5.0,
    cpu_s=1.0,
    cores=1.0,
    memory_bytes=64 << 20,
    processes=24,
    file_bytes=8 << 20,
    disk_bytes=16 << 20,
    files=2000,
    output_bytes=1 << 20,
)
# Where the machine, not a limit, decides when a program ends.
SLOWLY = dataclasses.replace(LIMITS, wall_s=60.0, cpu_s=10.0)
LOOKS_MISS = 512 << 20  # bytes that a program writes between two looks at a workspace on disk, at most
CONFIG = SandboxConfig(
    kind="bubblewrap", max_open=8, max_running=0, directory="", read_only=(), url="", api_key="", limits=LIMITS
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks' numbers of system calls are x86_64's"),
]


def processes_of(user: int) -> list[str]:
    """The processes of a user of this machine, by what the kernel says."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if re.search(rf"^Uid:\t{user}\t", text, re.MULTILINE):
            found.append(text.splitlines()[0])
    return found


def wrong(attack: Attack, got: Execution) -> list[str]:
    """What did not come as the table says."""
    said = got.stdout.decode(errors="replace")
    problems = []
    if "BROKE" in said:
        problems.append(next(line for line in said.splitlines() if "BROKE" in line))
    if got.stopped_by not in attack.limits:
        problems.append(f"ended by {got.stopped_by}, exit code {got.exit_code}, not by {set(attack.limits)}")
    if got.stopped_by is None and attack.held and "HELD" not in said:
        problems.append(f"did not do what it is for: {said[-300:]} {got.stderr.decode(errors='replace')[-300:]}")
    return [f"{attack.name}: {problem}" for problem in problems]


def left_over(name: str, sandbox: LocalSandbox) -> list[str]:
    problems = []
    if sandbox.group is not None and sandbox.group.peak_bytes() > sandbox.limits.memory_bytes:
        problems.append(f"{name}: has had {sandbox.group.peak_bytes()} bytes of memory")
    used = sum(
        os.lstat(os.path.join(at, f)).st_blocks * 512 for at, _, found in os.walk(sandbox.workspace) for f in found
    )
    if used > sandbox.limits.disk_bytes + (0 if os.path.ismount(sandbox.workspace) else LOOKS_MISS):
        problems.append(f"{name}: has left {used} bytes in its workspace")
    if sandbox.group is not None and sandbox.group.processes():
        problems.append(f"{name}: processes {sandbox.group.processes()} are left in its control group")
    if sandbox.user is not None and processes_of(sandbox.user):
        problems.append(f"{name}: processes {processes_of(sandbox.user)} are left")
    return problems


async def attacked(provider: LocalSandboxes, attack: Attack, names: str) -> list[str]:
    sandbox = await provider.open(SLOWLY if attack.limits == REFUSED else LIMITS)
    try:
        await sandbox.write("attack.py", (names + attack.program).encode())
        got = await sandbox.run(["python3", "-I", "-S", "attack.py"], env={"PYTHONUNBUFFERED": "1"})
        problems = wrong(attack, got) + left_over(attack.name, sandbox)
        again = await sandbox.run(["sh", "-c", "echo still here"])
        if again.stdout != b"still here\n":
            problems.append(f"{attack.name}: its own next command says {again}")
    finally:
        await sandbox.close()
    return problems


async def campaign(outside: Path) -> list[str]:
    provider = LocalSandboxes(CONFIG)
    await provider.start()
    with socket.socket() as here, socket.socket(socket.AF_UNIX) as abstract:
        here.bind(("127.0.0.1", 0))
        here.listen()
        abstract.bind(f"\0rlx-attack-{os.getpid()}")
        abstract.listen()
        # In two halves: the program must not find the secret in its own text, which is in its workspace.
        names = (
            f"OUTSIDE, SECRET = {str(outside)!r}, {SECRET[:9]!r} + {SECRET[9:]!r}\n"
            f"PORT, ABSTRACT = {here.getsockname()[1]}, 'rlx-attack-{os.getpid()}'\n"
        )
        other = await provider.open(LIMITS)
        await other.write("secret.txt", SECRET.encode())
        gate = asyncio.Semaphore(4)

        async def one(attack: Attack) -> list[str]:
            async with gate:
                return await attacked(provider, attack, names)

        found = await asyncio.gather(*(one(attack) for attack in ATTACKS))
        problems = [problem for problems in found for problem in problems]
        if (await other.list(), await other.read("secret.txt")) != (["secret.txt"], SECRET.encode()):
            problems.append("the other sandbox's workspace has changed")
        if (await other.run(["cat", "secret.txt"])).stdout != SECRET.encode():
            problems.append("the other sandbox does not work any more")
        await other.close()
    await provider.close()
    return problems


def test_no_attack_gets_what_it_wants(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_ATTACK_SECRET", SECRET)
    outside = tmp_path / "outside.txt"
    outside.write_text(SECRET)
    problems = asyncio.run(campaign(outside))
    assert not problems, "\n".join(problems)
    assert outside.read_text() == SECRET


def test_there_are_enough_attacks_of_different_names():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 40

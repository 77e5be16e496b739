"""What every kind of sandbox does, and what is of one kind alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import pytest
from aiohttp.test_utils import TestServer

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.sandbox import files, isolation, storage
from rlx.sandbox.base import Limit, PathError, SandboxError, WorkspaceError
from rlx.sandbox.local import LocalSandboxes
from rlx.sandbox.pool import Sandboxes
from tests import waiting
from tests.sandbox.daytona_service import KEY, Service


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """One that users of sandboxes may pass through; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)
        yield Path(directory)


KINDS = ("bubblewrap", "subprocess", "daytona")
LOCAL_FIRST = (*KINDS[:2], pytest.param("daytona", marks=pytest.mark.slow))
LIMITS = SandboxLimits(
    wall_s=20.0,
    cpu_s=10.0,
    cores=1.0,
    memory_bytes=128 << 20,
    processes=32,
    file_bytes=4 << 20,
    disk_bytes=8 << 20,
    files=200,
    output_bytes=100_000,
)


def config_of(kind: Literal["bubblewrap", "subprocess", "daytona"], directory: str) -> SandboxConfig:
    return SandboxConfig(
        kind=kind,
        max_open=4,
        max_running=2,
        directory=directory,
        read_only=(),
        url="",
        api_key="TEST_DAYTONA_KEY",
        limits=LIMITS,
    )


@contextlib.asynccontextmanager
async def pool(kind, tmp_path, monkeypatch, busy=0, **changes) -> AsyncIterator[Sandboxes]:
    config = dataclasses.replace(config_of(kind, str(tmp_path)), **changes)
    if kind != "daytona":
        async with Sandboxes(config) as sandboxes:
            yield sandboxes
        return
    monkeypatch.setenv("TEST_DAYTONA_KEY", KEY)
    service = Service(tmp_path, busy)
    async with TestServer(service.app()) as server:
        async with Sandboxes(dataclasses.replace(config, url=str(server.make_url("/api")))) as sandboxes:
            yield sandboxes
        assert service.sandboxes == {}
        assert service.made >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_commands_run_and_files_stay(kind, tmp_path, monkeypatch):
    async def main():
        async with pool(kind, tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open(files={"src/a.py": b"import sys\nprint(sys.stdin.read().upper(), end='')\n"})
            said = await sandbox.run(["python3", "src/a.py"], stdin=b"x" * 70_000)
            assert (said.exit_code, said.stdout, said.stderr, said.stopped_by) == (0, b"X" * 70_000, b"", None)
            said = await sandbox.run(
                ["sh", "-c", "echo $WORD $HOME; pwd; echo out > made.txt; echo no >&2; exit 3"], env={"WORD": "w"}
            )
            home, where = said.stdout.decode().split()[1:]
            assert (home, said.stderr, said.exit_code) == (where, b"no\n", 3)
            assert said.stdout.startswith(b"w ")
            assert 0 < said.seconds < 60
            assert await sandbox.read("made.txt") == b"out\n"
            assert await sandbox.list() == ["made.txt", "src/a.py"]
            await sandbox.write("made.txt", b"other")
            assert (await sandbox.run(["cat", "made.txt"])).stdout == b"other"
            with pytest.raises(FileNotFoundError, match=r"^there is no file 'missing.txt' in the workspace$"):
                await sandbox.read("missing.txt")
            for path in ("/etc/passwd", "../x", "", "a/../../x", "a\0b"):
                with pytest.raises(PathError):
                    await sandbox.write(path, b"")
            with pytest.raises(ValueError, match="sequence of words"):
                await sandbox.run("echo")
            with pytest.raises(ValueError, match="names have no '='"):
                await sandbox.run(["true"], env={"A=B": "c"})
            assert (await sandbox.run(["sh", "-c", "kill -9 $$"])).exit_code == 137
            await sandbox.close()
            await sandbox.close()
            with pytest.raises(SandboxError, match="closed"):
                await sandbox.run(["true"])

    asyncio.run(main())


@pytest.mark.parametrize("kind", LOCAL_FIRST)
def test_limits_on_time_and_output(kind, tmp_path, monkeypatch):
    async def main():
        async with pool(kind, tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            late = await sandbox.run(["sh", "-c", "echo begun; sleep 60"], timeout_s=3.0)
            assert (late.stopped_by, late.exit_code, late.stdout) == (Limit.WALL, 137, b"begun\n")
            assert 3.0 <= late.seconds < 20.0
            loud = await sandbox.run(["sh", "-c", "yes & yes >&2"])
            assert loud.stopped_by == Limit.OUTPUT
            assert len(loud.stdout) + len(loud.stderr) == LIMITS.output_bytes
            assert (await sandbox.run(["echo", "well"])).stdout == b"well\n"

    asyncio.run(main())


@pytest.mark.parametrize("kind", LOCAL_FIRST)
def test_a_snapshot_restores_the_workspace_and_equal_ones_are_equal(kind, tmp_path, monkeypatch):
    make = "mkdir -p d/e empty; echo 1 > d/e/f; printf '#!/bin/sh\\necho ran' > s.sh; chmod +x s.sh; ln -s d/e/f link"

    async def main():
        async with pool(kind, tmp_path, monkeypatch) as sandboxes:
            first, second = await sandboxes.open(), await sandboxes.open()
            for sandbox in (first, second):
                assert (await sandbox.run(["sh", "-c", make])).exit_code == 0
            snapshot = await first.snapshot()
            assert snapshot == await second.snapshot()
            with tarfile.open(fileobj=io.BytesIO(snapshot)) as tar:
                names = tar.getnames()
            assert names == ["d", "d/e", "d/e/f", "empty", "link", "s.sh"]
            await first.run(["sh", "-c", "rm -rf d; echo changed > s.sh; echo new > new"])
            assert await first.snapshot() != snapshot
            await first.restore(snapshot)
            assert await first.snapshot() == snapshot
            assert (await first.run(["sh", "-c", "./s.sh; cat link"])).stdout == b"ran\n1\n"
            await first.write("d/e/f", b"2")

    asyncio.run(main())


@pytest.mark.slow
def test_snapshots_are_the_same_for_every_kind(tmp_path, monkeypatch):
    async def snapshot(kind):
        (tmp_path / kind).mkdir()
        async with pool(kind, tmp_path / kind, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open(files={"b/c": b"1", "a": b"2"})
            await sandbox.run(["sh", "-c", "ln -s a z; chmod +x a"])
            return await sandbox.snapshot()

    assert len({asyncio.run(snapshot(kind)) for kind in KINDS}) == 1


@pytest.mark.parametrize("kind", ("bubblewrap", "subprocess"))
def test_files_are_not_reached_through_links(kind, tmp_path, monkeypatch):
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "sandboxes").mkdir()

    async def main():
        async with pool(kind, tmp_path / "sandboxes", monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            links = f"ln -s {tmp_path} up; ln -s {tmp_path}/outside out; mkfifo pipe; mkdir d"
            assert (await sandbox.run(["sh", "-c", links])).exit_code == 0
            for path in ("up/outside", "out", "pipe", "d"):
                with pytest.raises(PathError):
                    await sandbox.read(path)
            with pytest.raises(PathError):
                await sandbox.write("up/new", b"")
            with pytest.raises(PathError, match="cannot be replaced"):
                await sandbox.write("d", b"")
            await sandbox.write("out", b"mine")  # takes the link's place
            await sandbox.write("pipe", b"mine")
            assert await sandbox.list() == ["out", "pipe"]
            await sandbox.write("big", b"x" * (LIMITS.file_bytes + 1))
            with pytest.raises(SandboxError, match="more than"):
                await sandbox.read("big")

    asyncio.run(main())
    assert (tmp_path / "outside").read_text() == "secret"


def test_a_directory_that_users_of_sandboxes_cannot_reach_is_refused(tmp_path, monkeypatch):
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)

    async def main():
        async with pool("bubblewrap", tmp_path / "closed" / "inner", monkeypatch):
            pass

    if os.geteuid() == 0:
        with pytest.raises(SandboxError, match=r"cannot pass through .*/closed, whose mode is 700"):
            asyncio.run(main())
    else:
        asyncio.run(main())  # there is one user


def test_places_are_limited_and_given_back(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch, max_open=2) as sandboxes:
            first, _ = await sandboxes.open(), await sandboxes.open()
            third = asyncio.create_task(sandboxes.open())
            await asyncio.sleep(0.05)
            assert not third.done()
            with pytest.raises(PathError):
                await first.write("..", b"")
            await first.close()
            await (await third).write("a", b"")
            assert sandboxes.open_now == 2
        assert sandboxes.open_now == 0

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_process_left_is_removed(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch) as sandboxes:
            left = tmp_path / "rlx-sandboxes-of-a-dead-one"
            (left / "000001").mkdir(parents=True)
            (left / "lock").touch()
            async with pool("bubblewrap", tmp_path, monkeypatch) as others:
                assert not left.exists()
                assert (await (await others.open()).run(["echo", "b"])).stdout == b"b\n"
            assert (await (await sandboxes.open()).run(["echo", "a"])).stdout == b"a\n"  # and nothing of a living one

    asyncio.run(main())


def mounted(path: Path) -> bool:
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


def test_what_another_user_left_is_not_touched_and_links_are_not_followed(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root makes directories of another user")
    home = tmp_path / "home"
    foreign, own = tmp_path / "rlx-sandboxes-of-another", tmp_path / "rlx-sandboxes-of-ours"
    for left in (home, foreign, own):
        left.mkdir()
    for left in (foreign, own):
        (left / "000001").symlink_to(home)
        (left / "lock").touch()
    os.chown(foreign, 12345, 12345)
    in_memory = storage_can_mount(home)

    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch):
            assert foreign.exists()
            assert not own.exists()
            assert mounted(home) == in_memory

    try:
        asyncio.run(main())
    finally:
        storage._unmount(str(home))


def storage_can_mount(path: Path) -> bool:
    with contextlib.suppress(OSError):
        storage._mount(str(path), "size=4096")
        return True
    return False


def test_as_many_as_the_settings_allow_can_be_open(tmp_path):
    async def main():
        async with Sandboxes(dataclasses.replace(config_of("bubblewrap", str(tmp_path)), max_open=512)) as sandboxes:
            await sandboxes.open()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ("bubblewrap", "subprocess"))
def test_closing_ends_what_runs_first(kind, tmp_path, monkeypatch):
    async def main():
        async with pool(kind, tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            busy = "while :; do echo a > a; echo b > b; touch begun; rm -f a b; done; exec sleep 63.5"
            command = asyncio.create_task(sandbox.run(["sh", "-c", busy]))
            while not {"begun"} & set(await listed(sandbox)):
                await asyncio.sleep(0.02)
            await sandbox.close()
            with pytest.raises(asyncio.CancelledError):
                await command
            assert sandboxes.open_now == 0
            assert (await (await sandboxes.open()).run(["echo", "on"])).stdout == b"on\n"

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


async def listed(sandbox):
    with contextlib.suppress(SandboxError):
        return await sandbox.list()
    return []


@pytest.mark.parametrize("kind", ("bubblewrap", "subprocess"))
def test_what_is_wrong_with_the_workspace_is_told_as_such(kind, tmp_path, monkeypatch):
    async def main():
        async with pool(kind, tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            with pytest.raises(WorkspaceError, match="too long"):
                await sandbox.run(["true", "x" * (1 << 18)])
            for words in (["sh", "-c", "a\0b"], ["echo", "\ud800"]):
                with pytest.raises(ValueError, match="halves of surrogate pairs"):
                    await sandbox.run(words)
            with pytest.raises(PathError):
                await sandbox.write("\ud800", b"")
            await sandbox.write("big", b"x" * (LIMITS.file_bytes + 1))
            with pytest.raises(WorkspaceError, match="more than"):
                await sandbox.read("big")
            await sandbox.run(["sh", "-c", "rm big; mkdir -p " + "d/" * 60])
            for look in (sandbox.snapshot, sandbox.list):
                with pytest.raises(WorkspaceError, match="deep"):
                    await look()

    asyncio.run(main())


def test_a_workspace_that_is_full_is_no_failure_of_its_sandbox(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            with monkeypatch.context() as patch:
                patch.setattr(files.os, "fchmod", full)
                with pytest.raises(WorkspaceError, match="No space left"):
                    await sandbox.write("a", b"")
            await sandbox.write("a", b"")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    asyncio.run(main())


def test_one_that_waits_for_no_turn_runs_beside_those_that_have_them_all(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch, max_running=1) as sandboxes:
            sandbox, at_once = await sandboxes.open(), await sandboxes.open(at_once=True)
            waiting_for = asyncio.create_task(sandbox.run(["sleep", "60"]))
            assert (await at_once.run(["echo", "on"])).stdout == b"on\n"
            assert not waiting_for.done()
            waiting_for.cancel()
            await asyncio.wait((waiting_for,))

    asyncio.run(main())


def test_a_cancelled_command_leaves_nothing(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            command = asyncio.create_task(sandbox.run(["sh", "-c", "touch begun; sleep 61.5"]))
            while await sandbox.list() != ["begun"]:
                await asyncio.sleep(0.02)
            command.cancel()
            with pytest.raises(asyncio.CancelledError):
                await command
            assert not programs("61.5")
            assert (await sandbox.run(["echo", "on"])).stdout == b"on\n"

    asyncio.run(main())


def test_a_sandbox_that_does_not_start_is_no_failure_of_its_program(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            monkeypatch.setattr(isolation, "handles", lambda *_: ["--no-such-option"])
            with pytest.raises(SandboxError, match=r"did not start \(exit code 1\): bwrap: Unknown option"):
                await sandbox.run(["true"])
            monkeypatch.undo()

    asyncio.run(main())


def test_one_that_cannot_be_made_leaves_nothing_and_gives_its_place_back(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch, max_open=1) as sandboxes:
            before = sorted(os.listdir(tmp_path / os.listdir(tmp_path)[0]))
            with monkeypatch.context() as patch:
                patch.setattr(storage.Root, "make", fails)
                for _ in range(3):
                    with pytest.raises(SandboxError, match=r"could not be made: .*no room"):
                        await sandboxes.open()
            opening = asyncio.create_task(sandboxes.open())
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert sorted(os.listdir(tmp_path / os.listdir(tmp_path)[0])) == before
            assert (await (await sandboxes.open()).run(["echo", "a"])).stdout == b"a\n"

    def fails(*_):
        raise OSError("no room")

    asyncio.run(main())


def programs(word: str) -> list[str]:
    """Processes of this machine with a word in their command."""
    return [p for p in os.listdir("/proc") if p.isdigit() and word.encode() in command_line(p).split(b"\0")]


def command_line(process: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
        return file.read()
    return b""


ABANDONED = """
import asyncio, sys
from rlx.sandbox.pool import Sandboxes
from tests.sandbox.test_sandboxes import config_of

async def main():
    async with Sandboxes(config_of("bubblewrap", sys.argv[1])) as sandboxes:
        sandbox = await sandboxes.open()
        running = asyncio.create_task(sandbox.run(["sh", "-c", "setsid sleep 62.5 & touch begun; wait"]))
        while not await sandbox.list():
            await asyncio.sleep(0.02)
        print("begun", flush=True)
        await running

asyncio.run(main())
"""


@pytest.mark.slow
def test_when_this_process_is_killed_its_programs_end_and_the_next_one_clears_up(tmp_path, monkeypatch):
    command = [sys.executable, "-c", ABANDONED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ".:kernels"}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert programs("62.5")
        process.kill()
    assert waiting.comes(lambda: not programs("62.5"))
    assert len(list(tmp_path.iterdir())) == 1

    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch):
            assert len(list(tmp_path.iterdir())) == 1

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_missing_bubblewrap_is_said_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch):
            pass

    with pytest.raises(
        SandboxError, match=r"need bwrap, prlimit, setpriv.*apt-get install bubblewrap.*make system-deps"
    ):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_each_kind_says_what_it_protects(tmp_path, monkeypatch):
    async def described(kind):
        async with pool(kind, tmp_path, monkeypatch) as sandboxes:
            return sandboxes.describe()

    isolated, bare = asyncio.run(described("bubblewrap")), asyncio.run(described("subprocess"))
    assert not any("NOT PROTECTED" in text for text in isolated.values())
    assert {name for name, text in bare.items() if "NOT PROTECTED" in text} == {
        "files",
        "network",
        "other processes",
        "system calls",
    }


def test_a_busy_service_is_asked_again_and_a_wrong_key_is_said(tmp_path, monkeypatch):
    async def main():
        async with pool("daytona", tmp_path, monkeypatch, busy=2) as sandboxes:
            sandbox = await sandboxes.open()
            assert (await sandbox.run(["echo", "there"])).stdout == b"there\n"
            monkeypatch.setenv("TEST_DAYTONA_KEY", "wrong")
            with pytest.raises(SandboxError, match="answered with 401: no valid key"):
                async with Sandboxes(sandboxes.config):
                    pass
            monkeypatch.delenv("TEST_DAYTONA_KEY")
            with pytest.raises(SandboxError, match="environment variable TEST_DAYTONA_KEY"):
                async with Sandboxes(sandboxes.config):
                    pass

    asyncio.run(main())


def test_local_sandboxes_are_of_local_kinds(tmp_path):
    config = SandboxConfig("daytona", 1, 1, "", (), "https://x", "", LIMITS)
    with pytest.raises(ValueError, match=r"rlx\.sandbox\.daytona"):
        LocalSandboxes(config)

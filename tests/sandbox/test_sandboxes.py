"""What every kind of sandbox does, and what is of one kind alone."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tarfile

import pytest

from rlx.config.sandbox import SandboxConfig
from rlx.sandbox import files, isolation
from rlx.sandbox.base import Limit, PathError, SandboxError, WorkspaceError
from rlx.sandbox.local import LocalSandboxes
from rlx.sandbox.pool import Sandboxes
from tests.sandbox.kinds import KINDS, LIMITS, LOCAL_FIRST, pool


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


@pytest.mark.parametrize("kind", LOCAL_FIRST)
def test_a_command_that_no_system_takes_is_refused(kind, tmp_path, monkeypatch):
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

    asyncio.run(main())


@pytest.mark.parametrize("kind", ("bubblewrap", "subprocess"))
def test_what_is_wrong_with_the_workspace_is_told_as_such(kind, tmp_path, monkeypatch):
    async def main():
        async with pool(kind, tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            await sandbox.run(["sh", "-c", "mkdir -p " + "d/" * 60])
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


def test_a_sandbox_that_does_not_start_is_no_failure_of_its_program(tmp_path, monkeypatch):
    async def main():
        async with pool("bubblewrap", tmp_path, monkeypatch) as sandboxes:
            sandbox = await sandboxes.open()
            monkeypatch.setattr(isolation, "handles", lambda *_: ["--no-such-option"])
            with pytest.raises(SandboxError, match=r"did not start \(exit code 1\): bwrap: Unknown option"):
                await sandbox.run(["true"])
            monkeypatch.undo()

    asyncio.run(main())


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

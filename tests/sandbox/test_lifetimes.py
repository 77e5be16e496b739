"""How many sandboxes there are at once, and that nothing is left of those that end, however they do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.sandbox import storage
from rlx.sandbox.base import PathError, SandboxError
from rlx.sandbox.pool import Sandboxes
from tests import waiting
from tests.sandbox.kinds import config_of, pool


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
from tests.sandbox.kinds import config_of

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

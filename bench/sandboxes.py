"""What sandboxes cost: to start, to hold, and how many sessions a minute go through them.

    python -m bench.sandboxes [--repeats 30] [--sessions 256]

Both kinds of this machine, interleaved; the ratio is isolated / not isolated. CPU time is that of this process and of
the commands that it waited for.

    opening       an empty workspace made, with its control groups, and removed
    `true`        a command that does nothing, in an open sandbox
    `python3`     one that starts the interpreter and prints
    session       opened, a program written and run, closed: one after the other
    sessions      the same, all started at once; none may be lost
    memory        of the machine for each sandbox of so many that are open at once with a program sleeping in it
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, NamedTuple

from configs import base
from rlx.config.parse import parse
from rlx.config.sandbox import SandboxConfig
from rlx.sandbox.base import Sandbox
from rlx.sandbox.pool import Sandboxes

KINDS: tuple[Literal["bubblewrap", "subprocess"], ...] = ("bubblewrap", "subprocess")
PROGRAM = b"print(sum(range(1000)))\n"
SLEEPERS = 64


class Cost(NamedTuple):
    wall_ms: float
    cpu_ms: float


async def measured(work: Callable[[], Awaitable[object]]) -> Cost:
    start, cpu = time.perf_counter(), _cpu_s()
    await work()
    return Cost(1e3 * (time.perf_counter() - start), 1e3 * (_cpu_s() - cpu))


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


async def session(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.open(files={"program.py": PROGRAM})
    try:
        said = await sandbox.run(["python3", "-I", "-S", "program.py"])
    finally:
        await sandbox.close()
    if said.stdout != b"499500\n":
        raise RuntimeError(f"a session was lost: {said}")


async def empty(sandboxes: Sandboxes) -> None:
    await (await sandboxes.open()).close()


async def command_costs(pools: dict[str, Sandboxes], repeats: int) -> dict[str, dict[str, list[Cost]]]:
    """What -> kind -> the cost of each repeat."""
    opened = {kind: await pool.open() for kind, pool in pools.items()}
    costs: dict[str, dict[str, list[Cost]]] = {}
    for _ in range(repeats):
        for kind, pool in pools.items():
            sandbox: Sandbox = opened[kind]
            work: dict[str, Callable[[], Awaitable[object]]] = {
                "opening": lambda pool=pool: empty(pool),
                "`true`": lambda sandbox=sandbox: sandbox.run(["true"]),
                "`python3`": lambda sandbox=sandbox: sandbox.run(["python3", "-I", "-S", "-c", "print(1)"]),
                "session": lambda pool=pool: session(pool),
            }
            for what, do in work.items():
                costs.setdefault(what, {}).setdefault(kind, []).append(await measured(do))
    return costs


async def many_sessions(pool: Sandboxes, sessions: int) -> Cost:
    async def all_at_once() -> None:
        await asyncio.gather(*(session(pool) for _ in range(sessions)))

    return await measured(all_at_once)


async def memory_each(config: SandboxConfig) -> float:
    """MiB of the machine for each sandbox in which a shell sleeps."""
    async with Sandboxes(dataclasses.replace(config, max_running=SLEEPERS)) as pool:
        before = _available_mib()
        sandboxes = [await pool.open() for _ in range(SLEEPERS)]
        sleeping = [asyncio.create_task(s.run(["sh", "-c", "touch ready; sleep 30; true"])) for s in sandboxes]
        while not all([await s.list() for s in sandboxes]):
            await asyncio.sleep(0.1)
        taken = before - _available_mib()
        for task in sleeping:
            task.cancel()
        await asyncio.gather(*sleeping, return_exceptions=True)
        return taken / SLEEPERS


def _available_mib() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024


def _row(what: str, costs: dict[str, list[Cost]]) -> str:
    wall = {kind: statistics.median(cost.wall_ms for cost in of) for kind, of in costs.items()}
    cpu = {kind: statistics.median(cost.cpu_ms for cost in of) for kind, of in costs.items()}
    cells = [f"{values[kind]:.1f}" for values in (wall, cpu) for kind in KINDS]
    return f"| {what} | {' | '.join(cells)} | {wall['bubblewrap'] / wall['subprocess']:.1f} |"


async def main(repeats: int, sessions: int) -> None:
    tree = base.get_config()
    tree.sandbox.max_open = max(sessions, SLEEPERS)
    config = parse(tree).sandbox
    kinds = {kind: dataclasses.replace(config, kind=kind) for kind in KINDS}
    async with Sandboxes(kinds["bubblewrap"]) as isolated, Sandboxes(kinds["subprocess"]) as bare:
        pools: dict[str, Sandboxes] = dict(zip(KINDS, (isolated, bare)))
        print("| what | isolated, ms | not, ms | CPU, isolated | CPU, not | ratio |\n|:--|--:|--:|--:|--:|--:|")
        for what, costs in (await command_costs(pools, repeats)).items():
            print(_row(what, costs))
        for kind, pool in pools.items():
            cost = await many_sessions(pool, sessions)
            rate = 60e3 * sessions / cost.wall_ms
            print(f"{kind}: {sessions} sessions at once, none lost: {cost.wall_ms / 1e3:.1f} s, {rate:.0f} a minute, "
                  f"{cost.cpu_ms / sessions:.1f} ms of CPU each")  # fmt: skip
    for kind in KINDS:
        print(
            f"{kind}: {await memory_each(kinds[kind]):.2f} MiB for each of {SLEEPERS} sandboxes with a sleeping shell"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="interleaved runs of each cost")
    parser.add_argument("--sessions", type=int, default=256, help="started at once; at most 512")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.repeats, arguments.sessions))

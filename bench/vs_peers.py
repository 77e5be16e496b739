"""rlx beside google-tunix and TRL: whole GRPO steps on the same work, in one run, taking turns.

    make bench-peers          # or: python -m bench.vs_peers [--rounds 6] [--steps 3] [--starts 3] [--json FILE]

Qwen3 of 4 layers, width 256, 4 heads and 2 KV heads of 64, FFN 768, vocabulary 512, float32, the same random weights on
every side; a step is 8 samples of each of 8 prompts of 16 tokens, 64 new tokens each without early stop, rewards,
advantages and an Adam update of every parameter, no KL (bench/peers/work.py). Each side is a process of its own in an
environment of its own that does a step when it is told to, so that only one computes at a time. Generated and trained
tokens, parameters and dtype must be equal or the run fails. Linux only: it reads /proc.

- tokens/s: generated tokens of a step over the median time of a step. Left out are the first steps of a process, and
  the first of each turn: a side that waited for the others gets back the memory that it had given back to a virtual
  machine's host, which a run that does not wait never does.
- first update: from the start of the process to the end of its first update, with imports in the page cache and nothing
  compiled; and once more with a filled compilation cache where the side has one. Medians over `--starts` processes.
- memory: the highest resident set of a process, worker processes added.
- floor: the arithmetic of a step at the best float32 matrix rate that any side reached in this run. Arithmetic is that
  of the model's matrix products and of causal attention, for rows that share nothing: 80 tokens forward to generate, 80
  forward and backward to update, the head on new tokens only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench.peers import work
from bench.peers.environments import ROOT, interpreter

SIDES = ("rlx", "tunix", "trl")
GOALS = {"tunix": 1.8, "trl": 1.25}  # times a peer's tokens/s
STRETCH = {"tunix": 2.5, "trl": 1.6}
PAUSE_S = 0.3  # between two sides, for threads that spin a while after their last product


class SideFailed(RuntimeError):
    """A side ended, or did not do the work."""


class Side(NamedTuple):
    """How a side is started. `cache`: a directory for compiled programs, "" = none, which is all that TRL has."""

    name: str
    model: str
    cache: str
    lanes: int = 2  # of rlx's engine
    huge_pages: bool = True  # what the `rlx` command asks for

    def command(self) -> list[str]:
        if self.name == "rlx":
            return [sys.executable, "-m", "bench.peers.start_rlx", self.model, self.cache, str(self.lanes)]
        return [str(interpreter(self.name)), str(ROOT / "bench" / "peers" / f"{self.name}_grpo.py"), self.model]

    def environment(self) -> dict[str, str]:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        if self.name == "rlx":
            own = {} if self.huge_pages else {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
            return environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])} | own
        environment.pop("PYTHONPATH", None)
        if self.cache:
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": self.cache,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        return environment


class Process:
    """A side that runs."""

    def __init__(self, side: Side, log: IO[str]) -> None:
        self._side, self._log = side, log
        command = side.command()
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command, env=side.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self._tell("step")
        self.made = self._answer()  # parameters, dtypes
        self.counts = self._answer()
        self.first_update = time.perf_counter() - started

    def step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self._tell("step")
        counts = self._answer()
        seconds = time.perf_counter() - started
        self._check(counts)
        return seconds

    def matrix_rate(self) -> float:
        self._tell("rate")
        return self._answer()["rate"]

    def peak_memory(self) -> int:
        """Bytes, of the process and of those it started."""
        return sum(_high_water(pid) for pid in _tree(self._process.pid))

    def page_faults(self) -> int:
        """Minor ones so far, of the process alone."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[7])

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.communicate("stop\n")

    def _check(self, counts: dict[str, Any]) -> None:
        for name in ("generated", "trained"):
            if counts[name] != work.TOKENS:
                raise SideFailed(f"{self._side.name} has {counts[name]} {name} tokens in a step, not {work.TOKENS}")
        if not counts["advantage"] > 0:
            raise SideFailed(f"{self._side.name}: every advantage is zero")

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SideFailed(
                f"{self._side.name} ended with exit code {self._process.wait()}:\n{self._log.read()[-3000:]}"
            )
        return json.loads(line)


@contextlib.contextmanager
def running(side: Side) -> Iterator[Process]:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = Process(side, log)
        try:
            yield process
        finally:
            process.stop()


def _tree(pid: int) -> list[int]:
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [pid, *(p for child in children for p in _tree(child))]


def _high_water(pid: int) -> int:
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def step_flop() -> dict[str, float]:
    """Floating-point operations of a step, generation and update apart; see the module's docstring."""
    query, key_value = work.HEADS * work.HEAD_DIM, work.KV_HEADS * work.HEAD_DIM
    block = work.WIDTH * (2 * query + 2 * key_value + 3 * work.FFN)
    length = work.PROMPT_TOKENS + work.NEW_TOKENS
    pairs = length * (length + 1) / 2  # of a query and a key that it sees
    layers = work.LAYERS * (2 * block * length + 4 * query * pairs)
    forward = work.SEQUENCES * (layers + 2 * work.WIDTH * work.VOCABULARY * work.NEW_TOKENS)
    return {"generation": forward, "update": 3 * forward}


def first_updates(sides: list[Side], starts: int) -> dict[str, float]:
    """Median seconds to the first update, the sides taking turns; a first turn, not counted, fills caches."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(starts + 1 if starts else 0):
        for side in sides:
            with running(side) as process:
                if turn:
                    seconds[side.name].append(process.first_update)
            say(f"{side.name}: first update after {process.first_update:.1f} s{'' if turn else ', not counted'}")
    return {name: statistics.median(values) for name, values in seconds.items() if values}


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def warm_up(processes: dict[str, Process], steps: int) -> None:
    for process in processes.values():
        for _ in range(steps):
            process.step()


def steady(processes: dict[str, Process], rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Seconds of each step by side and round, without the first of each turn. The side that begins is another one in
    each round."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in processes}
    names = list(processes)
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            time.sleep(PAUSE_S)
            processes[name].step()
            seconds[name].append([processes[name].step() for _ in range(steps)])
            say(f"round {turn + 1}, {name}: {', '.join(f'{s:.2f}' for s in seconds[name][-1])} s a step")
    return seconds


def check_equal(processes: dict[str, Process]) -> dict[str, Any]:
    """What every side says that it trains; raises SideFailed where two differ."""
    made = {name: process.made for name, process in processes.items()}
    first = next(iter(made.values()))
    if any(other != first for other in made.values()) or first["dtypes"] != ["float32"]:
        raise SideFailed(f"the sides do not train the same model in float32: {made}")
    return first


def write_model(directory: Path) -> str:
    """What all sides read."""
    rlx = Side("rlx", str(directory / "model"), "")
    command = [sys.executable, "-m", "bench.peers.start_rlx", "--write", rlx.model]
    subprocess.run(command, env=rlx.environment(), check=True)
    return rlx.model


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    model = write_model(directory)
    sides = [Side(name, model, "") for name in arguments.sides]
    cached = [side._replace(cache=str(directory / side.name)) for side in sides if side.name != "trl"]
    first = first_updates(sides, arguments.starts)
    first_cached = first_updates(cached, arguments.starts)
    with contextlib.ExitStack() as stack:
        processes = {side.name: stack.enter_context(running(side)) for side in sides}
        made = check_equal(processes)
        warm_up(processes, arguments.warm_up)
        seconds = steady(processes, arguments.rounds, arguments.steps)
        rates = {name: process.matrix_rate() for name, process in processes.items()}
        memory = {name: process.peak_memory() for name, process in processes.items()}
    floor = sum(step_flop().values()) / max(rates.values())
    results = {
        name: {
            "step_seconds": (middle := statistics.median(s for turn in turns for s in turn)),
            "tokens_per_second": work.TOKENS / middle,
            "share_of_floor": floor / middle,
            "first_update_seconds": first.get(name, processes[name].first_update),
            "first_update_seconds_cached": first_cached.get(name),
            "peak_memory_gib": memory[name] / 2**30,
            "matrix_rate": rates[name],
            "steps": turns,
        }
        for name, turns in seconds.items()
    }
    return {"floor_seconds": floor, "flop": step_flop(), "model": made, "sides": results}


def ratios(result: dict[str, Any], peer: str) -> tuple[float, float, float]:
    """(of the medians, lowest and highest of a round): how many times a peer's tokens/s rlx has."""
    ours, theirs = result["sides"]["rlx"]["steps"], result["sides"][peer]["steps"]
    turns = [statistics.median(b) / statistics.median(a) for a, b in zip(ours, theirs, strict=True)]
    whole = result["sides"]["rlx"]["tokens_per_second"] / result["sides"][peer]["tokens_per_second"]
    return whole, min(turns), max(turns)


def report(result: dict[str, Any]) -> None:
    sides, model = result["sides"], result["model"]
    ours = sides.get("rlx")
    rate = max(side["matrix_rate"] for side in sides.values())
    print(f"{model['parameters']:,} parameters in float32 and {work.TOKENS:,} tokens a step on every side.")
    print(f"Floor: {sum(result['flop'].values()) / 1e9:.0f} GFLOP a step at {rate / 1e9:.0f} GFLOP/s, ", end="")
    print(f"{result['floor_seconds']:.2f} s, {work.TOKENS / result['floor_seconds']:,.0f} tokens/s.\n")
    print(
        "| | tokens/s | s a step | share of the floor | first update, s | with a filled cache, s | peak memory, GiB |"
    )
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for name, side in sides.items():
        cached = side["first_update_seconds_cached"]
        print(
            f"| {name} | {side['tokens_per_second']:,.0f} | {side['step_seconds']:.2f} | {side['share_of_floor']:.0%} "
            f"| {side['first_update_seconds']:.1f} | {f'{cached:.1f}' if cached else '-'} "
            f"| {side['peak_memory_gib']:.2f} |"
        )
    print()
    for peer in (name for name in sides if ours and name in GOALS):
        ratio, low, high = ratios(result, peer)
        first, memory = (ours[key] / sides[peer][key] for key in ("first_update_seconds", "peak_memory_gib"))
        print(
            f"rlx / {peer}: {ratio:.2f} x tokens/s (rounds {low:.2f} to {high:.2f}; goal {GOALS[peer]}, stretch "
            f"{STRETCH[peer]}), {first:.2f} of its time to the first update, {memory:.2f} of its memory"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="of a side in a round")
    parser.add_argument("--warm-up", type=int, default=6, help="steps after the first update that are not counted")
    parser.add_argument(
        "--starts", type=int, default=3, help="processes for the time to the first update; 0: only the one"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--json", type=Path, help="write every number there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(arguments, Path(directory))
    report(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

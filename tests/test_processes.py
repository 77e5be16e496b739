"""Several processes that train together: orders, ends, and a run that is stopped, loses one and goes on elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx import processes, train
from rlx.assemble import batch_rows, device_batch
from rlx.config.errors import ConfigError
from rlx.data.packing import PackingConfig, Trajectory, pack
from rlx.interrupt import EXIT_PREEMPTED
from rlx.parallel.layout import Layout
from rlx.parallel.mesh import Placement, make_mesh
from rlx.processes import Follower, Leader, PeerLost
from tests import tiny_run

# Adam divides gradients by their size: with its eps far below them rounding would move whole weights.
CHANGES = {
    "learner__updates": 10,
    "learner__micro_batch_rows": 4,
    "learner__eps": 1e-3,
    "checkpoint__every": 2,
    "checkpoint__keep": 9,
    "metrics__samples_every": 100,
    "metrics__tensorboard": False,
    "cluster__trainer_layout": "TP2 DP4",
}
EXACT, ELSEWHERE = 1e-6, 1e-4  # the same program, and one that sums in another order: of a parameter's size
LIMIT_S = 600.0


def wait_until(done: Callable[[], object], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.02)


@pytest.fixture
def pair(monkeypatch):
    """A leader with one follower, in one process. Nobody has to leave it."""
    monkeypatch.setattr(processes, "_leave_soon", lambda: None)
    previous = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    mine, theirs = Pipe()
    yield Leader({1: mine}), Follower(theirs)
    for kind, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
        signal.signal(kind, handler)
    mine.close()


def test_orders_come_in_their_order_and_end_with_the_last(pair):
    leader, follower = pair
    leader.tell("update", {"tokens": np.arange(3)})
    leader.tell("save", 4)
    leader.end(75, "stopped by a signal")
    (first, (given,)), *rest = follower.orders()
    assert first == "update"
    assert given["tokens"].tolist() == [0, 1, 2]
    assert rest == [("save", (4,)), ("end", (75, "stopped by a signal"))]


def test_a_signal_to_any_process_reaches_the_first(pair):
    leader, _ = pair
    stopped: list[bool] = []
    leader.watch(lambda: stopped.append(True))
    signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: stopped)


def test_a_process_that_fails_says_why(pair, capsys):
    leader, follower = pair
    follower.failed(ValueError("no such shard"))
    with pytest.raises(PeerLost, match=r"process 1 of the trainer ended \(ValueError: no such shard\)"):
        leader.meet()
    assert "no such shard" in capsys.readouterr().err


def test_a_process_that_is_gone_is_named(pair):
    leader, follower = pair
    follower._connection.close()
    with pytest.raises(PeerLost, match="process 1 of the trainer ended"):
        leader.meet()


def test_each_process_is_told_its_own_and_a_slow_one_keeps_no_one(pair):
    """The second one does not listen: what it is told is more than a pipe holds."""
    leader, follower = pair
    mine, theirs = Pipe()
    both = Leader({1: leader._connections[1], 2: mine})
    large = np.zeros(1 << 20)
    both.tell_each("update", lambda process: large + process)
    both.tell("save", 3)
    orders = follower.orders()
    what, (given,) = next(orders)
    assert (what, given[0]) == ("update", 1.0)
    assert next(orders) == ("save", (3,))
    what, (given,) = theirs.recv()
    assert (what, given[0]) == ("update", 2.0)
    assert theirs.recv() == ("save", (3,))
    theirs.close()
    wait_until(lambda: both._lost)


def test_an_order_that_cannot_be_written_is_a_loss_not_a_silence(pair):
    leader, _ = pair

    def broken(process: int) -> None:
        raise ValueError("no such row")

    leader.tell_each("update", broken)
    wait_until(lambda: leader._lost)
    with pytest.raises(PeerLost, match="no such row"):
        leader.meet()


def test_strangers_neither_end_nor_hold_up_a_start():
    key, settings = b"known", {"a": 1}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        silent = socket.create_connection(address)
        gone = socket.create_connection(address)
        gone.close()
        wrong = threading.Thread(target=_knock, args=(address, b"guessed", 1, settings), daemon=True)
        right = threading.Thread(target=_knock, args=(address, key, 1, settings), daemon=True)
        wrong.start()
        right.start()
        found = processes.welcome(server, key, 2, settings, LIMIT_S)
        assert set(found) == {1}
        threading.Thread(target=_knock, args=(address, key, 1, {"a": 2}), daemon=True).start()
        with pytest.raises(ConfigError, match="process 1 of the trainer was started with other settings"):
            processes.welcome(server, key, 2, settings, LIMIT_S)
        with pytest.raises(PeerLost, match=r"processes \[1\] of the trainer did not connect to port"):
            processes.welcome(server, key, 2, settings, 0.3)
    silent.close()


def _knock(address: tuple[str, int], key: bytes, index: int, settings: dict[str, int]) -> None:
    with contextlib.suppress(AuthenticationError, EOFError, OSError), Client(address, authkey=key) as connection:
        connection.send((index, settings))
        connection.poll(LIMIT_S)


def test_a_part_of_a_batch_has_its_rows_and_the_counts_of_all():
    layout = Layout(dp=4, tp=2)
    placement = Placement(make_mesh(layout), layout)
    assert placement.rows_of(0, 8) == (0, 8)
    mask = np.array([False, True, True, True])
    trajectory = Trajectory(
        np.arange(1, 5, dtype=np.int32), mask, 1.0, np.zeros(4, np.float32), np.zeros(4, np.int32), None
    )
    packed = pack([trajectory] * 4, PackingConfig(row_tokens=4, row_targets=4, rows=4, capacity=1, head_size=0))
    part = batch_rows(packed, 2, 4)
    assert (part.first, part.rows) == (2, 4)
    assert np.array_equal(part.arrays["tokens"], packed.tokens[:, 2:])
    assert part.counts == {"num_targets": 12, "num_sequences": 4}
    [one], [other] = device_batch(packed, placement), device_batch(batch_rows(packed, 0, 4), placement)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_run_needs_to_know_which_process_it_is(tmp_path, monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    recipe = tiny_run.write(tmp_path)
    command = [sys.executable, "-m", "rlx.cli", "train", *tiny_run.arguments(recipe, cluster__trainer_nodes=2)]
    command += ["--config.cluster.trainer_layout=DP2"]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cluster.trainer_nodes = 2: coordinator_address should be defined. Set JAX_COORDINATOR" in done.stderr


def _environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([str(tiny_run.ROOT), str(tiny_run.ROOT / "kernels")])
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS",)}
    return kept | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"} | changes


class Two:
    """Two processes of four devices, which do not outlive the block; their output in files."""

    def __init__(self, recipe: Path, name: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = tiny_run.arguments(
            recipe, run__name=name, cluster__trainer_nodes=2, cluster__gpus_per_node=4, **CHANGES
        )
        self.run = recipe.parent / "runs" / name
        self.logs = [recipe.parent / f"{name}{i}.log" for i in range(2)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "rlx.cli", "train", *words],
                env=_environment(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", JAX_PROCESS_ID=str(i)),
                stdout=log.open("a"),
                stderr=subprocess.STDOUT,
            )
            for i, log in enumerate(self.logs)
        ]

    def wait_for_update(self, update: int) -> None:
        def there() -> bool:
            assert [p.poll() for p in self.processes] == [None, None], self.logs[0].read_text()[-3000:]
            path = self.run / "metrics.jsonl"
            return path.exists() and f'"update": {update},' in path.read_text()

        wait_until(there, LIMIT_S)

    def status(self) -> list[int]:
        return [p.wait(LIMIT_S) for p in self.processes]

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def adapter(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def distance(run: Path, other: Path) -> float:
    one, two = adapter(run), adapter(other)
    return max(float(np.linalg.norm(one[n] - x) / np.linalg.norm(x)) for n, x in two.items())


@pytest.mark.exhaustive
def test_two_processes_train_what_one_does_and_a_checkpoint_of_theirs_goes_on_elsewhere(tmp_path):
    recipe = tiny_run.write(tmp_path)
    # A signal to the second one stops both after the same update.
    with Two(recipe, "two") as two:
        two.wait_for_update(1)
        two.processes[1].send_signal(signal.SIGTERM)
        assert two.status() == [EXIT_PREEMPTED] * 2
    # What they saved goes on; one that is killed ends the other, which says so.
    with Two(recipe, "two") as two:
        two.wait_for_update(5)
        two.processes[1].kill()
        began = time.monotonic()
        assert two.status() == [1, -signal.SIGKILL]
        assert time.monotonic() - began < LIMIT_S / 2
    assert "process 1 of the trainer ended" in two.logs[0].read_text()
    # Again, to the end.
    with Two(recipe, "two") as two:
        assert two.status() == [0, 0]
    # One process with all the devices.
    alone = CHANGES | {"run__name": "one"}
    train.train(tiny_run.config(recipe, **alone))
    assert distance(two.run, two.run.parent / "one") <= EXACT
    # And one with other devices, from the middle of what the two wrote.
    elsewhere = two.run.parent / "elsewhere"
    shutil.copytree(two.run, elsewhere)
    for step in (8, 10):
        shutil.rmtree(elsewhere / "checkpoints" / str(step))
    summary = json.loads((elsewhere / "summary.json").read_text())
    (elsewhere / "summary.json").unlink()
    moved = CHANGES | {"run__name": "elsewhere", "cluster__trainer_layout": "TP2 PP2 CP2"}
    found = train.train(tiny_run.config(recipe, **moved))
    assert found["version"] == summary["version"] == 10
    assert distance(elsewhere, two.run) <= ELSEWHERE


def test_a_layout_of_several_processes_must_be_given(tmp_path):
    recipe = tiny_run.write(tmp_path)
    with pytest.raises(
        ConfigError, match=r"sft.steps = 3: supervised steps run in one process and .*trainer_nodes is 2"
    ):
        tiny_run.config(recipe, cluster__trainer_nodes=2, cluster__trainer_layout="DP2", sft__steps=3, sft__path="x")

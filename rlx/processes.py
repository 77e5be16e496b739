"""Several processes that train together, one a node: the first one leads, the others do on their devices what it does.

`jax.distributed` joins their devices into one mesh. Where process 0 is and which one this is come from the environment:
JAX_COORDINATOR_ADDRESS (host:port of process 0) and JAX_PROCESS_ID, or what SLURM, Open MPI or Kubernetes set, as
`jax.distributed.initialize` reads them; how many there are is cluster.trainer_nodes. Beside jax's own, every process
keeps one connection to process 0, over which it is told what to do next. When a connection ends without a word the
process at its other end is gone, and so is the run: all others leave with a message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlx.config.errors import ConfigError
from rlx.config.parse import to_dict
from rlx.config.schema import Config
from rlx.interrupt import EXIT_PREEMPTED, Preempted

LEAVE_S = 20.0  # for a process to leave by itself once another one is gone; a collective may wait for that for ever
HEARTBEAT_S = 60  # without one a process is taken for dead whose connections did not even end
START_S = 300  # for all processes to be there
NOTE_BYTES = 512


class PeerLost(RuntimeError):
    """Another process of the trainer ended."""


class Peers(Protocol):
    """The other processes, as the first one sees them."""

    def tell(self, what: str, *given: Any) -> None:
        """They do `what` (`rlx.follow`) with these arguments, as the caller does now. Raises PeerLost."""
        ...

    def tell_each(self, what: str, given: Callable[[int], Any]) -> None:
        """As `tell`, with one argument for each, which `given` makes of the process's number; it must not change
        afterwards, as it goes on its way while the caller goes on."""
        ...

    def meet(self) -> None:
        """Until they have done all that they were told. Where they compile a collective of theirs may come late, and
        some kinds wait for half a minute only. Raises PeerLost."""
        ...

    def watch(self, stop: Callable[[], None]) -> None:
        """`stop` is called when one of them was told to stop by a signal."""
        ...


class Alone:
    """The one process of a trainer."""

    def tell(self, what: str, *given: Any) -> None:
        return None

    def tell_each(self, what: str, given: Callable[[int], Any]) -> None:
        return None

    def meet(self) -> None:
        return None

    def watch(self, stop: Callable[[], None]) -> None:
        return None


ALONE = Alone()


class Leader:
    """Process 0. connections: by process. Each has a thread that sends, so that none waits for another one's batch."""

    def __init__(self, connections: Mapping[int, Connection]):
        self._connections = dict(connections)
        self._lost = ""
        self._met: queue.Queue[None] = queue.Queue()
        self._asked = threading.Event()
        self._stop: Callable[[], None] | None = None
        self._over = False
        self._outgoing: dict[int, queue.Queue[Callable[[], bytes] | None]] = {i: queue.Queue() for i in connections}
        self._senders = [threading.Thread(target=self._send, args=(i,), daemon=True) for i in connections]
        for sender in self._senders:
            sender.start()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def tell(self, what: str, *given: Any) -> None:
        message = pickle.dumps((what, given))
        for waiting in self._outgoing.values():
            waiting.put(lambda: message)
        self._check()

    def tell_each(self, what: str, given: Callable[[int], Any]) -> None:
        for index, waiting in self._outgoing.items():
            waiting.put(partial(_message_to, index, what, given))
        self._check()

    def _send(self, index: int) -> None:
        """What waits for one of them, in its order, until None."""
        while (make := self._outgoing[index].get()) is not None:
            try:
                self._connections[index].send_bytes(make())
            except OSError:
                self._lose(index, "its connection ended")
            except Exception as error:
                self._lose(index, f"an order to it could not be written: {error!r}")

    def _check(self) -> None:
        if self._lost:
            raise PeerLost(self._lost)

    def meet(self) -> None:
        self.tell("meet")
        missing = len(self._connections)
        while missing:
            with contextlib.suppress(queue.Empty):
                self._met.get(timeout=1)
                missing -= 1
            self._check()

    def watch(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        if self._asked.is_set():
            stop()

    def end(self, status: int, why: str) -> None:
        """The others leave, with this exit status."""
        self._over = True
        with contextlib.suppress(PeerLost):  # what is gone need not be told
            self.tell("end", status, why)
        for waiting in self._outgoing.values():
            waiting.put(None)
        for sender in self._senders:
            sender.join(LEAVE_S)

    def _listen(self) -> None:
        """What they say by themselves: that they failed, or were told to stop."""
        open_connections = {connection: index for index, connection in self._connections.items()}
        while open_connections:
            for connection in wait(list(open_connections)):
                assert isinstance(connection, Connection)
                try:
                    kind, text = connection.recv()
                except (EOFError, OSError):
                    index = open_connections.pop(connection)
                    self._lose(index, "its connection ended")
                    continue
                if kind == "failed":
                    self._lose(open_connections[connection], text)
                elif kind == "met":
                    self._met.put(None)
                else:
                    self._asked.set()
                    if self._stop is not None:
                        self._stop()

    def _lose(self, index: int, why: str) -> None:
        if not self._over and not self._lost:
            self._lost = f"process {index} of the trainer ended ({why}); start all of them again to continue"
            print(f"rlx: {self._lost}", file=sys.stderr, flush=True)
            _leave_soon()


def _message_to(index: int, what: str, given: Callable[[int], Any]) -> bytes:
    return pickle.dumps((what, (given(index),)))


class Follower:
    """Any other process."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._orders: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
        self._over = False
        self._previous = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGTERM, signal.SIGINT)}
        threading.Thread(target=self._listen, name="leader", daemon=True).start()

    def orders(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What process 0 says, until its end: ("end", (status, why)) is the last.

        Raises:
          PeerLost: process 0 is gone.
        """
        while True:
            what, given = self._orders.get()
            if what == "lost":
                raise PeerLost(*given)
            yield what, given
            if what == "end":
                return

    def met(self) -> None:
        """The answer to "meet"."""
        self._connection.send(("met", ""))

    def failed(self, error: BaseException) -> None:
        """Process 0 learns of it; this one leaves, whatever waits for others."""
        _leave_soon()
        with contextlib.suppress(OSError):  # it may be gone itself
            self._connection.send(("failed", f"{type(error).__name__}: {error}"[:NOTE_BYTES]))

    def _listen(self) -> None:
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, OSError):
                text = "process 0 of the trainer ended; start all of them again to continue"
                self._orders.put(("lost", (text,)))
                print(f"rlx: {text}", file=sys.stderr, flush=True)
                _leave_soon()
                return
            self._orders.put(order)
            if order[0] == "end":
                if order[1][0] == 1:  # process 0 failed: it takes no part in what this one may be waiting in
                    _leave_soon()
                return

    def _handle(self, signum: int, frame: Any) -> None:
        """Process 0 decides after which update all of them stop. A second Ctrl-C ends this one where it is."""
        if signum == signal.SIGINT:
            signal.signal(signum, self._previous[signal.SIGINT])
        with contextlib.suppress(OSError):
            self._connection.send(("signal", signal.Signals(signum).name))


def _leave_soon() -> None:
    """What waits for a process that is gone may never come back, the end of this one's interpreter included."""
    timer = threading.Timer(LEAVE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


# ------------------------------------------------------------------------------------------------------------- joining


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Alone | Leader | Follower]:
    """This process's place among those of `config.cluster`; nothing of jax may have run before.

    Raises:
      ConfigError: the environment does not say which process this is, or another one has other settings.
    """
    count = config.cluster.trainer_nodes
    if count <= 1:
        yield ALONE
        return
    _initialize(config)
    if jax.process_index():
        yield Follower(_connect(config))
        return
    leader = Leader(_accept(config, count))
    status, why = 1, "process 0 failed"
    try:
        yield leader
        status, why = 0, ""
    except Preempted:
        status, why = EXIT_PREEMPTED, "stopped by a signal"
        raise
    except BaseException as error:
        why = f"process 0 failed: {error}"
        raise
    finally:
        leader.end(status, why)
        if status == 1:
            _leave_soon()


def _initialize(config: Config) -> None:
    cluster, process = config.cluster, os.environ.get("JAX_PROCESS_ID")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    own_devices = None if "JAX_LOCAL_DEVICE_IDS" in os.environ else list(range(cluster.gpus_per_node))
    try:
        jax.distributed.initialize(
            num_processes=cluster.trainer_nodes,
            process_id=None if process is None else int(process),
            local_device_ids=own_devices,
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
        )
    except ValueError as error:
        raise ConfigError(
            f"config.cluster.trainer_nodes = {cluster.trainer_nodes}: {error} Set JAX_COORDINATOR_ADDRESS=HOST:PORT of "
            "process 0 and JAX_PROCESS_ID, or start the processes by SLURM, Open MPI or Kubernetes"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """Where the others find process 0, and what only they know."""

    host: str
    port: int
    key: str

    def to_bytes(self) -> np.ndarray:
        return np.frombuffer(json.dumps(dataclasses.asdict(self)).encode().ljust(NOTE_BYTES), np.uint8)

    @classmethod
    def read(cls, note: np.ndarray) -> _Meeting:
        return cls(**json.loads(np.asarray(note, np.uint8).tobytes()))


def _accept(config: Config, count: int) -> dict[int, Connection]:
    """Raises ConfigError for a process with other settings, PeerLost where one does not come."""
    host, _, port = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")
    key = secrets.token_hex(16)
    with _listening(int(port) + 1 if host else 0, count) as server:
        meeting = _Meeting(host or socket.gethostname(), server.getsockname()[1], key)
        multihost_utils.broadcast_one_to_all(meeting.to_bytes())
        return welcome(server, key.encode(), count, to_dict(config), START_S)


def _listening(port: int, count: int) -> socket.socket:
    """On that port, and where it is taken on any other one."""
    try:
        return socket.create_server(("", port), backlog=2 * count)
    except OSError as error:
        server = socket.create_server(("", 0), backlog=2 * count)
        print(f"rlx: port {port} is not free ({error}); using {server.getsockname()[1]}", file=sys.stderr, flush=True)
        return server


def welcome(server: socket.socket, key: bytes, count: int, settings: Any, seconds: float) -> dict[int, Connection]:
    """Connections of processes 1 to count - 1, by number. Whoever else comes by, or says nothing, is let be.

    Raises:
      ConfigError: a process has other settings. PeerLost: one did not come in so many seconds.
    """
    found: dict[int, Connection] = {}
    greeted: queue.Queue[tuple[int, Any, Connection]] = queue.Queue()
    until = time.monotonic() + seconds
    server.settimeout(0.1)
    while len(found) < count - 1:
        if time.monotonic() > until:
            missing = sorted(set(range(1, count)) - found.keys())
            port = server.getsockname()[1]
            raise PeerLost(f"processes {missing} of the trainer did not connect to port {port} within {seconds:.0f} s")
        with contextlib.suppress(TimeoutError):
            own = Connection(server.accept()[0].detach())
            threading.Thread(target=_greet, args=(own, key, greeted), daemon=True).start()
        while not greeted.empty():
            index, theirs, connection = greeted.get()
            if theirs != settings:
                raise ConfigError(f"process {index} of the trainer was started with other settings than process 0")
            found[index] = connection
    return found


def _greet(connection: Connection, key: bytes, greeted: queue.Queue[tuple[int, Any, Connection]]) -> None:
    """Only from one that knows the key is anything read that is more than bytes."""
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        greeted.put((*connection.recv(), connection))
    except (AuthenticationError, EOFError, OSError):
        connection.close()


def _connect(config: Config) -> Connection:
    meeting = _Meeting.read(multihost_utils.broadcast_one_to_all(np.zeros(NOTE_BYTES, np.uint8)))
    connection = Client((meeting.host, meeting.port), authkey=meeting.key.encode())
    connection.send((jax.process_index(), to_dict(config)))
    return connection

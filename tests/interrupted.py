"""`rlx train` that sends itself a signal in the middle of a phase: python -m tests.interrupted SIGKILL update 2 ...

A phase of the tiny model lasts milliseconds, too short to be hit from outside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from rlx import train
from rlx.checkpoint import Checkpoints
from rlx.interrupt import Preemption
from rlx.recorder import Recorder
from rlx.rollout.local import LocalEngine

PHASES: dict[str, tuple[Any, str]] = {  # what is called in a phase; the signal comes when that returns
    "rollout": (LocalEngine, "_collect"),  # some tokens are sampled; of an evaluation too
    "update": (train, "update"),  # the new state is on the device, nothing of it is written
    "record": (Recorder, "update"),  # its metrics and samples are written, its checkpoint is not
    "save": (Checkpoints, "save"),  # files are being written
    "evaluation": (Recorder, "evaluation"),  # the same for an evaluation
    "finish": (train, "summarise"),  # the policy is written, the summary is not
}


@contextlib.contextmanager
def interrupting(name: str, phase: str, count: int) -> Iterator[None]:
    """Signal `name` is sent to this process the `count`-th time that it is in `phase`, which waits for its handler:
    the main thread runs it, and another one would be phases ahead on a busy machine."""
    owner, attribute = PHASES[phase]
    call = getattr(owner, attribute)
    calls = itertools.count(1)
    handle, handled = Preemption._handle, threading.Event()

    def noted(*args: Any) -> None:
        handle(*args)
        handled.set()

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if next(calls) == count:
            os.kill(os.getpid(), getattr(signal, name))
            assert handled.wait(60)
        return result

    with mock.patch.object(owner, attribute, counted), mock.patch.object(Preemption, "_handle", noted):
        yield


if __name__ == "__main__":
    with interrupting(sys.argv[1], sys.argv[2], int(sys.argv[3])):
        sys.exit(train.main(["rlx train", *sys.argv[4:]]))

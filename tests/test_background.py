import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from rlx.background import Background

SLEEPS = """
import time
from rlx.background import Background
begun = Background(1, "sleeper").submit(time.sleep, 600)
while not begun.running():
    time.sleep(0.01)
"""


def test_the_process_ends_while_a_job_runs():
    ended = subprocess.run([sys.executable, "-c", SLEEPS], timeout=100)
    assert ended.returncode == 0


def test_results_and_errors_are_the_jobs():
    background = Background(2, "test")
    assert background.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        background.submit(divmod, 7, 0).result()
    background.close()


def test_what_has_not_begun_is_dropped_and_nothing_more_is_taken():
    background, go, begun = Background(1, "test"), threading.Event(), threading.Event()

    def first():
        begun.set()
        return go.wait(100)

    running, waiting = background.submit(first), background.submit(int)
    assert begun.wait(100)
    background.close()
    go.set()
    assert running.result()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError, match="closed"):
        background.submit(int)


class Large:
    pass


def test_a_job_that_is_done_keeps_none_of_its_arguments():
    background, large = Background(1, "test"), Large()
    seen = weakref.ref(large)
    background.submit(id, large).result()
    del large
    background.submit(int).result()
    assert seen() is None
    background.close()

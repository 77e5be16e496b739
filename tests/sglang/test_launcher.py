"""The launcher by itself, which needs nothing of the engines' environment: whose end is its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from rlx.rollout.servers import LAUNCHER

WAIT_S = 120.0


def status(parent: str) -> int:
    """With which the launcher ends: 1 where it came to look for SGLang, which this Python has not."""
    code = f"import runpy, sys\nsys.modules['sglang'] = None\nrunpy.run_path({str(LAUNCHER)!r}, run_name='__main__')"
    environment = {**os.environ, "RLX_SERVE_PARENT": parent}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=WAIT_S, check=False
    ).returncode


def test_a_launcher_whose_trainer_was_gone_before_it_ran_ends_before_it_does_anything():
    with subprocess.Popen(["true"]) as gone:
        gone.wait(WAIT_S)
        assert status(str(gone.pid)) == -signal.SIGKILL


def test_a_launcher_goes_on_under_its_trainer_and_under_nobody():
    assert status(str(os.getpid())) == 1
    assert status("") == 1

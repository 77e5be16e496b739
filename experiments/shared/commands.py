"""Commands of rlx in a script of cells."""

from __future__ import annotations

import subprocess
import sys


def rlx(
    command: str, *words: object, check: bool = True, lines: int = 4, characters: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A command as it would be typed; the end of what it prints is shown.

    Raises RuntimeError with all that it said where it fails and that is not expected.
    """
    print(f"$ rlx {command} {' '.join(map(str, words))}")
    program = [sys.executable, "-m", "rlx.cli", command, *map(str, words)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    print("\n".join(done.stdout.splitlines()[-lines:])[:characters])
    return done

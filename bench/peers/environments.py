"""The environments of the other sides: one venv each in the repository's root, made when it is missing.

They hold what rlx neither needs nor may import (torch, another jax), at the versions named here. A step of theirs is
measured on a CPU, and the torch for Linux on PyPI is the CUDA build, several GB; where a folder in PIP_FIND_LINKS has a
CPU wheel, that one and the Python that it was made for are taken (PIP_EXTRA_INDEX_URL can name an index that has it).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = {"tunix": ["google-tunix==0.1.7"], "trl": ["trl==1.16.0"]}


def interpreter(name: str) -> Path:
    """The Python of the environment of `name`, which has its requirements installed."""
    directory = ROOT / f".venv-{name}"
    stamp, python = directory / ".installed", directory / "bin" / "python"
    base, requirements = sys.executable, REQUIREMENTS[name]
    wheel = cpu_torch() if name == "trl" else None
    if wheel is not None:
        base, requirements = wheel[0], [f"torch=={wheel[1]}", *requirements]
    wanted = "\n".join(requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {directory} with {base}: {', '.join(requirements)}", file=sys.stderr)
    subprocess.run([base, "-m", "venv", directory], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
    stamp.write_text(wanted)
    return python


def cpu_torch() -> tuple[str, str] | None:
    """(Python, version of torch) of a CPU wheel in PIP_FIND_LINKS whose Python is there."""
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in sorted(Path(folder).glob("torch-*+cpu-cp3*.whl"), reverse=True):
            match = re.match(r"torch-(.+\+cpu)-cp3(\d+)-", wheel.name)
            if match is None or (found := shutil.which(f"python3.{match[2]}")) is None:
                continue
            # The shim of a version manager may carry the name of a Python that is not there: run it.
            if subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
                return found, match[1]
    return None

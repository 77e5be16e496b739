"""Writing a directory whole or not at all, and JSON in it. No jax: the converter of packaged weights uses it too."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

END_BYTES = 1 << 20


@contextlib.contextmanager
def new_directory(path: Path | str) -> Iterator[Path]:
    """Yields an empty directory beside `path`, renamed to it when the block ends and removed when it raises.

    Raises FileExistsError where `path` exists already: half of an old model must not mix with a new one.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it, or name another directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp and safetensors write for the owner alone; a model is for every reader
        for file in temporary.iterdir():
            file.chmod(0o644)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def fingerprint(directory: Path | str) -> str:
    """Tells checkpoints apart without reading them whole: a hash of config.json and both ends of each weight file."""
    digest = hashlib.sha256()
    directory = Path(directory)
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(END_BYTES))
            file.seek(max(size - END_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, or ValueError where the file is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; an object was expected")
    return value

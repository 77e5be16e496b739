"""Versions as directories: each a whole Hugging Face checkpoint with a manifest, written once, whole or not at all.

Every transport takes its tensors from there, so what an engine gets was complete, finite and checksummed before the
engine heard of it. For `disk` the directory is on a file system that the engines share and is synced before it has its
name; for the others it may be memory (/dev/shm).

A file is what is sent at once. One whose tensors the version before has too is not written again but linked: arrays
that two versions share are known by their identity, as LoRA's merge leaves them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.models.description import Architecture, Params
from rlx.models.files import write_json
from rlx.models.hf import to_hf
from rlx.models.hf_config import architecture_config
from rlx.models.hf_names import hf_tensors
from rlx.sync.manifest import ITEMSIZE, Entry, Manifest
from rlx.sync.naming import served_layout_unsupported_reason, served_parts
from rlx.sync.served import served_checksums
from rlx.sync.tensor_files import Written, sync, write_file
from rlx.sync.tensors import Leaves, check_params, host_tensors

BUCKET_BYTES = 256 << 20
THREADS = 3  # two hash, one syncs


@dataclasses.dataclass(frozen=True)
class Staged:
    """A version that is ready to be sent. Files of equal digests hold equal tensors."""

    path: Path
    manifest: Manifest
    digests: Mapping[str, str]

    @property
    def version(self) -> int:
        return self.manifest.version


class Staging:
    """The staged versions of one run.

    Args:
      directory: theirs alone. What an earlier process left unfinished in it is removed.
      dtype: in which the tensors travel: the engines' own, so that what they serve has the manifest's checksums.
      bucket_bytes: of a file, where no single tensor is larger.
      durable: synced to the disk before a version has its name.
      for_cpu: engines on a CPU are expected: what they report, a SHA-256 of all bytes, goes into the manifest.
    """

    def __init__(
        self,
        directory: Path,
        arch: Architecture,
        dtype: str,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        durable: bool = True,
        for_cpu: bool = True,
    ):
        if dtype not in ITEMSIZE:
            raise ValueError(f"weights travel as {', '.join(ITEMSIZE)}, not as {dtype!r}")
        self.directory, self.arch, self.dtype = directory, arch, dtype
        self.bucket_bytes, self.durable = bucket_bytes, durable
        self.written_bytes = 0  # by the last `stage`
        self._tensors = hf_tensors(arch)
        known = for_cpu and served_layout_unsupported_reason(self._tensors) is None
        self._parts = served_parts(self._tensors) if known else {}
        self._last: tuple[Staged, Leaves] | None = None
        if jax.process_index():
            return  # the first one writes
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".v*"):
            shutil.rmtree(left)

    def stage(self, params: Params, version: int) -> Staged | None:
        """Writes `params` as `version`. On several hosts every process calls it; the first one writes, others get None.

        Raises StagingError for weights that must not be served, OSError where the disk is full or not there.
        """
        check_params(self.arch, params)
        linked, moved = self._shared(params)
        kept = {name for file in linked for name in self._last[0].manifest.names(file)} if self._last else set()
        written = [name for name in self._tensors if name not in kept]
        # What did not change and what did are in files of their own: next time the former can be linked.
        groups = [n for n in written if n not in moved], [n for n in written if n in moved]
        files = [names for group in groups for names in self._plan(group)]
        # Slices are made when they are asked for: all at once they would be the model a second time.
        ordered = (pair for group in groups for pair in _only(to_hf(self.arch, params), set(group)))
        arrays = host_tensors(ordered, jnp.dtype(self.dtype))
        if jax.process_index():
            for _ in arrays:
                continue
            return None
        try:
            staged = self._write(version, linked, files, arrays)
        finally:
            if jax.process_count() > 1:  # the others gather all of them, whatever became of this one's disk
                collections.deque(arrays, maxlen=0)
        self._last = staged, Leaves(params)
        return staged

    def _shared(self, params: Params) -> tuple[list[str], set[str]]:
        """Files of the last version that can be linked, and the names of all tensors that may have changed.

        On several hosts there are none: all of them must gather the same, and only one knows the files.
        """
        if self._last is None or jax.process_count() > 1 or not self._last[0].path.is_dir():
            return [], set(self._tensors)
        staged, leaves = self._last
        paths = leaves.changed(params)
        moved = {name for name, tensor in self._tensors.items() if tensor.path in paths}
        return [file for file in staged.manifest.files if moved.isdisjoint(staged.manifest.names(file))], moved

    def _plan(self, names: Sequence[str]) -> list[list[str]]:
        """Names by file; a file exceeds `bucket_bytes` only by a single tensor."""
        itemsize = ITEMSIZE[self.dtype]
        files: list[list[str]] = []
        filled = self.bucket_bytes
        for name in names:
            size = itemsize * int(np.prod(self._tensors[name].shape))
            if not files or filled + size > self.bucket_bytes:
                files.append([])
                filled = 0
            files[-1].append(name)
            filled += size
        return files

    def _write(
        self,
        version: int,
        linked: Sequence[str],
        files: Sequence[Sequence[str]],
        arrays: Iterator[tuple[str, np.ndarray[Any, Any]]],
    ) -> Staged:
        with _new_directory(self.directory, version, self.durable) as (out, path), ThreadPoolExecutor(THREADS) as pool:
            entries, served = self._link(linked, out)
            unused = (f for i in itertools.count() if (f := f"model-{version:08d}-{i:05d}.safetensors") not in linked)
            written = [self._write_file(out / file, names, arrays, pool) for names, file in zip(files, unused)]
            for file_written in written:
                entries |= file_written.entries
                served |= file_written.served
            sizes = {entry.file: (out / entry.file).stat().st_size for entry in entries.values()}
            apart = {part: entries[part] for name in self._parts.keys() - served.keys() for part in self._parts[name]}
            served |= served_checksums(out, apart, self.dtype, "cpu", pool)
            for file_written in written:
                file_written.synced.result()
            manifest = Manifest(version, self.dtype, sizes, entries, served)
            manifest.write(out)
            write_json(out / "config.json", architecture_config(self.arch, self.dtype))
            weight_map = {name: entry.file for name, entry in entries.items()}
            index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": weight_map}
            write_json(out / "model.safetensors.index.json", index)
        self.written_bytes = sum(size for file, size in sizes.items() if file not in linked)
        return Staged(path, manifest, manifest.digests())

    def _link(self, files: Sequence[str], out: Path) -> tuple[dict[str, Entry], dict[str, str]]:
        """Files of the last version, linked; their tensors, and the checksums of what is served of them alone."""
        if self._last is None or not files:
            return {}, {}
        previous = self._last[0]
        for file in files:
            os.link(previous.path / file, out / file)
        entries = {name: previous.manifest.tensors[name] for file in files for name in previous.manifest.names(file)}
        whole = [name for name, parts in self._parts.items() if entries.keys() >= set(parts)]
        return entries, {name: previous.manifest.served[name] for name in whole}

    def _write_file(
        self,
        path: Path,
        names: Sequence[str],
        arrays: Iterator[tuple[str, np.ndarray[Any, Any]]],
        pool: ThreadPoolExecutor,
    ) -> Written:
        shapes = {name: self._tensors[name].shape for name in names}
        whole = {name: parts for name, parts in self._parts.items() if shapes.keys() >= set(parts)}
        return write_file(path, shapes, self.dtype, arrays, whole, pool, durable=self.durable)


def _only(tensors: Iterator[tuple[str, Any]], names: set[str]) -> Iterator[tuple[str, Any]]:
    return ((name, array) for name, array in tensors if name in names)


def prune(directory: Path, needed: set[Path], keep: int, named: str = "v*") -> list[Path]:
    """Removes versions that are neither `needed` nor among the `keep` written last; returns them.

    Files that a newer version shares stay: they are linked. One that cannot be removed costs room on the disk, and is
    no reason for a run to fail: a warning says so.
    """
    # By age, not by version: a run that was resumed from an older checkpoint has written higher ones before.
    versions = sorted((path for path in directory.glob(named) if path.is_dir()), key=lambda p: p.stat().st_mtime_ns)
    old = [path for path in versions[: max(0, len(versions) - keep)] if path not in needed]
    return [path for path in old if _removed(path)]


def _removed(path: Path) -> bool:
    try:
        shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} is not needed any more and cannot be removed ({error}); remove it", stacklevel=3)
        return False
    return True


@contextlib.contextmanager
def _new_directory(parent: Path, version: int, durable: bool) -> Iterator[tuple[Path, Path]]:
    """An empty directory and the path that it has when the block ends; removed when it raises."""
    path, again = parent / f"v{version:08d}", 0
    while path.exists():  # a resumed run comes to a version for the second time; engines may still read the first
        again += 1
        path = parent / f"v{version:08d}.{again}"
    out = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=parent))
    try:
        yield out, path
        out.chmod(0o755)  # mkdtemp makes it for the owner alone; engines may run as others
        if durable:
            for name in ("manifest.json", "config.json", "model.safetensors.index.json"):
                sync(out / name)
            sync(out)
        os.rename(out, path)
        if durable:
            sync(parent)
    except BaseException:
        shutil.rmtree(out)
        raise

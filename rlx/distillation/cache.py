"""Scores of frozen policies by content: the same sample under the same policy is scored once, whoever asks again."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Scores = dict[str, np.ndarray]

SECONDS = 60.0  # that another process may hold the file


class ScoreCache:
    """A file of arrays by key, which several processes may use at once; path "" keeps nothing."""

    def __init__(self, path: str):
        self.hits = self.misses = 0
        self._file: sqlite3.Connection | None = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=SECONDS)
            self._file.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, arrays BLOB NOT NULL)")
            self._file.commit()

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Scores]:
        """What is known."""
        if self._file is None:
            return {}
        found: dict[bytes, Scores] = {}
        for key in keys:
            row = self._file.execute("SELECT arrays FROM scores WHERE key = ?", (key,)).fetchone()
            if row is not None:
                with np.load(io.BytesIO(row[0]), allow_pickle=False) as arrays:
                    found[key] = dict(arrays)
        self.hits += len(found)
        self.misses += len(keys) - len(found)
        return found

    def keep(self, scores: Mapping[bytes, Scores]) -> None:
        if self._file is None:
            return
        rows = []
        for key, arrays in scores.items():
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)  # type: ignore[arg-type]
            rows.append((key, buffer.getvalue()))
        self._file.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)
        self._file.commit()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

"""A signal: what an expert learned over its own base, log expert - log base, as an artefact that is kept and reused.

The file names both models by content and holds where the signal came from and what it cost. It carries a checksum of
itself, so a file that was cut or edited is refused, and so is one whose models have changed since.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.envs.vocabulary import read_vocabulary
from rlx.metrics.jsonl import write_json
from rlx.proxy.contents import Contents, adds_nothing, joined, read_contents
from rlx.proxy.vocabulary import vocabulary_hash

FILE, FORMAT = "signal.json", 1


class SignalError(ValueError):
    """A signal that is missing, damaged, or no longer that of its models."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the two models."""

    path: str
    adapter: str  # a PEFT directory beside `path`, "" = the model alone
    model_hash: str  # of `path`
    hash: str  # of both together
    parameters: int  # of both together
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Signal:
    name: str
    base: Part
    expert: Part
    tokenizer_hash: str
    tokens: int  # ids that the tokenizer has
    alpha: float
    provenance: Mapping[str, Any]  # tasks, updates, reward_before, reward_after, converged, run; what is known of them
    cost: Mapping[str, float]  # seconds, generated_tokens, trained_tokens; what is known of them
    created: str  # ISO 8601, UTC

    @property
    def shares_weights(self) -> bool:
        """Base and expert are one model in memory, and an adapter."""
        return self.base.model_hash == self.expert.model_hash

    @property
    def size_bytes(self) -> int:
        """Of what has to be loaded."""
        return self.expert.size_bytes + (0 if self.shares_weights else self.base.size_bytes)


def read_part(path: str, adapter: str = "") -> Part:
    """A model, or an adapter on it; `path` itself may be an adapter, whose config names its base.

    Paths are made absolute: an artefact is used from other directories too. Raises FileNotFoundError or ValueError for
    directories that are not there or damaged.
    """
    path, adapter = (str(Path(p).absolute()) if p else "" for p in (path, adapter))
    found = read_contents(path)
    if found.adapter_of:
        return read_part(found.adapter_of, path)
    if not adapter:
        return Part(path, "", found.hash, found.hash, found.parameters, found.size_bytes)
    added: Contents = read_contents(adapter)
    return Part(
        path,
        adapter,
        found.hash,
        joined(found.hash, added.hash),
        found.parameters + added.parameters,
        found.size_bytes + added.size_bytes,
    )


def write_signal(directory: Path | str, signal: Signal) -> Path:
    """Raises FileExistsError where there is one already: others may rely on it."""
    path = Path(directory) / FILE
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it, or name another directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = dataclasses.asdict(signal)
    write_json(path, {"format": FORMAT, **content, "checksum": _checksum(content)})
    return path


def read_signal(directory: Path | str) -> Signal:
    """The artefact itself; its models are not looked at. Raises SignalError."""
    path = Path(directory)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise SignalError(f"there is no signal {directory}: make it with `rlx signal create --to={directory}`")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise SignalError(f"{path} is damaged, it is not JSON ({error}); create it again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SignalError(f"{path} is no signal of format {FORMAT}; create it again")
    checksum = content.pop("checksum", None)
    del content["format"]
    if checksum != _checksum(content):
        raise SignalError(f"{path} was edited or damaged: its checksum is not that of its content; create it again")
    return Signal(**content | {"base": Part(**content["base"]), "expert": Part(**content["expert"])})


def check_learned(base: Part, expert: Part) -> None:
    """Raises SignalError where the expert is its base: log expert - log base is 0 everywhere."""
    if base.hash == expert.hash:
        raise SignalError(f"base and expert have the same weights, {base.hash[:12]}: nothing was learned")
    if _moved(base) == _moved(expert):
        where = expert.adapter or base.adapter
        raise SignalError(
            f"the adapter in {where} leaves its model as it is, each product lora_B lora_A is 0: nothing was learned. "
            "Name an expert that was trained further, or with a higher learner.learning_rate"
        )


def _moved(part: Part) -> str:
    """The hash of what the part computes: that of the model alone where its adapter adds nothing to it."""
    return part.model_hash if part.adapter and adds_nothing(part.adapter) else part.hash


def check_models(signal: Signal) -> None:
    """Raises SignalError where base, expert or tokenizer are gone or not what they were, or the expert is its base."""
    for role, part in (("base", signal.base), ("expert", signal.expert)):
        try:
            now = read_part(part.path, part.adapter)
        except (OSError, ValueError) as error:
            raise SignalError(f"signal {signal.name}: its {role} cannot be read: {error}") from error
        if now.hash != part.hash:
            where = part.adapter or part.path
            raise SignalError(
                f"signal {signal.name}: its {role} in {where} has changed since: its content is {now.hash[:12]}, the "
                f"signal was made of {part.hash[:12]}; create the signal again"
            )
    try:
        check_learned(signal.base, signal.expert)
    except SignalError as error:
        raise SignalError(f"signal {signal.name}: {error}") from error
    try:
        tokenizer = vocabulary_hash(read_vocabulary(signal.base.path))
    except (OSError, ValueError) as error:
        raise SignalError(f"signal {signal.name}: its base has no tokenizer that can be read: {error}") from error
    if tokenizer != signal.tokenizer_hash:
        raise SignalError(
            f"signal {signal.name}: the tokenizer in {signal.base.path} has changed since: {tokenizer[:12]}, the "
            f"signal was made with {signal.tokenizer_hash[:12]}; create the signal again"
        )


def find_signals(directories: list[str]) -> list[tuple[str, Signal | SignalError]]:
    """(where, the signal or what is wrong with it) of every signal in or below directories, by name."""
    files = sorted({file for top in directories for file in Path(top).rglob(FILE)})
    found: list[tuple[str, Signal | SignalError]] = []
    for file in files:
        try:
            found.append((str(file.parent), read_signal(file.parent)))
        except SignalError as error:
            found.append((str(file.parent), error))
    return found


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

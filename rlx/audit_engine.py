"""Does an engine serve what was published? Names, shapes and checksums of its tensors, and what it says of given texts.

The last question is the one that catches weights that never arrived: is the engine nearer to the published version, or
to the one that training began with?
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from rlx.metrics.attribution import TOLERANCE
from rlx.models.hf import to_hf
from rlx.models.hf_names import hf_tensors
from rlx.probing import Policy, logprobs
from rlx.rollout.sglang import SglangEngine
from rlx.rollout.sglang_requests import version_label
from rlx.sync.manifest import MAX_NAMED
from rlx.sync.naming import served_layout_unsupported_reason, served_parts
from rlx.sync.served import Part, served_checksum
from rlx.sync.tensors import check_params, host_tensors

RESET_S = 600.0  # for a server to overwrite or add up all its weights
WORST = 10.0  # times the tolerance of the mean: the most that one token may be apart


@dataclasses.dataclass(frozen=True)
class EngineAudit:
    """What was found. Distances: mean |log-prob of the engine - that of the weights| over the texts' tokens, nats."""

    engine: str
    version: int | None  # that was published
    label: str  # what the engine calls its weights
    tensors: int  # whose checksums were compared; 0: see `not_compared`
    missing: tuple[str, ...]  # served names
    unexpected: tuple[str, ...]
    different: tuple[str, ...]
    not_compared: str  # why checksums were not, "" = they were
    tokens: int
    logprob_max: float
    distance_published: float
    distance_initial: float | None
    nearer: Literal["published", "initial", "neither"] | None  # None: there is nothing to tell apart
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """What engines should serve. Its properties are worked out once, and take a while: not on an event loop.

    Args:
      published: in the type that engines serve. Its version, where it has one, is compared with an engine's label.
      initial: version 0; None where it is not known.
      texts: token ids, int32 [N] each, N >= 2.
    """

    published: Policy
    initial: Policy | None
    texts: Sequence[np.ndarray]

    @cached_property
    def logprobs(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Of the texts' tokens after the first, one text after the other: under `published`, under `initial`."""
        wanted = np.concatenate([logprobs(self.published, text) for text in self.texts])
        if self.initial is None:
            return wanted, None
        return wanted, np.concatenate([logprobs(self.initial, text) for text in self.texts])

    @cached_property
    def checksums(self) -> Mapping[str, str]:
        """See `served_checksums`."""
        return served_checksums(self.published)


class AuditFailed(RuntimeError):
    """An engine that does not serve what it should; the message says what is wrong."""


async def audit_engine(engine: SglangEngine, reference: Reference, *, adapter: bool = False) -> EngineAudit:
    """Compares an engine, in service or paused for nothing, with the weights that it should have.

    Args:
      adapter: the engine serves the version as a LoRA adapter, so that its own tensors are the base model's.
    Raises:
      EngineError: it cannot be asked. ValueError: weights that do not fit the model.
    """
    published, served = reference.published, await engine.served()
    reason = "the version is an adapter beside the engine's own tensors" if adapter else ""
    reason = reason or await _incomparable(engine, published)
    names = _Names((), (), (), 0) if reason else await _compare(engine, reference)
    found = np.concatenate([scored.logprobs for scored in await engine.score(reference.texts, 1)])
    wanted, start = await asyncio.to_thread(lambda: reference.logprobs)
    tolerance = TOLERANCE[published.dtype]
    distance = float(np.abs(found - wanted).mean())
    to_initial = None if start is None else float(np.abs(found - start).mean())
    apart = None if start is None else float(np.abs(wanted - start).mean())
    nearer = _nearer(distance, to_initial, apart, tolerance)
    worst = float(np.abs(found - wanted).max())
    label_wrong = not adapter and published.version is not None and served.label != version_label(published.version)
    problems = [
        f"it calls its weights {served.label!r}, not {version_label(published.version or 0)!r}" if label_wrong else "",
        _named("tensors are missing", names.missing),
        _named("tensors are not of the checkpoint", names.unexpected),
        _named("tensors have other contents or shapes than the checkpoint's", names.different),
        _apart(distance, worst, tolerance),
        _whose(nearer, distance, to_initial),
    ]
    return EngineAudit(
        engine=engine.name,
        version=published.version,
        label=served.label,
        tensors=names.compared,
        missing=names.missing,
        unexpected=names.unexpected,
        different=names.different,
        not_compared=reason,
        tokens=len(found),
        logprob_max=worst,
        distance_published=distance,
        distance_initial=to_initial,
        nearer=nearer,
        problems=tuple(p for p in problems if p),
    )


async def audit_start(engine: SglangEngine, load: Callable[[], Awaitable[object]]) -> int:
    """Does every tensor arrive? Overwrites the weights of an idle engine with noise, loads, compares; how many tensors.

    Args:
      load: publishes to this engine what it serves now, by the transport that the run uses. It must send everything.
    Raises:
      AuditFailed: a tensor that the reset did not reach, or that is another after loading than before.
    """
    before = await engine.checksums()
    await engine.http.command("/weights_checker", {"action": "reset_tensors"}, timeout_s=RESET_S)
    noise = await engine.checksums()
    untouched = sorted(name for name in before if noise.get(name) == before[name])
    if untouched:
        raise AuditFailed(f"{engine.name}: " + _named("tensors could not be reset", tuple(untouched)))
    await load()
    after = await engine.checksums()
    wrong = sorted(name for name in before if after.get(name) != before[name])
    if wrong:
        raise AuditFailed(f"{engine.name}: " + _named("tensors did not arrive when they were loaded", tuple(wrong)))
    return len(before)


@dataclasses.dataclass(frozen=True)
class _Names:
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]
    compared: int


async def _compare(engine: SglangEngine, reference: Reference) -> _Names:
    expected, found = await asyncio.to_thread(lambda: reference.checksums), await engine.checksums()
    both = expected.keys() & found.keys()
    return _Names(
        missing=tuple(sorted(expected.keys() - found.keys())),
        unexpected=tuple(sorted(found.keys() - expected.keys())),
        different=tuple(sorted(name for name in both if expected[name] != found[name])),
        compared=len(both),
    )


def served_checksums(policy: Policy) -> dict[str, str]:
    """Of every tensor that a CPU server of one rank makes of the policy, by its served name.

    Raises ValueError for a tree that is not the model's.
    """
    check_params(policy.arch, policy.params)
    arrays = dict(host_tensors(to_hf(policy.arch, policy.params), jnp.dtype(policy.dtype)))
    checksums = {}
    for name, parts in served_parts(arrays).items():
        taken = [(part, arrays.pop(part)) for part in parts]
        checksums[name] = served_checksum([Part(p, a.shape, a.reshape(-1).view(np.uint8)) for p, a in taken], "cpu")
    return checksums


async def _incomparable(engine: SglangEngine, published: Policy) -> str:
    """Why the server's checksums mean nothing here, "" where they do."""
    info = await engine.http.get("/server_info")
    if info.get("device") != "cpu" or info.get("tp_size") != 1:
        return (
            f"the server runs on {info.get('device')} with TP {info.get('tp_size')}: checksums are compared for one "
            "rank on a CPU, log-probs everywhere"
        )
    dtype = info.get("dtype")
    if dtype not in ("auto", published.dtype):
        return f"the server computes in {dtype}, the checkpoint was read as {published.dtype}"
    return served_layout_unsupported_reason(hf_tensors(published.arch)) or ""


def _nearer(
    published: float, initial: float | None, apart: float | None, tolerance: float
) -> Literal["published", "initial", "neither"] | None:
    """Whose log-probs the engine's are nearer to. Policies that are closer than rounding cannot be told apart."""
    if initial is None or apart is None or apart <= tolerance:
        return None
    if min(published, initial) > apart:
        return "neither"
    return "published" if published < initial else "initial"


def _apart(mean: float, worst: float, tolerance: float) -> str:
    if mean <= tolerance and worst <= WORST * tolerance:
        return ""
    return (
        f"its log-probs of the texts are {mean:.3g} nats from the published version's in the mean and {worst:.3g} at "
        f"worst, where {tolerance:g} and {WORST * tolerance:g} are allowed"
    )


def _whose(nearer: str | None, published: float, initial: float | None) -> str:
    if nearer in (None, "published") or initial is None:
        return ""
    if nearer == "initial":
        return (
            f"it is nearer to the initial policy ({initial:.3g} nats) than to the published version ({published:.3g}): "
            "the weights never arrived"
        )
    return f"it is far from the published version ({published:.3g} nats) and from the initial policy ({initial:.3g})"


def _named(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what}: {', '.join(names[:MAX_NAMED])}" if names else ""


def check(audit: EngineAudit) -> None:
    """Raises AuditFailed where the engine does not serve what was published."""
    if not audit.ok:
        raise AuditFailed(f"engine {audit.engine}: {'; '.join(audit.problems)}")

"""What an engine's answer must be before anything is made of it: complete, sensible, and of the versions it served."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlx.rollout.engine import Completion, EngineError, Request, check_completion


def check_answers(request: Request, answers: Any, served: Sequence[int]) -> None:
    """Raises EngineError, with the reason to count it by, for what is no answer to `request`.

    Args:
      served: versions that the engine can have served between sending and answer, oldest first.
    """
    if not isinstance(answers, list) or len(answers) != len(request.seeds):
        count = len(answers) if isinstance(answers, list) else 0
        asked = f"{len(request.seeds)} were asked for"
        raise EngineError(f"request {request.id}: {count} samples came, {asked}", reason="count")
    for answer in answers:
        try:
            check_completion(request, answer)
        except (AttributeError, TypeError, ValueError) as error:
            raise EngineError(f"request {request.id}: {error}", reason="malformed") from error
        left = iter(served)
        # In turn: a version that comes back, or that was not served meanwhile, finds the iterator at its end.
        if not all(any(version == v for v in left) for version in _versions(answer)):
            said = f"version spans {answer.version_spans}, where the engine was given {list(served)}"
            raise EngineError(f"request {request.id}: {said}", reason="version")


def check_parts(request: Request, parts: Sequence[Completion | None], served: Sequence[int]) -> None:
    """The same for what an engine had written when it failed: a part or None for each seed."""
    if len(parts) != len(request.seeds):
        raise EngineError(f"request {request.id}: {len(parts)} parts came", reason="count")
    there = [part for part in parts if part is not None]
    check_answers(dataclasses.replace(request, seeds=request.seeds[: len(there)]), there, served)


def num_sampled(request: Request, answers: Any) -> int:
    """Tokens of whatever came. Answers beyond those asked for are copies: they were not sampled again."""
    asked = list(answers)[: len(request.seeds)] if isinstance(answers, list | tuple) else []
    return sum(len(a.tokens) for a in asked if isinstance(a, Completion))


def _versions(answer: Completion) -> list[int]:
    """Of the spans, without those that go on with the version before."""
    versions = [span.version for span in answer.version_spans]
    return [v for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]

"""Which settings a run may not change once it has begun: what its policy is of, and what its figures compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.parse import to_dict
from rlx.config.schema import Config

# What a checkpoint's arrays mean: the adapter of one model, trained on these tasks and not on the held-out ones.
# Files may move: what is in them is compared where they are read.
POLICY = ("model.dtype", "lora", "tasks", "grader.extract")
# And what makes two evaluations of one run comparable and its samples reproducible.
RUN = (*POLICY, "chat", "tools", "run.seed", "rollout.max_new_tokens", "eval.attempts_per_task", "eval.temperature")


def check_same(saved: Mapping[str, Any], config: Config, keys: Iterable[str], what: str) -> None:
    """Raises ConfigError, a line a key, where `config` differs from the settings `saved` of the run in `what`."""
    now, before = flat(to_dict(config)), flat(saved)
    problems = [
        f"config.{key} = {now.get(key)!r}: {what} was made with {before.get(key)!r}; give that, or another "
        "config.run.name"
        for key in sorted(now.keys() | before.keys())
        if any(key == name or key.startswith(f"{name}.") for name in keys)
        and not key.endswith(".path")
        and now.get(key) != before.get(key)
    ]
    if problems:
        raise ConfigError(*problems)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"learner.updates": 24, ...}; sequences are lists, as JSON gives them back."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = list(value) if isinstance(value, tuple) else value
    return leaves

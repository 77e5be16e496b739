"""Whether the prompts of a run's tasks fit what is to be written behind them."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.config.errors import ConfigError
from rlx.config.schema import Config
from rlx.envs.chat import ChatTokenizer
from rlx.sessions.environments import openings
from rlx.types import Task


def check_prompts(config: Config, tokenizer: ChatTokenizer, tasks: Iterable[Task]) -> dict[str, int]:
    """Tokens of each task's prompt.

    Raises ConfigError where a prompt with rollout.max_new_tokens behind it does not fit the engine's context, or
    begins a session at its limit; ValueError where the chat template does not keep what was said.
    """
    opening = openings(config, tokenizer)
    lengths = {task.id: len(opening(task)) for task in tasks}
    longest = max(lengths, key=lambda name: lengths[name])
    room = config.engine.context - config.rollout.max_new_tokens
    if lengths[longest] > room:
        count = sum(length > room for length in lengths.values())
        raise ConfigError(
            f"config.engine.context = {config.engine.context}: no room for {config.rollout.max_new_tokens} tokens of "
            f"response to {count} of {len(lengths)} tasks; the longest prompt, {longest}, has {lengths[longest]}; "
            f"set at least {lengths[longest] + config.rollout.max_new_tokens}, or leave these tasks out"
        )
    limit = config.producer.session_token_limit
    if 0 < limit <= lengths[longest]:
        raise ConfigError(
            f"config.producer.session_token_limit = {limit}: the longest prompt, {longest}, has {lengths[longest]} "
            f"tokens, so its sessions would end before they began; set at least {lengths[longest] + 1}"
        )
    return lengths

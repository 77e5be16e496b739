"""What the sections `chat` and `tools` and sources with an environment must not say."""

from __future__ import annotations

from typing import Any

from rlx.config.schema import Config

QUESTION = ""  # the environment of a source that only asks and grades: one turn


def chat_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    tools = config.tools
    positive = ("max_turns", "call_seconds", "session_seconds", "output_bytes")
    problems = [
        _said(f"tools.{name}", value, "must be above 0") for name in positive if not (value := vars(tools)[name]) > 0
    ]
    if tools.call_seconds > tools.session_seconds:
        why = f"config.tools.session_seconds = {tools.session_seconds} ends the session before; set at most that"
        problems.append(_said("tools.call_seconds", tools.call_seconds, why))
    return problems + _sessions(config)


def several_turns(config: Config) -> list[str]:
    """The sources whose sessions have several turns."""
    return [name for name, source in config.tasks.sources.items() if source.environment != QUESTION]


def _sessions(config: Config) -> list[str]:
    """Sessions of several turns must fit the engine and the rows that they are trained in."""
    names = several_turns(config)
    if not names:
        return []
    problems, producer, new = [], config.producer, config.rollout.max_new_tokens
    where = f"config.tasks.sources.{names[0]}.environment = {config.tasks.sources[names[0]].environment!r}"
    if not producer.session_token_limit:
        most = max(1, config.engine.context - new)
        why = f"{where} has sessions of several turns, which grow until something ends them; set at most {most}"
        problems.append(_said("producer.session_token_limit", 0, why))
    longest = producer.session_token_limit + new
    targets = config.learner.row_targets
    if 0 < targets < min(longest, config.tools.max_turns * new):
        why = f"{where}: the turns of one session may be longer together; set 0, or at least {longest}"
        problems.append(_said("learner.row_targets", targets, why))
    most = max(config.rollout.group_size, config.eval.attempts_per_task)
    if 2 * most > config.sandbox.max_open:
        why = f"{where}: the {most} sessions of a task are open together, with a sandbox each and one to grade it"
        problems.append(_said("sandbox.max_open", config.sandbox.max_open, f"{why}; set at least {2 * most}"))
    needed = config.tools.call_seconds + 5.0
    if producer.environment_timeout_s < needed:
        why = f"config.tools.call_seconds = {config.tools.call_seconds} could not be reached; set at least {needed}"
        problems.append(_said("producer.environment_timeout_s", producer.environment_timeout_s, why))
    return problems


def _said(key: str, value: Any, demand: str) -> str:
    return f"config.{key} = {value!r}: {demand}"

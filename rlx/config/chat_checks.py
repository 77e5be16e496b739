"""What the sections `chat` and `tools` and sources with an environment must not say."""

from __future__ import annotations

from rlx.config.errors import said
from rlx.config.profiles import admission
from rlx.config.schema import Config

QUESTION = ""  # the environment of a source that only asks and grades: one turn


def chat_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    tools = config.tools
    positive = ("max_turns", "call_seconds", "session_seconds", "output_bytes")
    problems = [
        said(f"tools.{name}", value, "must be above 0") for name in positive if not (value := vars(tools)[name]) > 0
    ]
    if tools.call_seconds > tools.session_seconds:
        why = f"config.tools.session_seconds = {tools.session_seconds} ends the session before; set at most that"
        problems.append(said("tools.call_seconds", tools.call_seconds, why))
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
        problems.append(said("producer.session_token_limit", 0, why))
    longest = producer.session_token_limit + new
    targets = config.learner.row_targets
    if 0 < targets < min(longest, config.tools.max_turns * new):
        why = f"{where}: the turns of one session may be longer together; set 0, or at least {longest}"
        problems.append(said("learner.row_targets", targets, why))
    problems += _sandboxes(config, where)
    wall_s = config.sandbox.limits.wall_s
    if config.tools.call_seconds > wall_s:
        why = f"config.sandbox.limits.wall_s = {wall_s} ends a call before; set at most that"
        problems.append(said("tools.call_seconds", config.tools.call_seconds, why))
    needed = config.tools.call_seconds + 5.0
    if producer.environment_timeout_s < needed:
        why = f"config.tools.call_seconds = {config.tools.call_seconds} could not be reached; set at least {needed}"
        problems.append(said("producer.environment_timeout_s", producer.environment_timeout_s, why))
    return problems


def _sandboxes(config: Config, where: str) -> list[str]:
    """A session holds its sandbox until it is graded, for which another may be needed: with too few all would wait."""
    together = max(config.rollout.group_size, config.eval.attempts_per_task)
    wanted = {
        2 * together: f"the {together} sessions of a task are open together, with a sandbox each and one to grade it"
    }
    producer, rollout = config.producer, config.rollout
    if producer.max_policy_lag:
        engines = len(config.inference.addresses) or config.inference.count or 1
        slots = admission(config) * (engines if config.engine.kind == "sglang" else 1)
        samples = producer.max_concurrent_samples or max(rollout.tasks_per_update * rollout.group_size, 2 * slots)
        needed = samples + config.grader.workers
        wanted[needed] = (
            f"{samples} sessions are under way (config.producer.max_concurrent_samples), with a sandbox each until "
            f"they are graded, and {config.grader.workers} are being graded"
        )
    most = max(wanted)
    if most <= config.sandbox.max_open:
        return []
    return [said("sandbox.max_open", config.sandbox.max_open, f"{where}: {wanted[most]}; set at least {most}")]

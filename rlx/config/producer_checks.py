"""What the section `producer` must not say."""

from __future__ import annotations

from rlx.config.errors import said
from rlx.config.profiles import admission
from rlx.config.schema import Config

AT_LEAST_ONE = ("sessions_in_flight", "failure_limit")
NOT_NEGATIVE = (
    "max_policy_lag",
    "engine_admission",
    "http_admission",
    "max_concurrent_samples",
    "session_token_limit",
    "train_token_limit",
    "retries",
)
POSITIVE = ("request_timeout_s", "environment_timeout_s", "load_timeout_s", "backoff_s", "outage_s")


def producer_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    rules = (
        (AT_LEAST_ONE, lambda v: v >= 1, "must be at least 1"),
        (NOT_NEGATIVE, lambda v: v >= 0, "must be 0 or more"),
        (POSITIVE, lambda v: v > 0, "must be above 0"),
    )
    values = vars(config.producer)
    problems = [
        said(f"producer.{key}", values[key], demand)
        for keys, holds, demand in rules
        for key in keys
        if not holds(values[key])
    ]
    return problems + _admission(config) + _session_lengths(config)


def _admission(config: Config) -> list[str]:
    producer, slots = config.producer, admission(config)
    problems = []
    if config.engine.kind == "local" and producer.engine_admission not in (0, slots):
        why = f"the embedded engine runs config.engine.slots = {slots} requests at once; set 0, or that key"
        problems.append(said("producer.engine_admission", producer.engine_admission, why))
    if 0 < producer.http_admission < slots:
        why = f"would leave slots of an engine empty that runs {slots} requests at once; set at least that, or 0"
        problems.append(said("producer.http_admission", producer.http_admission, why))
    if 0 < producer.max_concurrent_samples < producer.sessions_in_flight:
        key = f"config.producer.sessions_in_flight = {producer.sessions_in_flight}"
        why = f"{key} could not be reached; set at least that, or 0"
        problems.append(said("producer.max_concurrent_samples", producer.max_concurrent_samples, why))
    if producer.environment_timeout_s < config.grader.timeout_s:
        why = f"config.grader.timeout_s = {config.grader.timeout_s} could not be reached; set at least that"
        problems.append(said("producer.environment_timeout_s", producer.environment_timeout_s, why))
    return problems


def _session_lengths(config: Config) -> list[str]:
    producer, context, new = config.producer, config.engine.context, config.rollout.max_new_tokens
    row, limit = config.learner.row_tokens, config.producer.session_token_limit
    trained = producer.train_token_limit or row
    problems = []
    if trained > row:
        why = f"a sample of that length would not fit in config.learner.row_tokens = {row}; set at most that, or 0"
        problems.append(said("producer.train_token_limit", trained, why))
    if limit and limit + new > context:
        why = f"a last turn of config.rollout.max_new_tokens = {new} would not fit in config.engine.context = {context}"
        problems.append(said("producer.session_token_limit", limit, f"{why}; set at most {context - new}"))
    if limit > trained and not producer.sessions_beyond_training:
        key = "producer.train_token_limit" if producer.train_token_limit else "learner.row_tokens"
        why = (
            f"sessions would be longer than config.{key} = {trained} and not be trained whole; set at most that, or "
            "config.producer.sessions_beyond_training to True"
        )
        problems.append(said("producer.session_token_limit", limit, why))
    return problems

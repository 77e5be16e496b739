"""The configuration as the parts of the asynchronous path take it."""

from __future__ import annotations

from rlx.config.schema import Config
from rlx.rollout.budgets import budgets
from rlx.rollout.fates import Rules
from rlx.rollout.fleet import FleetOptions
from rlx.rollout.producer import ProducerOptions


def rules(config: Config, max_lag: int) -> Rules:
    """max_lag: in updates."""
    producer, rollout = config.producer, config.rollout
    return Rules(
        collection=rollout.tasks_per_update,
        max_lag=max_lag,
        filter_no_signal=rollout.filter_no_signal,
        mask_truncated=rollout.truncated == "mask",
        train_token_limit=producer.train_token_limit or config.learner.row_tokens,
        cut_long=producer.over_limit == "cut",
        return_stale=producer.stale_tasks == "return",
    )


def fleet_options(config: Config) -> FleetOptions:
    producer = config.producer
    return FleetOptions(
        http_admission=producer.http_admission,
        request_timeout_s=producer.request_timeout_s,
        load_timeout_s=producer.load_timeout_s,
        backoff_s=producer.backoff_s,
        outage_s=producer.outage_s,
    )


def producer_options(config: Config, slots: int) -> ProducerOptions:
    """slots: requests that the fleet runs at once (`Fleet.slots`)."""
    producer = config.producer
    return ProducerOptions(
        budgets=budgets(producer, config.rollout, slots),
        gradings=config.grader.workers,
        session_token_limit=producer.session_token_limit,
        environment_timeout_s=producer.environment_timeout_s,
        retries=producer.retries,
        backoff_s=producer.backoff_s,
        failure_limit=producer.failure_limit,
    )

"""Configurations of simulations that take a tenth of a second."""

from __future__ import annotations

from typing import Any

from configs import base
from rlx.config.parse import parse
from rlx.config.schema import Config


def tree(**changes: Any):
    """changes: `producer__max_policy_lag=2`."""
    c = base.get_config()
    c.learner.updates = 24
    c.learner.row_tokens = 2048
    c.rollout.tasks_per_update = 4
    c.rollout.group_size = 4
    c.rollout.max_new_tokens = 512
    c.producer.max_policy_lag = 2
    c.producer.sessions_in_flight = 16
    c.engine.slots = 16
    c.engine.context = 2048
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = c
        for section in sections:
            place = place[section]
        place[key] = value
    return c


def config(**changes: Any) -> Config:
    return parse(tree(**changes))


def hidden(**changes: Any) -> Config:
    """Sessions of several turns, an engine and a trainer that slow each other down: what a fit is to find out."""
    d = base.distribution
    values = {
        "engines__step_seconds": 0.031,
        "engines__step_seconds_per_request": 0.0007,
        "engines__prefill_tokens_per_s": 2500.0,
        "engines__request_seconds": 0.1,
        "engines__load_seconds": 0.4,
        "sessions__tasks": 30,
        "sessions__pass_rate": d(kind="beta", mean=0.35, cv=0.8),
        "sessions__task_cv": 0.3,
        "sessions__prompt_tokens": d(kind="lognormal", mean=90.0, cv=0.4),
        "sessions__turns": d(kind="gamma", mean=2.5, cv=0.5),
        "sessions__response_tokens": d(kind="lognormal", mean=40.0, cv=0.7),
        "sessions__tool_tokens": d(kind="lognormal", mean=20.0, cv=0.7),
        "sessions__tool_seconds": d(kind="gamma", mean=1.5, cv=1.0),
        "sessions__grade_seconds": d(kind="gamma", mean=0.2, cv=0.7),
        "trainer__update_seconds": 1.0,
        "trainer__seconds_per_token": 0.0015,
        "trainer__publish_seconds": 0.2,
        "trainer__other_seconds": 0.1,
        "trainer__engine_slowdown": 1.6,
    }
    return config(**{f"simulate__{key}": value for key, value in values.items()} | changes)

"""What `rlx simulate` must be told of a cluster that is not there: engines, sessions, trainer and their faults.

Everything else is simulated as the rest of the configuration says: admission, sessions in flight, lag, publication,
batch, limits of tokens, number of updates. Lengths are tokens, durations seconds.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class DistributionConfig:
    """Of a length, a duration or a pass rate.

    kind: constant (the mean) | lognormal | gamma | beta (in [0, 1]), by mean and cv | quantiles, interpolated.
    """

    kind: Literal["constant", "lognormal", "gamma", "beta", "quantiles"]
    mean: float
    cv: float  # coefficient of variation, standard deviation / mean
    quantiles: tuple[float, ...]  # values at evenly spaced probabilities, from the smallest (0) to the largest (1)


@dataclasses.dataclass(frozen=True)
class SimulatedEngines:
    """Each of `count` engines decodes one token for each of its n running requests every
    step_seconds + n * step_seconds_per_request; prefill stops decoding while it lasts."""

    count: int
    start_seconds: float  # before the first request
    step_seconds: float
    step_seconds_per_request: float
    request_seconds: float  # that a request holds its slot beside prefill and decoding
    prefill_tokens_per_s: float
    prefix_cache: bool  # a session's next turn prefills only what is new
    load_seconds: float  # to take over published weights; the engine writes nothing meanwhile


@dataclasses.dataclass(frozen=True)
class SimulatedSessions:
    """A session is a prompt, then `turns` responses with a tool's answer between each two, then a grading."""

    tasks: int  # different ones
    pass_rate: DistributionConfig  # over tasks
    task_cv: float  # of a factor on response lengths that a task's samples share
    open_seconds: DistributionConfig  # before the first request, as a sandbox starts
    prompt_tokens: DistributionConfig
    turns: DistributionConfig  # responses, rounded
    response_tokens: DistributionConfig  # of one turn
    tool_tokens: DistributionConfig
    tool_seconds: DistributionConfig
    close_seconds: DistributionConfig  # after the last response, before the grading
    grade_seconds: DistributionConfig  # of one grading; config.grader.workers of them at once


@dataclasses.dataclass(frozen=True)
class SimulatedTrainer:
    """An update takes update_seconds + tokens of its batch * seconds_per_token, on a device that nobody else uses."""

    update_seconds: float
    seconds_per_token: float
    publish_seconds: float  # to send weights out, before the engines load them
    other_seconds: float  # between publication and the next batch: metrics, checkpoints
    engine_slowdown: float  # factor on the engines' seconds while the trainer trains; 1 = on devices of its own
    own_slowdown: float  # factor on its seconds of an update while any engine has a request; 1 = on devices of its own


@dataclasses.dataclass(frozen=True)
class SimulatedFaults:
    engine_failures_per_hour: float  # of one engine
    engine_down_seconds: float
    failed_gradings: float  # fraction


@dataclasses.dataclass(frozen=True)
class SimulateConfig:
    token_grain: int  # tokens that one simulated token stands for; more is faster, and rounds lengths
    engines: SimulatedEngines
    sessions: SimulatedSessions
    trainer: SimulatedTrainer
    faults: SimulatedFaults

"""What is sent to an SGLang server to generate and to score, checked before it leaves.

A server dies of a token id beyond its vocabulary, samples on from NaN, and leaves its log-probs as they were before
top-p or top-k: what it cannot be trusted to refuse is refused here.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from typing import Any, Literal

import numpy as np
import orjson

from rlx.rollout.engine import Request, RequestRefused, check_request

# How top-K heads travel: float32 and int32 arrays in base64, flat lists of numbers, or lists of [log-prob, id, text].
HeadForm = Literal["base64", "flat", "nested"]

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests are checked against and answers are held to."""

    vocab_size: int
    context: int  # tokens, prompt and response
    head_size: int = 0  # K
    stop_ids: tuple[int, ...] = ()  # none: a response has max_new_tokens
    head_form: HeadForm = "base64"

    def new_tokens(self, request: Request) -> int:
        """The most that a response to it may have."""
        return min(request.max_new_tokens, self.context - len(request.prompt))


def version_label(version: int) -> str:
    """What a server is told that its weights are; it writes it beside every token."""
    return str(version)


def adapter_name(version: int) -> str:
    """Of the LoRA adapter of a version. A name is never used twice: a server may bring an unloaded one back."""
    return f"rlx-{version}"


def new_rid() -> str:
    """A server aborts every request whose id *begins* with the one that it is given: all are of one length."""
    return uuid.uuid4().hex


def check_generate(request: Request, limits: Limits) -> None:
    """Raise RequestRefused for what must not be sent."""
    check_request(request, limits.vocab_size, limits.context)
    if not math.isfinite(request.temperature):
        raise RequestRefused(f"request {request.id}: temperature {request.temperature} is not finite")


def generate_body(request: Request, sample: int, rid: str, limits: Limits, adapter: str | None) -> bytes:
    """JSON of POST /generate for one sample of a request."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": np.ascontiguousarray(request.prompt),
        "sampling_params": {
            "temperature": request.temperature,
            "max_new_tokens": limits.new_tokens(request),
            "stop_token_ids": limits.stop_ids,
            "ignore_eos": not limits.stop_ids,
            "sampling_seed": request.seeds[sample],  # of use to servers with --enable-deterministic-inference
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "lora_path": adapter,
    }
    if limits.head_size:
        body["top_logprobs_num"] = limits.head_size
        if limits.head_form != "nested":
            body["return_flat_raw_output_top_logprobs"] = True
            body["return_flat_raw_top_logprobs_b64"] = limits.head_form == "base64"
    return orjson.dumps(body, option=_OPTIONS)


def check_score(tokens: np.ndarray, start: int, limits: Limits) -> None:
    """Raise RequestRefused for what cannot be scored from index `start` on."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not 1 <= start < len(tokens):
        raise RequestRefused(
            f"tokens from {start} on of an array of shape {tokens.shape} and type {tokens.dtype} are to be scored: "
            "1-D token ids, and a start in [1, their number) are needed; nothing predicts the first token"
        )
    if len(tokens) > limits.context:
        raise RequestRefused(f"{len(tokens)} tokens are to be scored in a context of {limits.context}")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise RequestRefused(f"token ids must be in [0, {limits.vocab_size}), got {tokens.min()} to {tokens.max()}")


def score_body(tokens: np.ndarray, start: int, rid: str, head_size: int, adapter: str | None) -> bytes:
    """JSON of POST /generate that generates nothing and returns the log-probs of tokens[start:]."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": np.ascontiguousarray(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,  # of the position that predicts the first of them
        "lora_path": adapter,
    }
    if head_size:
        body["top_logprobs_num"] = head_size
        body["return_flat_raw_top_logprobs"] = body["return_flat_raw_top_logprobs_b64"] = True
    return orjson.dumps(body, option=_OPTIONS)

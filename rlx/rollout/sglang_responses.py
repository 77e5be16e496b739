"""An SGLang server's answers to arrays, and what must hold of them. Pure functions: a worker process runs them, too."""

from __future__ import annotations

import binascii
import dataclasses
from typing import Any

import numpy as np
import orjson

from rlx.algos.head_records import AGREEMENT_TOLERANCE
from rlx.rollout.engine import LOGPROB_TOLERANCE, Completion, EngineError, Request, check_completion
from rlx.types import StopReason, TopK, VersionSpan

_ENDS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
_DTYPES = {"val": "float32", "idx": "int32"}


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """What an answer is held against."""

    request: Request  # without its prompt, where it travels to another process
    rid: str
    prompt_tokens: int
    new_tokens: int  # the most
    vocab_size: int
    head_size: int
    stop_ids: tuple[int, ...]
    version: int | None  # that of the adapter asked for; None: the server says which weights wrote a token


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """What a server says of given tokens, temperature 1. Row i is of token start + i."""

    logprobs: np.ndarray  # float32 [W]
    head: TopK | None  # W rows
    version: int


def parse_completion(body: bytes, asked: Asked) -> Completion | None:
    """The one sample in an answer; None where it was aborted before its first token.

    Raises:
      EngineError: for anything that must not reach the learner; its reason is a short name to count by.
    """
    name = asked.request.id
    output, meta = _answer(body, name)
    finish = meta.get("finish_reason")
    end = _ENDS.get(finish.get("type", "")) if isinstance(finish, dict) else None
    if end is None:
        raise _malformed(name, f"the finish reason {finish!r}")
    if meta.get("id") != asked.rid:
        raise EngineError(f"request {name}: the answer is to {meta.get('id')!r}, not to {asked.rid!r}", reason="mixed")
    if end is StopReason.ABORT and not output:
        return None
    if meta.get("prompt_tokens") != asked.prompt_tokens:
        said = f"{asked.prompt_tokens} prompt tokens were sent, the server counts {meta.get('prompt_tokens')}"
        raise EngineError(f"request {name}: {said}", reason="prompt")
    tokens = _token_ids(output, asked.vocab_size, name)
    logprobs, ids = _token_logprobs(meta.get("output_token_logprobs"), len(tokens), name)
    _check_ids(ids, tokens, name)
    head = _head(meta, "output", len(tokens), min(asked.head_size, asked.vocab_size), name) if asked.head_size else None
    spans = _spans(meta, len(tokens), asked)
    completion = Completion(tokens, logprobs, head, spans, end)
    check_completion(dataclasses.replace(asked.request, max_new_tokens=asked.new_tokens), completion)
    _check_stop(completion, asked)
    _check_membership(completion, name)
    return completion


def parse_score(body: bytes, tokens: np.ndarray, start: int, head_size: int, vocab_size: int, rid: str) -> Scored:
    """What an answer says of tokens[start:]. Raises EngineError."""
    name = f"score {rid}"
    _, meta = _answer(body, name)
    if meta.get("id") != rid:
        raise EngineError(f"{name}: the answer is to {meta.get('id')!r}", reason="mixed")
    triples = meta.get("input_token_logprobs")
    if not isinstance(triples, list) or len(triples) != len(tokens) - start + 1:
        count = len(triples) if isinstance(triples, list) else 0
        raise EngineError(f"{name}: {count} log-probs came for {len(tokens) - start} tokens", reason="short")
    logprobs, ids = _token_logprobs(triples[1:], len(tokens) - start, name)
    # SGLang writes 0 in place of the last id of the vocabulary here; the log-prob beside it is that of the token.
    ids = np.where((ids == 0) & (tokens[start:] == vocab_size - 1), vocab_size - 1, ids)
    _check_ids(ids, tokens[start:], name)
    if not np.isfinite(logprobs).all() or logprobs.max() > LOGPROB_TOLERANCE:
        raise EngineError(f"{name}: log-probs that are not finite numbers <= 0", reason="nonfinite")
    head = _head(meta, "input", len(logprobs), min(head_size, vocab_size), name) if head_size else None
    return Scored(logprobs, head, _version(meta.get("weight_version"), name))


def _answer(body: bytes, name: str) -> tuple[list[int], dict[str, Any]]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _malformed(name, f"{len(body)} bytes that are not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("meta_info"), dict):
        raise _malformed(name, "an answer without meta_info")
    output = value.get("output_ids")
    if not isinstance(output, list):
        raise _malformed(name, "an answer without output_ids")
    return output, value["meta_info"]


def _token_ids(output: list[Any], vocab_size: int, name: str) -> np.ndarray:
    if not all(type(token) is int for token in output):
        raise EngineError(f"request {name}: token ids that are not whole numbers", reason="tokens")
    if output and not 0 <= min(output) <= max(output) < vocab_size:
        said = f"token ids from {min(output)} to {max(output)}, where the vocabulary has {vocab_size}"
        raise EngineError(f"request {name}: {said}", reason="tokens")
    return np.array(output, np.int32)


def _token_logprobs(triples: Any, count: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [W], ids [W]) of W [log-prob, id, text]. A log-prob of null is NaN, which is refused later."""
    if not isinstance(triples, list) or len(triples) != count:
        came = len(triples) if isinstance(triples, list) else 0
        raise EngineError(f"request {name}: {came} log-probs came with {count} tokens", reason="short")
    try:
        logprobs = np.array([triple[0] for triple in triples], np.float32)
        return logprobs, np.array([triple[1] for triple in triples], np.int64)
    except (TypeError, ValueError, IndexError) as error:
        raise _malformed(name, f"log-probs that are no numbers ({error})") from error


def _check_ids(ids: np.ndarray, tokens: np.ndarray, name: str) -> None:
    if not np.array_equal(ids, tokens):
        at = int(np.argmax(ids != tokens))
        said = f"the log-prob at token {at} is of id {ids[at]}, the token has id {tokens[at]}"
        raise EngineError(f"request {name}: {said}", reason="shifted")


def _head(meta: dict[str, Any], side: str, rows: int, size: int, name: str) -> TopK:
    """The heads of `side` ("input" or "output"), in whichever form they came."""
    key = f"{side}_top_logprobs"
    if f"{key}_shape" in meta:
        shape = tuple(meta[f"{key}_shape"])
        ids, logprobs = (_flat(meta, f"{key}_{kind}_flat", kind, name) for kind in ("idx", "val"))
        if shape != (rows, size) or ids.size != rows * size or logprobs.size != rows * size:
            raise EngineError(f"request {name}: heads of shape {shape}, where ({rows}, {size}) was due", reason="head")
    else:
        nested = meta.get(key) or []
        nested = nested[1:] if side == "input" else nested  # nothing predicts the first position
        if len(nested) != rows or any(not isinstance(row, list) or len(row) != size for row in nested):
            raise EngineError(f"request {name}: heads that are not {rows} rows of {size} candidates", reason="head")
        ids = np.array([[entry[1] for entry in row] for row in nested], np.int32)
        logprobs = np.array([[entry[0] for entry in row] for row in nested], np.float32)
    ids, logprobs = ids.reshape(rows, size), logprobs.reshape(rows, size)
    if (logprobs[:, 1:] > logprobs[:, :-1]).any():
        raise EngineError(f"request {name}: heads that are not in descending order", reason="head_order")
    return TopK(ids, logprobs)


def _flat(meta: dict[str, Any], key: str, kind: str, name: str) -> np.ndarray:
    """One flat array: numbers, or base64 of them, little-endian."""
    dtype = np.dtype(_DTYPES[kind]).newbyteorder("<")
    try:
        if f"{key}_b64" in meta:
            if meta[f"{key}_b64_dtype"] != _DTYPES[kind]:
                raise _malformed(name, f"{key} of type {meta[f'{key}_b64_dtype']!r}")
            return np.frombuffer(binascii.a2b_base64(meta[f"{key}_b64"], strict_mode=True), dtype)
        return np.array(meta[key], dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(name, f"heads that cannot be read ({type(error).__name__}: {error})") from error


def _spans(meta: dict[str, Any], written: int, asked: Asked) -> tuple[VersionSpan, ...]:
    """Which version wrote which tokens; where an adapter was asked for, the version is in its name."""
    if asked.version is not None:
        return (VersionSpan(asked.version, 0, written),)
    name, spans = asked.request.id, meta.get("weight_versions")
    if not isinstance(spans, list) or not all(isinstance(s, dict) and {"start", "end"} <= s.keys() for s in spans):
        raise EngineError(f"request {name}: no spans of weight versions, got {spans!r}", reason="spans")
    return tuple(VersionSpan(_version(s.get("version"), name), s["start"], s["end"]) for s in spans)


def _version(label: Any, name: str) -> int:
    if isinstance(label, str) and label.isdecimal():
        return int(label)
    raise EngineError(
        f"request {name}: the server calls its weights {label!r}, which is no version of a run: it was started again, "
        "or by somebody else; give it --weight-version=0, or publish to it",
        reason="version",
    )


def _check_stop(completion: Completion, asked: Asked) -> None:
    """A response ends at its first stop token and for the reason that it gives."""
    at = np.flatnonzero(np.isin(completion.tokens, asked.stop_ids))
    last, name = len(completion.tokens) - 1, asked.request.id
    if len(at) and at[0] != last:
        said = f"goes on after stop token {completion.tokens[at[0]]} at {at[0]}"
    elif completion.stop_reason is StopReason.STOP and not len(at):
        said = (
            f"stopped at token {completion.tokens[last]}, which is no stop token of this run: the server's "
            "generation_config.json or tokenizer has others"
        )
    else:
        return
    raise EngineError(f"request {name}: the response {said}", reason="stop")


def _check_membership(completion: Completion, name: str) -> None:
    """A sampled token that is not among the K likeliest is less likely than they are."""
    head = completion.head
    if head is None or not head.ids.shape[1]:
        return
    inside = (head.ids == completion.tokens[:, None]).any(-1)
    wrong = ~inside & (completion.logprobs > head.logprobs[:, -1] + AGREEMENT_TOLERANCE)
    if wrong.any():
        said = f"{wrong.sum()} of {len(wrong)} tokens are likelier than candidates of their head, and not in it"
        raise EngineError(f"request {name}: {said}; the first is token {wrong.argmax()}: a shift?", reason="head")


def _malformed(name: str, said: str) -> EngineError:
    return EngineError(f"request {name}: the server returned {said}", reason="malformed")

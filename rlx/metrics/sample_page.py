"""A page of a run's samples in one HTML file, to be opened in any browser; it loads nothing from anywhere.

Each token is coloured by how far the trainer's log-prob of it is from the sampler's, where the learner has scored the
sample (`metrics.samples_every`), or by its log-prob or the version that wrote it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlx.envs.chat import ChatTokenizer
from rlx.envs.detokenize import Decode, token_texts
from rlx.metrics.jsonl import encode
from rlx.metrics.shown import num_turns
from rlx.metrics.view import Record, RunView, number, read_run, read_samples, setting

TEMPLATE = Path(__file__).with_name("sample_page.html")
PLACE = "{{DATA}}"
MOST_SAMPLES = 600  # on a page
MOST_SHOWN = 300_000  # tokens on a page, about 10 MB
MOST_TOKENS = 2000  # of a sample; the middle of a longer one is left out
EACH = 8  # best, and as many worst, samples of an update or evaluation


class Ranked(NamedTuple):
    """For heaps: the best has the largest key, and the earlier sample wins a tie."""

    key: tuple[float, int]
    record: Record


def write_page(run: Path, tokenizer: ChatTokenizer | None, to: Path) -> int:
    """Writes the page of the run in `run` and returns how many samples it shows.

    Without a tokenizer, of a run whose model has gone, responses are shown as they were decoded then.

    Raises what `read_run` and `read_samples` do.
    """
    view = read_run(run)
    chosen = choose(read_samples(run))
    data = {"run": _about(view), "samples": [_shown(record, tokenizer) for record in chosen]}
    # Inside a script element only `</` and `<!--` could end or change it.
    text = encode(data).replace("<", "\\u003c")
    to.write_text(TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text), encoding="utf-8")
    return len(chosen)


def choose(records: Iterable[Record]) -> list[Record]:
    """Of every update and evaluation the scored samples, the best and the worst; in the order of the file.

    Where that is too much for a page, updates are left out evenly; the first and the last stay.
    """
    buckets: dict[tuple[int, str], _Bucket] = {}
    for at, record in enumerate(records):
        key = (record["update"], record.get("label", ""))
        buckets.setdefault(key, _Bucket()).add(at, record)
    kept = [bucket.records() for bucket in buckets.values()]
    shown = sum(min(len(record["tokens"]), MOST_TOKENS) for records in kept for record in records)
    every = max(1, math.ceil(sum(map(len, kept)) / MOST_SAMPLES), math.ceil(shown / MOST_SHOWN))
    wanted = [kept[0], *kept[every:-1:every], kept[-1]] if len(kept) > 1 else kept
    return list(itertools.chain.from_iterable(wanted))


class _Bucket:
    """The samples of one update or evaluation, a bounded number of them."""

    def __init__(self) -> None:
        self._best: list[Ranked] = []
        self._worst: list[Ranked] = []
        self._scored: list[tuple[int, Record]] = []

    def add(self, at: int, record: Record) -> None:
        reward = number(record["reward"])
        for heap, key in ((self._best, reward), (self._worst, -reward)):
            heapq.heappush(heap, Ranked((key, -at), record))
            if len(heap) > EACH:
                heapq.heappop(heap)
        if "trainer_logprobs" in record and len(self._scored) < 2 * EACH:
            self._scored.append((at, record))

    def records(self) -> list[Record]:
        found = {-ranked.key[1]: ranked.record for ranked in (*self._best, *self._worst)} | dict(self._scored)
        return [found[at] for at in sorted(found)]


def _about(view: RunView) -> dict[str, Any]:
    config, evaluations = view.config, view.evaluations
    return {
        "name": setting(config, "run.name"),
        "state": view.state,
        "model": Path(str(setting(config, "model.path"))).name,
        "loss": setting(config, "objective.loss"),
        "updates": view.updates[-1]["update"] if view.updates else 0,
        "planned": setting(config, "learner.updates"),
        "temperature": setting(config, "rollout.temperature"),
        "reward": view.series("reward/mean"),
        "pass_rate": view.series("reward/pass_rate"),
        "evaluations": [
            {"label": label, "update": record["update"]}
            | {k: number(record.get(f"eval/{k}")) for k in ("pass_rate", "pass_rate_low", "pass_rate_high")}
            for label, record in evaluations.items()
        ],
    }


def _shown(record: Record, tokenizer: ChatTokenizer | None) -> dict[str, Any]:
    """One sample as the page reads it: short keys, rounded numbers."""
    start, grade = record["prompt_tokens"], record["grade"]
    shown = {
        "update": record["update"],
        "label": record.get("label", ""),
        "task": record["task"],
        "source": record["task"].partition("/")[0],
        "question": record["question"],
        "answer": record["answer"],
        "response": record["response"],
        "reward": number(record["reward"]),
        "stop": record["stop_reason"],
        "outcome": grade.get("outcome", ""),
        "extracted": grade.get("extracted"),
        "detail": grade.get("detail", ""),
        "length": len(record["logprobs"]),
        "turns": num_turns(record),
        "prompt_length": start,
    }
    if tokenizer is None:
        return shown
    decode = written_out(tokenizer)
    return shown | {"prompt": _prompt(record["tokens"][:start], decode), "tokens": list(_tokens(record, decode))}


def _prompt(ids: list[int], decode: Decode) -> str:
    if len(ids) <= MOST_TOKENS:
        return decode(ids)
    half = MOST_TOKENS // 2
    return f"{decode(ids[:half])}\n\n… {len(ids) - 2 * half} tokens left out …\n\n{decode(ids[-half:])}"


def written_out(tokenizer: ChatTokenizer) -> Decode:
    """Decoding with special tokens as their names."""

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # one sequence, one text
        return text

    return decode


def _tokens(record: Record, decode: Decode) -> Iterator[list[Any]]:
    """[text, id, sampler's log-prob, trainer's - sampler's or null, version] of each token after the prompt; all null
    where the policy did not write it. Where the middle is left out: [the number of its tokens]."""
    start, ids = record["prompt_tokens"], record["tokens"]
    written = [(i, version) for version, first, end in record["versions"] for i in range(first, end)]
    trainer = record.get("trainer_logprobs") or [None] * len(written)
    known = {i: (v, number(q), p) for (i, v), q, p in zip(written, record["logprobs"], trainer, strict=True)}
    left_out = range(start + MOST_TOKENS // 2, len(ids) - MOST_TOKENS // 2)
    for i, text in enumerate(token_texts(decode, ids[start:]), start):
        if i in left_out:
            if i == left_out.start:
                yield [len(left_out)]
        elif i in known:
            version, q, p = known[i]
            yield [text, ids[i], _rounded(q), None if p is None else _rounded(number(p) - q), version]
        else:
            yield [text, ids[i], None, None, None]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

"""Why a run's sampler and trainer disagree: the samples of a samples.jsonl, recomputed under every supposed cause."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.envs.chat import ChatTokenizer
from rlx.metrics import truncation
from rlx.metrics.attribution import Attribution, Probe, attribute
from rlx.probing import HeadMode, Policy, Rows, rows

TEMPERATURES = np.geomspace(0.2, 4.0, 17)
NEEDED = ("tokens", "logprobs", "versions")


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """One sample. Arrays over its W written tokens; `at` are their indices in `tokens`, none of them 0."""

    tokens: np.ndarray  # int32 [N]
    at: np.ndarray  # int [W]
    logprobs: np.ndarray  # float32 [W], the sampler's
    versions: frozenset[int]
    prompt: int  # tokens before the first written one
    question: str | None


def read_drawn(path: Path, phase: str = "train") -> Iterator[Drawn]:
    """The samples of a samples.jsonl that have written tokens; those of the phase where they say one.

    Raises OSError, or ValueError for a line that is no sample.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return  # torn: the file is being written
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(record, dict) or any(key not in record for key in NEEDED):
                lacks = [key for key in NEEDED if not isinstance(record, dict) or key not in record]
                raise ValueError(f"{path}:{number}: a sample has {', '.join(NEEDED)}; this line lacks {lacks}")
            if record.get("phase", phase) == phase and len(record["logprobs"]):
                yield _drawn(record, f"{path}:{number}")


def _drawn(record: Mapping[str, Any], where: str) -> Drawn:
    spans = record["versions"]
    at = np.concatenate([np.arange(start, end) for _, start, end in spans]) if spans else np.empty(0, int)
    logprobs = np.array(record["logprobs"], np.float32)
    tokens = np.array(record["tokens"], np.int32)
    if len(at) != len(logprobs) or (len(at) and not 0 < at.min() <= at.max() < len(tokens)):
        raise ValueError(f"{where}: {len(logprobs)} log-probs, and spans {spans} over {len(tokens)} tokens")
    if not np.isfinite(logprobs).all():
        raise ValueError(f"{where}: log-probs that are not finite")
    return Drawn(tokens, at, logprobs, frozenset(s[0] for s in spans), int(at.min()), record.get("question"))


def choose(samples: Sequence[Drawn], policies: Sequence[Policy], most_tokens: int) -> tuple[Policy, list[Drawn]]:
    """The policy with the most samples that it alone wrote, and those, newest version first; up to `most_tokens`.

    A policy without a version stands for every version. Raises ValueError where no policy wrote any sample.
    """

    def of(policy: Policy) -> list[Drawn]:
        return [s for s in samples if policy.version is None or s.versions == {policy.version}]

    best = max(policies, key=lambda p: (len(of(p)) > 0, -1 if p.version is None else p.version))
    kept, count = [], 0
    for sample in of(best):
        if count and count + len(sample.at) > most_tokens:
            break
        kept.append(sample)
        count += len(sample.at)
    if not kept:
        there = sorted({v for s in samples for v in s.versions})
        have = ", ".join(f"{p.name} (version {p.version})" for p in policies)
        raise ValueError(
            f"the samples were written by versions {there}, and none of them is known: {have}; give the weights of one "
            "with --checkpoint DIR --version N"
        )
    return best, kept


def audit_samples(
    samples: Sequence[Drawn],
    policies: Sequence[Policy],
    temperature: float,
    tokenizer: ChatTokenizer | None = None,
    most_tokens: int = 2000,
) -> Attribution:
    """Names the cause of the gap between the samples' log-probs and what the policy that wrote them says.

    Args:
      policies: the trainer's, of the versions that are known; each is also tried as what a stale engine served.
      temperature: that the samples were drawn at.
      tokenizer: for prompts as other templates would have made them.
    Raises:
      ValueError: no sample is of a known version.
    """
    policy, chosen = choose(samples, policies, most_tokens)
    sampler = np.concatenate([s.logprobs for s in chosen])
    base = Scored(policy, chosen, temperature)
    probes = [
        *shifts(chosen, base.logprob),
        *temperatures(base, sampler, temperature),
        *(
            _probe("stale version", f"against {p.name}", Scored(p, chosen, temperature))
            for p in others(policies, policy)
        ),
        *truncation.renormalised(base.drawn(), sampler),
        *head_probes(policy, policies, chosen, temperature),
        *dtype_probes(policy, chosen, temperature),
        *template_probes(policy, chosen, temperature, tokenizer),
    ]
    return attribute(sampler, base.logprob, probes, policy.dtype, truncation.missing(base.drawn()))


class Scored:
    """What a policy says of the samples' written tokens, one after the other."""

    def __init__(
        self,
        policy: Policy,
        samples: Sequence[Drawn],
        temperature: float,
        *,
        grid: Sequence[float] = (),
        head: Policy | None = None,
        head_mode: HeadMode = "same",
    ):
        self.policy, self.samples, self.temperature = policy, samples, temperature
        own = None if head is None else head.params
        made = [rows(policy, s.tokens, temperature, temperatures=grid, head=own, head_mode=head_mode) for s in samples]
        picked = [Rows(*(x[s.at - 1] for x in row)) for s, row in zip(samples, made, strict=True)]
        self.rows = Rows(*(np.concatenate(parts) for parts in zip(*picked, strict=True)))

    @property
    def logprob(self) -> np.ndarray:
        return self.rows.logprob

    def drawn(self) -> truncation.Drawn:
        return truncation.Drawn(*self.rows[:4])


def _probe(cause: Any, detail: str, scored: Scored) -> Probe:
    return Probe(cause, detail, scored.logprob)


def others(policies: Sequence[Policy], policy: Policy) -> list[Policy]:
    return [p for p in policies if p is not policy]


def shifts(samples: Sequence[Drawn], trainer: np.ndarray) -> list[Probe]:
    """The sampler's value of a token is the trainer's of the next, or of the one before."""
    ends = np.cumsum([len(s.at) for s in samples])
    probes = []
    for step, which in ((1, "next"), (-1, "previous")):
        moved = []
        for part in np.split(trainer, ends[:-1]):
            shifted = np.full(len(part), np.nan, np.float32)
            shifted[max(0, -step) : len(part) - max(0, step)] = part[max(0, step) : len(part) - max(0, -step)]
            moved.append(shifted)
        probes.append(Probe("shift by one", f"against the {which} token's log-prob", np.concatenate(moved)))
    return probes


def temperatures(base: Scored, sampler: np.ndarray, recorded: float) -> Iterator[Probe]:
    """The temperature that comes nearest to the sampler: by grids, each finer, about the best of the one before."""
    grid = TEMPERATURES
    for _ in range(5):
        tempered = Scored(base.policy, base.samples, recorded, grid=grid.tolist()).rows.tempered
        at = int(np.argmin(np.abs(sampler[:, None] - tempered).mean(0)))
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
        best, predicted = float(grid[at]), tempered[:, at]
        grid = np.linspace(low, high, len(grid))
    if abs(best / recorded - 1) > 1e-3:
        detail = f"against log-probs at temperature {best:.3f}, where {recorded:g} is recorded,"
        yield Probe("temperature", detail, predicted)


def head_probes(
    policy: Policy, policies: Sequence[Policy], samples: Sequence[Drawn], temperature: float
) -> Iterator[Probe]:
    """The body is the policy's, the output head computes or is another."""
    mode: HeadMode = "float32" if policy.dtype != "float32" else "bfloat16"
    scored = Scored(policy, samples, temperature, head_mode=mode)
    yield _probe("head", f"with the output head in {mode}", scored)
    for other in others(policies, policy):
        scored = Scored(policy, samples, temperature, head=other)
        yield _probe("head", f"with the output head of {other.name}", scored)


def dtype_probes(policy: Policy, samples: Sequence[Drawn], temperature: float) -> Iterator[Probe]:
    """Weights, or weights and computing, in the other type."""
    other = "bfloat16" if policy.dtype == "float32" else "float32"
    yield _probe("dtype", f"computed in {other}", Scored(policy.cast(other), samples, temperature))
    if policy.dtype == "float32":
        scored = Scored(policy.rounded(), samples, temperature)
        yield _probe("dtype", "with weights rounded to bfloat16", scored)


def template_probes(
    policy: Policy, samples: Sequence[Drawn], temperature: float, tokenizer: ChatTokenizer | None
) -> Iterator[Probe]:
    """The sampler saw another prompt: as a different use of the template would have made it."""
    made = [dict(prompts(s, tokenizer)) for s in samples]
    for name in dict.fromkeys(itertools.chain.from_iterable(made)):
        predicted = []
        for sample, prompt in ((s, m.get(name)) for s, m in zip(samples, made, strict=True)):
            if prompt is None or np.array_equal(prompt, sample.tokens[: sample.prompt]):
                predicted.append(np.full(len(sample.at), np.nan, np.float32))
                continue
            tokens = np.concatenate([prompt, sample.tokens[sample.prompt :]]).astype(np.int32)
            at = sample.at + len(prompt) - sample.prompt
            predicted.append(rows(policy, tokens, temperature).logprob[at - 1])
        yield Probe("template", f"with the prompt {name}", np.concatenate(predicted))


def prompts(sample: Drawn, tokenizer: ChatTokenizer | None) -> Iterator[tuple[str, np.ndarray]]:
    """Other prompts by what is other about them; none is empty."""
    own = sample.tokens[: sample.prompt]
    if len(own) > 1:
        yield "without its first token", own[1:]
        yield "without its last token", own[:-1]
    yield "with its first token twice", np.concatenate([own[:1], own])
    if tokenizer is None or not sample.question:
        return
    bos = tokenizer.tokenizer.bos_token_id
    if bos is not None:
        yield "with BOS before it", np.concatenate([[bos], own])
    bare = dataclasses.replace(tokenizer, system_prompt="")
    yield "as the checkpoint's template makes it", tokenizer.encode_prompt(sample.question)
    yield "without a system message", bare.encode_prompt(sample.question)
    yield "without the suffix", dataclasses.replace(tokenizer, suffix="").encode_prompt(sample.question)
    yield "without a template", _encode(tokenizer, sample.question + tokenizer.suffix)
    rendered = tokenizer.render_prompt(sample.question)
    yield "with white space at its end cut off", _encode(tokenizer, rendered.rstrip())
    yield "without the opening of the assistant's turn", _encode(tokenizer, _unopened(tokenizer, sample.question))


def _encode(tokenizer: ChatTokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.tokenizer.encode(text, add_special_tokens=False), np.int32)


def _unopened(tokenizer: ChatTokenizer, question: str) -> str:
    """The rendered prompt up to the end of the user's turn."""
    system = [{"role": "system", "content": tokenizer.system_prompt}] if tokenizer.system_prompt else []
    messages = [*system, {"role": "user", "content": question + tokenizer.suffix}]
    text = tokenizer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert isinstance(text, str)  # one conversation, one text
    return text

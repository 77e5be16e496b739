"""The table of every metric a run may log: `group/name`, unit, one line of meaning.

The group is the part before the slash: TensorBoard's sections and the custom dashboard follow it. A name may hold one
placeholder in braces (`eval/pass_at_{k}`), which stands for any text without a slash. A metric that is not in the table
does not exist: `check_names`, called on whatever a test run logged, refuses it.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from rlx.metrics.ledger import BINS, UNITS

GROUPS = {
    "reward": "Rewards of the samples collected for an update, before any filter",
    "response": "Lengths and endings of the responses collected for an update",
    "policy": "The objective and the policy, over the trained tokens",
    "offpolicy": "Sampler against trainer: importance weights, KL, sample age",
    "centering": "Score centering",
    "distill": "On-policy distillation",
    "optimizer": "Gradients and parameter updates",
    "batch": "What an update trained on, and how it was packed",
    "train": "Mixtures of experts in the update",
    "ledger": "Every sampled token by the bin it ended in, since the run began",
    "time": "Seconds by phase; phases do not overlap",
    "throughput": "Rates, without the first updates and without evaluation and saving",
    "producer": "Generation beside training: how full each stage was and how long things stayed, since the last update",
    "engine": "Generation engines",
    "grader": "Grading of responses",
    "eval": "Held-out tasks",
    "sft": "Supervised cold start; its step is the optimizer step of that phase",
    "system": "The process and its devices",
}


class Metric(NamedTuple):
    """One row. `chart` joins metrics of one group in one chart of the custom dashboard; "" = a chart of its own."""

    name: str
    unit: str
    meaning: str
    chart: str = ""
    kind: Literal["scalar", "histogram", "text"] = "scalar"

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def description(self) -> str:
        return f"{self.meaning} [{self.unit}]"

    @property
    def pattern(self) -> str:
        """A regular expression that matches exactly the names this row stands for."""
        return "^" + re.sub(r"\\{[a-z_]+\\}", "[^/]+", re.escape(self.name)) + "$"


_SAMPLES: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "mean over samples", "reward"),
    Metric("reward/std", "reward", "standard deviation over samples", "reward"),
    Metric("reward/pass_rate", "fraction", "samples whose reward is that of a pass", "pass rate"),
    Metric("reward/pass_rate_{source}", "fraction", "pass rate of one task source", "pass rate"),
    Metric("reward/no_signal_fraction", "fraction", "groups whose rewards are all equal", "no signal"),
    Metric("reward/all_zero_fraction", "fraction", "groups in which every reward is 0", "no signal"),
    Metric("reward/all_one_fraction", "fraction", "groups in which every reward is 1", "no signal"),
    Metric("reward/no_signal_streak", "collections", "collections in a row without any signal"),
    Metric("reward/distribution", "reward", "rewards of the samples", kind="histogram"),
    Metric("response/length_mean", "tokens", "mean number of tokens written", "length"),
    Metric("response/length_std", "tokens", "standard deviation of the tokens written", "length"),
    Metric("response/length_max", "tokens", "longest response", "length"),
    Metric("response/prompt_length_mean", "tokens", "mean length of the prompts"),
    Metric("response/repetition_fraction", "fraction", "4-grams of a response that it has had before, mean of samples"),
    Metric("response/truncated_fraction", "fraction", "responses cut by a length limit"),
    Metric("response/stop_reason_{reason}", "fraction", "responses that ended for this reason", "stop reasons"),
    Metric("response/length", "tokens", "tokens written", kind="histogram"),
    Metric("response/samples", "text", "some samples with their rewards", kind="text"),
)

_LEARNING: tuple[Metric, ...] = (
    Metric("policy/loss", "nats", "value of the objective's loss"),
    Metric("policy/entropy", "nats", "mean entropy of the trainer's distribution"),
    Metric("policy/logprob_mean", "nats", "mean trainer log-prob of the sampled tokens"),
    Metric("policy/clipped_fraction", "fraction", "tokens whose gradient the loss's own clipping removed"),
    Metric("policy/reference_kl", "nats", "KL to the reference policy"),
    Metric("offpolicy/kl_k1", "nats", "KL sampler to trainer, mean d, d = log q - log p", "KL"),
    Metric("offpolicy/kl_k2", "nats", "the same by mean d^2/2", "KL"),
    Metric("offpolicy/kl_k3", "nats", "the same by mean exp(-d) - 1 + d", "KL"),
    Metric("offpolicy/logprob_gap_mean", "nats", "mean |log p - log q|", "log-prob gap"),
    Metric("offpolicy/logprob_gap_max", "nats", "largest |log p - log q|", "log-prob gap"),
    Metric("offpolicy/logprob_gap", "nats", "log p - log q of the tokens of the shown samples", kind="histogram"),
    Metric("offpolicy/ratio_mean", "ratio", "mean p / q"),
    Metric("offpolicy/ratio_outside_fraction", "fraction", "tokens whose p / q is outside [0.8, 1.25]", "fractions"),
    Metric("offpolicy/truncated_fraction", "fraction", "importance weights cut at their cap", "fractions"),
    Metric("offpolicy/masked_fraction", "fraction", "tokens that the importance mask removed", "fractions"),
    Metric("offpolicy/ess", "fraction", "effective sample size of the behaviour weights, (sum w)^2 / (n sum w^2)"),
    Metric("offpolicy/ess_age_{bin}", "fraction", "the same over tokens of one age bin", "ESS by age"),
    Metric("offpolicy/ess_length_{bin}", "fraction", "the same over samples of one length bin", "ESS by length"),
    Metric("offpolicy/age_mean", "updates", "mean age of the trained tokens", "age"),
    Metric("offpolicy/age_max", "updates", "largest age of a trained token", "age"),
    Metric("offpolicy/age_share_{bin}", "fraction", "share of the trained tokens of this age", "age shares"),
    Metric("offpolicy/age", "updates", "ages of the trained tokens", kind="histogram"),
    Metric("centering/head_mass_sampler", "fraction", "Q: mass of the sampler's head under q", "head mass"),
    Metric("centering/head_mass_trainer", "fraction", "P: mass of the sampler's head under p", "head mass"),
    Metric("centering/coefficient_l1", "1", "L1 norm of the centering coefficients of a token"),
    Metric("centering/truncated_fraction", "fraction", "head weights cut at their cap"),
    Metric("centering/kl_head", "nats", "KL sampler to trainer from the head and the tail's total"),
    Metric("centering/drift_norm", "norm", "norm of the term that carries no reward", "norms"),
    Metric("centering/covariance_norm", "norm", "norm of the term that carries the reward", "norms"),
    Metric("distill/topk_overlap", "fraction", "share of the top-K ids that proxy and target have in common"),
    Metric("distill/local_entropy", "nats", "entropy of the target where it is distilled"),
    Metric("distill/utility_abs_mean", "nats", "mean |u|, u = alpha * signal - lambda * absorbed update"),
    Metric("distill/masked_vocabulary_fraction", "fraction", "ids that one of the two vocabularies lacks"),
    Metric("distill/forwards_per_token", "forwards", "frozen policies that scored a trained token, the cache apart"),
    Metric("optimizer/grad_norm", "norm", "global gradient norm before clipping", "gradient norm"),
    Metric("optimizer/grad_norm_clipped", "norm", "global gradient norm after clipping", "gradient norm"),
    Metric("optimizer/update_norm", "norm", "global norm of the parameter update"),
    Metric("optimizer/learning_rate", "1", "learning rate of this update"),
    Metric("optimizer/skipped_updates", "updates", "updates skipped for a gradient that was not finite, so far"),
    Metric("batch/tokens", "tokens", "tokens in the loss"),
    Metric("batch/samples", "samples", "samples in the batch", "samples and groups"),
    Metric("batch/groups", "groups", "groups in the batch", "samples and groups"),
    Metric("batch/rows", "rows", "packed rows", "rows"),
    Metric("batch/micro_batches", "micro-batches", "micro-batches of the update", "rows"),
    Metric("batch/packing_fraction", "fraction", "share of the packed positions that hold a token", "packing"),
    Metric("batch/bubble", "fraction", "share of a pipeline's time that a stage waits; only with PP above 1"),
    Metric("batch/shared_fraction", "fraction", "share of the samples' tokens that prefix sharing saves", "packing"),
    Metric("train/moe/max_load", "1", "load of a layer's busiest expert over its mean, largest layer", "expert load"),
    Metric("train/moe/load_cv", "1", "deviation of the experts' load over its mean, mean of layers", "expert load"),
    Metric("train/moe/dead_experts", "experts", "experts that no token of the batch came to, all layers"),
    Metric("train/moe/dropped_fraction", "fraction", "choices that came to no expert: no room in an exchange"),
    Metric("train/moe/balance_loss", "1", "E Σ share x mean score of experts; 1 = balanced", "router losses"),
    Metric("train/moe/z_loss", "1", "mean squared logsumexp of the router's logits", "router losses"),
    Metric("train/moe/max_load_layer_{layer}", "1", "the busiest expert's load over the mean, of one layer"),
    Metric("train/moe/load_cv_layer_{layer}", "1", "deviation of the load over its mean, of one layer"),
    Metric("train/moe/dead_experts_layer_{layer}", "experts", "experts that no token came to, of one layer"),
)

_TIME: tuple[Metric, ...] = (
    Metric("time/total_seconds", "s", "wall time of the update, everything included", "total"),
    Metric("time/rollout_seconds", "s", "generation, where the trainer does it itself", "phases"),
    Metric("time/pack_seconds", "s", "packing", "phases"),
    Metric("time/update_seconds", "s", "forward, backward and optimizer", "phases"),
    Metric("time/publish_seconds", "s", "handing the weights to the engines", "phases"),
    Metric("time/audit_seconds", "s", "asking the engines whether they serve what was published", "phases"),
    Metric("time/score_seconds", "s", "scoring under frozen policies, and of the samples that are shown", "phases"),
    Metric("time/log_seconds", "s", "writing metrics and samples", "phases"),
    Metric("time/save_seconds", "s", "checkpoint", "apart"),
    Metric("time/sft_seconds", "s", "supervised cold start, before the first update", "apart"),
    Metric("time/eval_seconds", "s", "evaluation", "apart"),
    Metric("time/wait_share", "fraction", "share of the total in which the trainer did not train for lack of a batch"),
    Metric("throughput/generated_tokens_per_second", "tokens/s", "tokens sampled", "tokens"),
    Metric("throughput/trained_tokens_per_second", "tokens/s", "tokens trained", "tokens"),
    Metric("throughput/samples_per_second", "samples/s", "samples trained"),
    Metric("throughput/updates_per_hour", "updates/h", "updates"),
)


def _producer_metrics() -> tuple[Metric, ...]:
    stages = {
        "sessions": ("sessions", "open sessions"),
        "samples": ("samples", "samples submitted and not yet graded"),
        "permits": ("requests", "requests sent to an engine and not yet answered"),
        "queue": ("requests", "requests that no engine had room for"),
        "ungraded": ("samples", "samples that wait for a grader"),
        "grading": ("samples", "gradings that run"),
        "buffer": ("groups", "graded groups that wait for an update"),
    }
    rows = []
    for name, (unit, meaning) in stages.items():
        rows.append(Metric(f"producer/{name}_occupancy", unit, f"{meaning}, mean over time", f"{name} occupancy"))
        rows.append(Metric(f"producer/{name}_peak", unit, f"{meaning}, largest number", f"{name} occupancy"))
        rows.append(Metric(f"producer/{name}_seconds", "s", f"mean stay: {meaning}", "residence"))
    text = "failures of this kind so far, those that a retry mended included"
    return (*rows, Metric("producer/failures_{kind}", "failures", text, "failures"))


_SERVING: tuple[Metric, ...] = (
    Metric("engine/in_service", "engines", "engines that take requests or load weights"),
    Metric(
        "engine/ejections_{reason}", "ejections", "engines taken out of service for this reason so far", "ejections"
    ),
    Metric("engine/occupancy", "fraction", "mean share of the slots that held a request"),
    Metric("grader/seconds_mean", "s", "mean time of a grading", "seconds"),
    Metric("grader/seconds_max", "s", "longest grading", "seconds"),
    Metric("grader/timeouts", "samples", "gradings killed at their limit so far", "failures"),
    Metric("grader/failures", "samples", "gradings that failed otherwise so far", "failures"),
)

_EVALUATION: tuple[Metric, ...] = (
    Metric("eval/pass_rate", "fraction", "attempts that passed", "pass rate"),
    Metric("eval/pass_rate_low", "fraction", "lower end of its Wilson interval", "pass rate"),
    Metric("eval/pass_rate_high", "fraction", "upper end of its Wilson interval", "pass rate"),
    Metric("eval/pass_rate_{source}", "fraction", "pass rate of one task source", "pass rate by source"),
    Metric("eval/pass_at_{k}", "fraction", "unbiased pass@k", "pass@k"),
    Metric("eval/reward_mean", "reward", "mean reward"),
    Metric("eval/response_length_mean", "tokens", "mean number of tokens written"),
    Metric("eval/truncated_fraction", "fraction", "responses cut by a length limit"),
    Metric("eval/tasks", "tasks", "tasks evaluated", "size"),
    Metric("eval/attempts", "samples", "attempts graded", "size"),
    Metric("eval/failed_gradings", "samples", "attempts without a verdict, counted nowhere else"),
    Metric("eval/tokens", "tokens", "tokens sampled"),
    Metric("eval/samples", "text", "some attempts with their rewards", kind="text"),
    Metric("sft/loss", "nats", "mean negative log-prob of the response tokens", "loss"),
    Metric("sft/validation_loss", "nats", "the same over the validation examples", "loss"),
    Metric("sft/validation_perplexity", "1", "exp of the validation loss"),
    Metric("sft/grad_norm", "norm", "global gradient norm before clipping"),
    Metric("sft/learning_rate", "1", "learning rate of this step"),
    Metric("sft/tokens_per_second", "tokens/s", "tokens trained on, prompts included, since the last record"),
    Metric("sft/packing_fraction", "fraction", "share of the packed positions that hold a token"),
    Metric("sft/epochs", "epochs", "examples trained on over examples there are"),
    Metric("system/host_memory_gib", "GiB", "resident memory of the process", "memory"),
    Metric("system/device_memory_gib", "GiB", "device memory in use", "memory"),
    Metric("system/device_memory_peak_gib", "GiB", "largest device memory in use so far", "memory"),
    Metric("system/compilations", "programs", "programs compiled so far"),
)


def _ledger_metrics() -> tuple[Metric, ...]:
    rows = [Metric("ledger/trained_share", "fraction", "tokens trained over all that reached an end, evaluation apart")]
    for unit in UNITS:
        rows.append(Metric(f"ledger/{unit}_generated", unit, "sampled since the run began", unit))
        rows += [Metric(f"ledger/{unit}_{name}", unit, meaning, unit) for name, meaning in BINS.items()]
        rows.append(Metric(f"ledger/{unit}_failed_{{reason}}", unit, "failed for this reason", f"failed {unit}"))
        if unit != "groups":
            text = "of graded groups, ended by this"
            rows.append(Metric(f"ledger/{unit}_ended_{{reason}}", unit, text, f"{unit} by what ended them"))
    for name in BINS:
        rows.append(
            Metric(f"ledger/tokens_{name}_age_{{age}}", "tokens", "of these, by age in updates", f"{name} by age")
        )
        text = "of these, by tokens written"
        rows.append(Metric(f"ledger/samples_{name}_length_{{length}}", "samples", text, f"{name} by length"))
    return tuple(rows)


METRICS: tuple[Metric, ...] = (
    *_SAMPLES,
    *_LEARNING,
    *_ledger_metrics(),
    *_TIME,
    *_producer_metrics(),
    *_SERVING,
    *_EVALUATION,
)


@functools.cache
def find_metric(name: str) -> Metric | None:
    """The row a logged name belongs to, the most literal one first; None where the table has none."""
    matching = [m for m in METRICS if re.match(m.pattern, name)]
    return min(matching, key=lambda m: "{" in m.name, default=None)


def check_names(names: Iterable[str]) -> None:
    """Refuses names that the table does not have.

    Raises:
      ValueError: naming each unknown metric and the nearest known one.
    """
    unknown = [name for name in names if find_metric(name) is None]
    if not unknown:
        return
    known = [m.name for m in METRICS]
    nearest = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.4) for name in unknown}
    hints = [f"{name!r}" + (f" (nearest: {near[0]!r})" if near else "") for name, near in nearest.items()]
    raise ValueError(f"metrics that rlx/metrics/names.py does not list: {', '.join(hints)}; add a row or fix the name")

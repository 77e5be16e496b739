"""The samples that people are shown, scored by the learner before it moves: how far sampler and trainer are apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx import assemble
from rlx.config.schema import Config
from rlx.data.packing import PackingConfig, Trajectory, pack
from rlx.learner.score import score_sequences, target_logprobs
from rlx.learner.step import StepConfig
from rlx.metrics.shown import is_due, shown_samples
from rlx.models.spec import Params
from rlx.recorder import Scores
from rlx.run import Run
from rlx.types import Group


def score_shown(run: Run, groups: Sequence[Group]) -> Scores:
    """The log-probs of the coming update's shown samples under the policy that it starts from; {} where none is due.

    Due every `metrics.samples_every` updates and at the last one.
    """
    if not is_due(run.progress.update + 1, run.config.metrics.samples_every, run.config.learner.updates):
        return {}
    chosen = shown_samples(groups, run.config.metrics.samples_shown)
    sequences = [s.tokens for s in chosen]
    with run.timers("score"):
        run.peers.tell("score", sequences)
        scored = score(run.config, run.step, run.state.trainable, run.model.params, sequences)
    return {(s.group, s.index): values[s.mask] for s, values in zip(chosen, scored, strict=True)}


def score(
    config: Config, step: StepConfig, trainable: Params, frozen: Params, sequences: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """`rlx.learner.score.score_sequences`, on a mesh too: there in rows like an update's, one sequence in each."""
    longest = config.learner.row_tokens
    if step.placement is None:
        return score_sequences(step, trainable, frozen, sequences, longest)
    rows = config.learner.micro_batch_rows
    packing = PackingConfig(longest, longest, rows, -(-len(sequences) // rows), 0, share_prefixes=False)
    packed = pack([_all_of(tokens) for tokens in sequences], packing)
    batch = assemble.device_batch(packed, step.placement)
    logprobs = np.stack([np.asarray(target_logprobs(step, trainable, frozen, part)) for part in batch])
    return [np.append(np.float32(0), logprobs[packed.sequences == i + 1]) for i in range(len(sequences))]


def _all_of(tokens: np.ndarray) -> Trajectory:
    """Every token but the first is a target."""
    count, nothing = len(tokens), np.zeros(len(tokens), np.float32)
    return Trajectory(tokens, np.arange(count) > 0, 0.0, nothing, nothing.astype(np.int32), None)

"""The samples that people are shown, scored by the learner before it moves: how far sampler and trainer are apart."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.learner.score import score_sequences
from rlx.metrics.shown import is_due, shown_samples
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
    with run.timers("score"):
        scored = score_sequences(
            run.step, run.state.trainable, run.model.params, [s.tokens for s in chosen], run.config.learner.row_tokens
        )
    return {(s.group, s.index): values[s.mask] for s, values in zip(chosen, scored, strict=True)}

"""What must fit: a response in the engine's context, a sample in a row, its parts in their places."""

from __future__ import annotations

from rlx.config.chat_checks import several_turns
from rlx.config.errors import said
from rlx.config.schema import Config


def length_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    context, new, row = config.engine.context, config.rollout.max_new_tokens, config.learner.row_tokens
    problems = []
    if new >= context:
        why = f"leaves no room for a prompt in config.engine.context = {context}; raise that or lower this"
        problems.append(said("rollout.max_new_tokens", new, why))
    if row < context:
        why = f"a sample of config.engine.context = {context} tokens would not fit in a row; set at least {context}"
        problems.append(said("learner.row_tokens", row, why))
    targets = config.learner.row_targets
    if config.plan.sequence_tokens > row:
        why = f"no sequence is longer than config.learner.row_tokens = {row}; set at most that, or 0 for it"
        problems.append(said("plan.sequence_tokens", config.plan.sequence_tokens, why))
    if targets > row:
        why = f"must be at most config.learner.row_tokens = {row}; 0 stands for that"
        problems.append(said("learner.row_targets", targets, why))
    if 0 < targets < new:
        why = f"a response of config.rollout.max_new_tokens = {new} would not fit in a row; set at least {new}, or 0"
        problems.append(said("learner.row_targets", targets, why))
    return problems + _row_shape(config)


def _row_shape(config: Config) -> list[str]:
    """Rows of one shape must hold any sample."""
    learner, samples, prefix = config.learner, config.learner.row_samples, config.learner.row_prefix
    if not samples:
        why = "a prompt has no place of its own while config.learner.row_samples = 0; set config.learner.row_prefix = 0"
        return [said("learner.row_prefix", prefix, why)] if prefix else []
    if samples < 0 or prefix < 0:  # said elsewhere
        return []
    problems = []
    if config.cluster.context_parallel == "ring":
        why = f"nothing cuts rows of config.learner.row_samples = {samples}; set this to 'gather', or that to 0"
        problems.append(said("cluster.context_parallel", "ring", why))
    if not learner.prefix_sharing:
        why = "samples lie behind a prompt that they share; set config.learner.prefix_sharing to True, or this to 0"
        problems.append(said("learner.row_samples", samples, why))
    if samples > (group := config.rollout.group_size):
        why = f"a row holds samples of one group, of config.rollout.group_size = {group}; set at most that"
        problems.append(said("learner.row_samples", samples, why))
    if config.model.attention_block:
        why = "with config.learner.row_samples the scores of a sample exist whole; set config.model.attention_block = 0"
        problems.append(said("model.attention_block", config.model.attention_block, why))
    if names := several_turns(config):
        why = f"a session of config.tasks.sources.{names[0]} may be longer than its part; set this and row_prefix to 0"
        problems.append(said("learner.row_samples", samples, why))
    if not prefix:
        why = "rows with config.learner.row_samples need room for a prompt; set at least 1, about the length of most"
        return [*problems, said("learner.row_prefix", prefix, why)]
    # What is not the prompt's or did not fit there; and the prompt's part is padded to a sample's.
    own = max(config.rollout.max_new_tokens, config.engine.context - prefix, prefix)
    if (learner.row_tokens - prefix) % samples or learner.row_tokens < prefix + samples * own:
        why = (
            f"rows hold config.learner.row_prefix = {prefix} tokens and config.learner.row_samples = {samples} equal "
            f"parts of at least {own}; set {prefix + samples * own}, or more by a multiple of {samples}"
        )
        problems.append(said("learner.row_tokens", learner.row_tokens, why))
    return problems

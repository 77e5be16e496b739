"""Log-probabilities, entropies and log-partition functions of a language-model head, without its logits."""

from rlx_kernels.logprob.api import TokenStats, token_stats, unsupported_reason

__all__ = ["TokenStats", "token_stats", "unsupported_reason"]

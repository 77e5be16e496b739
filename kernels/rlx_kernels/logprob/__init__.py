"""Log-probabilities, entropies and log-partition functions of a language-model head, without its logits."""

from rlx_kernels.logprob.api import Precision, TokenStats, token_loss, token_stats, unsupported_reason

__all__ = ["Precision", "TokenStats", "token_loss", "token_stats", "unsupported_reason"]

"""The gated delta rule of linear attention (GDN, KDA) over packed rows, and the short convolution that goes before."""

from rlx_kernels.delta_rule.api import delta_rule, delta_rule_step, unsupported_reason
from rlx_kernels.delta_rule.convolution import causal_convolution, causal_convolution_step
from rlx_kernels.delta_rule.packing import Recurrent

__all__ = [
    "Recurrent",
    "causal_convolution",
    "causal_convolution_step",
    "delta_rule",
    "delta_rule_step",
    "unsupported_reason",
]

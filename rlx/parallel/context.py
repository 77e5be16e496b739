"""Context parallelism: a row's tokens over the axis 'cp'.

Attention sees tokens by position and segment, wherever in the row they lie, so a row is cut into 2 CP parts and rank r
holds parts r and 2 CP - 1 - r ("zig-zag"): an early and a late one, equal work under the causal mask (as in Llama 3,
arXiv 2407.21783, section 3.3.2). Keys and values are gathered over 'cp', or go round it. Layers that carry a state from
token to token need the row's own order; there rank r holds part r of CP.
"""

from __future__ import annotations

import numpy as np


def zigzag(tokens: int, ranks: int) -> np.ndarray:
    """int32 [tokens]: which token of the row lies at each place. The row itself for one rank."""
    if ranks == 1:
        return np.arange(tokens, dtype=np.int32)
    parts = np.arange(tokens, dtype=np.int32).reshape(2 * ranks, -1)
    return np.concatenate([parts[[r, 2 * ranks - 1 - r]].reshape(-1) for r in range(ranks)])


def places(order: np.ndarray) -> np.ndarray:
    """int32 [tokens]: where each token of the row lies."""
    return np.argsort(order).astype(np.int32)

"""What an update reports: sums and counts over a slice of the batch, added over slices, divided once at the end.

A mean of means is not the mean; a (sum, count) pair is exact over micro-batches, rows and devices of any size. Zeros
are neutral for everything here. Names are those of `rlx.metrics.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from rlx.algos.masked import masked_sum
from rlx.types import AGE_BINS, LENGTH_BINS, bin_labels

RATIO_BAND = (0.8, 1.25)


@struct.dataclass
class Moments:
    """Σw, Σw² and n: what an effective sample size needs. Scalars, or one entry a bin."""

    first: Array
    second: Array
    count: Array

    @property
    def ess(self) -> Array:
        """(Σw)² / (n Σw²), in (0, 1]: the share of the samples that the weights leave (Kish 1965); 0 where n is 0."""
        total = self.count.astype(self.second.dtype) * self.second
        return self.first**2 / total.clip(jnp.finfo(total.dtype).tiny)


@struct.dataclass
class Metrics:
    """Sums over a slice. `merge` two of them, `reduce` a stack of them, `values` at the end."""

    means: dict[str, tuple[Array, Array]]  # name -> (sum, count)
    maxima: dict[str, Array]  # of what is never negative
    moments: dict[str, Moments]  # name -> of the weights whose effective sample size it is
    counts: dict[str, Array]  # name -> [bins]

    def merge(self, other: Metrics) -> Metrics:
        return _joined(self, other, jnp.add, jnp.maximum)

    def reduce(self) -> Metrics:
        """Merge along the leading axis, as `vmap` over slices leaves one."""
        return _joined(self, self, lambda x, _: x.sum(0), lambda x, _: x.max(0))

    def values(self) -> dict[str, float]:
        """The numbers to log; a mean over nothing is left out. On the host, of the whole batch's sums."""
        result = {name: float(total / count) for name, (total, count) in self.means.items() if count > 0}
        result |= {name: float(x) for name, x in self.maxima.items()}
        for name, moments in self.moments.items():
            labels = _LABELS.get(name, ("",))
            host = jax.tree.map(np.atleast_1d, moments)  # in numpy: there each operation would be a program to compile
            shares = zip(labels, host.ess, host.count)
            result |= {name + label: float(ess) for label, ess, count in shares if count > 0}
        return result


def _joined(a: Metrics, b: Metrics, add: Callable[..., Array], largest: Callable[..., Array]) -> Metrics:
    sums = [jax.tree.map(add, *x) for x in zip((a.means, a.moments, a.counts), (b.means, b.moments, b.counts))]
    return Metrics(means=sums[0], maxima=jax.tree.map(largest, a.maxima, b.maxima), moments=sums[1], counts=sums[2])


_LABELS: Mapping[str, tuple[str, ...]] = {
    "offpolicy/ess_age": tuple("_" + label for label in bin_labels(AGE_BINS)),
    "offpolicy/ess_length": tuple("_" + label for label in bin_labels(LENGTH_BINS)),
}


def pair(mask: Bool[Array, " tokens"], x: Shaped[Array, " tokens"]) -> tuple[Array, Array]:
    """(Σ x, n) over the mask."""
    return masked_sum(mask, x), jnp.sum(mask, dtype=jnp.int32)


def weight_moments(mask: Bool[Array, "..."], weights: Float[Array, "..."]) -> Moments:
    """Moments of the weights over the mask."""
    return Moments(masked_sum(mask, weights), masked_sum(mask, weights**2), jnp.sum(mask, dtype=jnp.int32))


def binned_moments(
    mask: Bool[Array, " tokens"], weights: Float[Array, " tokens"], x: Int[Array, " tokens"], edges: tuple[int, ...]
) -> Moments:
    """Moments of the weights over the tokens of each bin of x. A weight that is not finite is in those of every bin."""
    weights = jnp.where(mask, weights, 0)
    member = _membership(mask, x, edges).astype(weights.dtype)
    powers = jnp.stack([weights, weights**2, jnp.ones_like(weights)])
    first, second, count = jnp.matmul(powers, member, precision="highest")  # counts up to 2^24 are exact
    return Moments(first, second, count.astype(jnp.int32))


def sample_ages(token_versions: Int[Array, "*shape"], trained_at: int | Int[Array, ""]) -> Int[Array, "*shape"]:
    """Updates between the version that wrote a token and the one that trains on it."""
    return trained_at - token_versions


def _membership(
    mask: Bool[Array, " tokens"], x: Int[Array, " tokens"], edges: tuple[int, ...]
) -> Bool[Array, "tokens bins"]:
    """What lies below the first edge is in the first bin."""
    least, most = jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max
    low, high = (jnp.asarray(bounds, x.dtype) for bounds in ((least, *edges[1:]), (*edges[1:], most)))
    return mask[:, None] & (low <= x[:, None]) & (x[:, None] < high)

"""Which engine takes the next request: the one with the fewest, in O(1)."""

from __future__ import annotations

from collections.abc import Hashable


class LeastLoaded[T: Hashable]:
    """Members by their load, a small whole number. Among equals the one that has been there longest comes first."""

    def __init__(self) -> None:
        self._loads: dict[T, int] = {}
        self._buckets: list[dict[T, None]] = [{}]
        self._lowest = 0  # no bucket below it has a member

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, member: T) -> bool:
        return member in self._loads

    def set(self, member: T, load: int) -> None:
        """Puts `member` in, or moves it to another load."""
        self.discard(member)
        while len(self._buckets) <= load:
            self._buckets.append({})
        self._loads[member] = load
        self._buckets[load][member] = None
        self._lowest = min(self._lowest, load)

    def discard(self, member: T) -> None:
        load = self._loads.pop(member, None)
        if load is not None:
            del self._buckets[load][member]

    def least(self) -> T:
        """Raises IndexError where there is no member."""
        while not self._buckets[self._lowest]:
            self._lowest += 1
            if self._lowest == len(self._buckets):
                self._lowest = 0
                raise IndexError("no member")
        return next(iter(self._buckets[self._lowest]))

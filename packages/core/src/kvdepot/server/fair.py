"""A bound that no owner can exhaust alone."""

from collections import Counter
from collections.abc import Hashable


class FairBound:
    """Counts a bounded number of things, by owner. An owner gets more only while it has less than what is free.

    So one owner takes at most half, the next one half of the rest, and each finds something free.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.total = 0
        self._of_owner: Counter[Hashable] = Counter()

    def has_room(self, owner: Hashable, amount: int = 1) -> bool:
        """Return whether an owner may have so many more."""
        return self._of_owner[owner] + amount <= self.bound - self.total

    def take(self, owner: Hashable, amount: int = 1) -> None:
        """Count so many more for an owner."""
        self.total += amount
        self._of_owner[owner] += amount

    def give_back(self, owner: Hashable, amount: int = 1) -> None:
        """Count so many fewer for an owner."""
        self.total -= amount
        self._of_owner[owner] -= amount
        if not self._of_owner[owner]:
            del self._of_owner[owner]

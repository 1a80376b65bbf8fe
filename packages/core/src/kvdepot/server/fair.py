"""A shared bound that no single owner can exhaust."""

from collections import Counter
from collections.abc import Hashable


class FairBound:
    """Counts a bounded resource by owner. An owner gets more only while it holds less than is free.

    So the first owner takes at most half, the next one half of the rest, and there is always some left.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.total = 0
        self._of_owner: Counter[Hashable] = Counter()

    def has_room(self, owner: Hashable, amount: int = 1) -> bool:
        """Return whether an owner may take `amount` more."""
        return self._of_owner[owner] + amount <= self.bound - self.total

    def take(self, owner: Hashable, amount: int = 1) -> None:
        """Add `amount` to an owner's count."""
        self.total += amount
        self._of_owner[owner] += amount

    def give_back(self, owner: Hashable, amount: int = 1) -> None:
        """Subtract `amount` from an owner's count."""
        self.total -= amount
        self._of_owner[owner] -= amount
        if not self._of_owner[owner]:
            del self._of_owner[owner]

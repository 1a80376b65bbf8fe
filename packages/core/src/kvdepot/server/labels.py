"""Numbers for names in records: caches (spaces), and tenants with their models and weights (labels)."""

from collections.abc import Callable
from typing import Final, TypeAlias

from kvdepot.errors import ErrorCode
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import Space
from kvdepot.pool.names import Label, Names
from kvdepot.server.replies import Refused
from kvdepot.wire import messages as m

MAXIMUM_SPACES: Final = 4096  # kept as long as the pool: 17 MiB in its file of names if each has the longest spec
MAXIMUM_LABELS: Final = 65_536  # kept as long as the pool: 64 models or weights for each of 1,024 tenants
# Beyond that, new generations share the label without weights, and their chunks are evicted by last use.
MOST_WITH_WEIGHTS: Final = MAXIMUM_LABELS // 2


SaveNames: TypeAlias = Callable[[Names], None]
"""Adds names to those that were saved, all or nothing. If it raises, it is called again."""


def save_nothing(_names: Names) -> None:
    """Save no names: a `SaveNames` for a depot that no server will restore."""


class LabelTable:
    """Numbers names, and saves them before any record refers to them."""

    def __init__(self, index: ChunkIndex, save: SaveNames) -> None:
        self.names: list[Label] = []  # by number
        self._index = index
        self._save_names = save
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._num_saved_spaces = self._num_saved_labels = 0

    def restore(self, names: list[Label]) -> None:
        """Take over the labels of an earlier server. The spaces of the index count as saved."""
        for name in names:
            self._add(name)
        self._num_saved_spaces, self._num_saved_labels = len(self._index.spaces), len(self.names)

    def number_of(self, tenant: str, model: str, weights: str = "") -> int:
        """Return the label of a tenant, a model and its weights.

        Raises:
            Refused: there are too many.
            OSError: a new name cannot be saved.
        """
        number = self._numbers.get((tenant, model, weights))
        if number is None:
            if weights and len(self.names) >= MOST_WITH_WEIGHTS:
                return self.number_of(tenant, model)
            if len(self.names) >= MAXIMUM_LABELS:
                raise Refused(
                    ErrorCode.MALFORMED,
                    f"the depot has {MAXIMUM_LABELS} tenants and models already: no room for {tenant!r}",
                )
            number = self._add(Label(tenant, model, weights))
        if number >= self._num_saved_labels:
            self._save()
        return number

    def _add(self, name: Label) -> int:
        number = self._numbers[name] = len(self.names)
        self.names.append(name)
        self._index.quotas.add_label(number, name.tenant)
        return number

    def space_of(self, spec: m.CacheSpec) -> Space:
        """Return the space of a cache.

        Raises:
            Refused: there are too many.
            OSError: a new space cannot be saved.
        """
        spaces = self._index.spaces
        if len(spaces) >= MAXIMUM_SPACES and all(space.spec != spec for space in spaces):
            raise Refused(ErrorCode.BAD_LAYOUT, f"more than {MAXIMUM_SPACES} different caches: start the depot --fresh")
        space = self._index.space(spec)
        if space.number >= self._num_saved_spaces:
            self._save()
        return space

    def _save(self) -> None:
        new_spaces = [space.spec for space in self._index.spaces[self._num_saved_spaces :]]
        self._save_names(Names(new_spaces, self.names[self._num_saved_labels :]))
        self._num_saved_spaces, self._num_saved_labels = len(self._index.spaces), len(self.names)

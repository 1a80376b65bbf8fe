"""The keys of the pool's entries in tiers. Parts that many keys share are computed once."""

from collections.abc import Callable

from kvdepot.index.entries import PartPlace
from kvdepot.index.index import ChunkIndex
from kvdepot.index.space import Space
from kvdepot.tiers.keys import label_of, place_of, tier_key


class EntryKeys:
    """Makes keys of entries.

    Args:
        index: the pool's.
        names_of: returns tenant and model by the number that the index uses for both.
    """

    def __init__(self, index: ChunkIndex, names_of: Callable[[int], tuple[str, str]]) -> None:
        self._index = index
        self._names_of = names_of
        self._labels: dict[int, tuple[bytes, bytes]] = {}
        self._places: dict[tuple[int, int, int, int, int], bytes] = {}

    def labels(self, owner: int) -> tuple[bytes, bytes]:
        """Return the labels of a tenant and a model."""
        labels = self._labels.get(owner)
        if labels is None:
            tenant, model = self._names_of(owner)
            labels = self._labels[owner] = label_of(tenant), label_of(model)
        return labels

    def key(self, owner: int, space: Space, place: PartPlace, digest: bytes) -> bytes:
        """Return the key of an entry, whether the pool has it or not."""
        number = space.number, place.group, place.part, place.check, place.num_bytes
        packed = self._places.get(number)
        if packed is None:
            packed = self._places[number] = place_of(
                space.digest, place.group, place.part, place.check, place.num_bytes
            )
        return tier_key(*self.labels(owner), packed, digest)

    def key_of(self, record: int) -> bytes:
        """Return the key of an entry in the pool."""
        index, table = self._index, self._index.table
        node = index.entries.node_of(record)
        group, part = table.place_of(record)
        place = PartPlace(group, part, table.extent(record)[1], table.check_of(record))
        return self.key(index.nodes.label_of(node), index.nodes.space_of(node), place, table.key_of(record))


def labels_to_match(tenant: str | None, model: str | None) -> tuple[bytes | None, bytes | None]:
    """Return the labels of a tenant's and a model's name; None stays None and stands for any."""
    return None if tenant is None else label_of(tenant), None if model is None else label_of(model)

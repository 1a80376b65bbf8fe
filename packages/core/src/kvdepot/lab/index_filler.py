"""Fills an index with entries without bytes, to measure or test it."""

from kvdepot.client.connection import Connection
from kvdepot.client.session import Channel
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.layout import GroupKind
from kvdepot.wire import messages as m

ENTRY_BYTES = 4096  # a page, the smallest extent
"""The size of an entry in the pool."""

_PATIENT_SECONDS = 30.0  # far beyond a start or a store, so that only a depot that hangs reaches it


def filler_spec(chunk_tokens: int) -> m.CacheSpec:
    """Return the spec of a filler's entries: one group of full attention."""
    return m.CacheSpec(chunk_tokens, (m.GroupShape(GroupKind.FULL_ATTENTION, chunk_tokens),), "bytes", "filler")


def prompt_key(prompt: int, num_chunks: int) -> KeyRun:
    """Return the key of a prompt of `num_chunks` chunks, with digests like those of a real one."""
    return hash_prefix(Namespace(f"prompt {prompt}"), 1, range(num_chunks))


class IndexFiller:
    """A worker that stores without moving a byte; it stays registered until `close`.

    Args:
        url: the URL of the depot.
        chunk_tokens: tokens of a chunk.
    """

    def __init__(self, url: str, *, chunk_tokens: int = 64) -> None:
        spec, details = filler_spec(chunk_tokens), (m.GroupDetail((ENTRY_BYTES,), 1),)
        registration = m.RegisterKVCache(m.PROTOCOL_VERSION, "filler", 0, 1, "none", "none", "filler", spec, details)
        self._connection = Connection(url, "filler", registration, maps_pool=False, deadline_seconds=_PATIENT_SECONDS)
        self._session = self._connection.wait_until_open(_PATIENT_SECONDS)
        self._channel: Channel = self._connection.channel(self._session)

    def prepare(self, key: KeyRun) -> m.StorePlan:
        """Ask for space for at most `MAXIMUM_STORE_ENTRIES` chunks."""
        request = m.PrepareStore(
            self._session.context, "fill", key.tenant, key.digests, key.first_chunk, key.parent, (key.num_chunks,)
        )
        plan = self._channel.call(request, _PATIENT_SECONDS)
        assert isinstance(plan, m.StorePlan)
        return plan

    def store(self, key: KeyRun) -> None:
        """Store a prompt.

        Raises:
            AssertionError: the depot declined a part of it.
        """
        for start in range(0, key.num_chunks, m.MAXIMUM_STORE_ENTRIES):
            plan = self.prepare(key.slice(start, min(start + m.MAXIMUM_STORE_ENTRIES, key.num_chunks)))
            assert not plan.num_declined, "the pool is too small"
            if plan.ticket:
                self._channel.call(m.CommitStore(self._session.context, plan.ticket), _PATIENT_SECONDS)

    def close(self) -> None:
        """Leave the depot."""
        self._channel.close()
        self._connection.close()

"""Mooncake Store as a tier, `mooncake://MASTER:PORT?segment=4GiB&...`: the memory of many nodes, over TCP or RDMA.

The SDK runs in a child process (`ChildProcess`). The tier connects to the master by TCP before it starts a child and in
every probe: if the master does not answer, the SDK takes seconds per call and more than a minute to start.

A child ends when a call takes longer than `timeout`, when a channel breaks, or by `close`. A call whose child is lost
raises only once the kernel reports the child dead. Then neither the process nor a network adapter on its behalf
accesses the call's extents any more. The next probe starts another child. The memory that the child contributed to the
cluster is lost.

Failures that concern entries, not the cluster, count as misses: reads from a dead node, until the master drops it
(after 10 s by default), and all reads after the master restarted without high availability. A node that slows calls
down suspends the tier by the queue's deadline.
"""

import importlib.util
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from kvdepot.counting import Counts, tier_counter
from kvdepot.errors import ConfigError
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES
from kvdepot.tiers.url import TierUrl
from kvdepot_mooncake import messages as m
from kvdepot_mooncake.options import MooncakeOptions, MooncakeUnavailable, parse_options
from kvdepot_mooncake.process import ChildProcess

logger = logging.getLogger(__name__)

_CHILD_STARTS: Final = tier_counter("child_starts", "Starts of the process that holds Mooncake's SDK")

_OPEN_SECONDS: Final = 0.8  # the longest wait of `open_tier` for the child
_COUNTERS: Final = {
    m.KeyOutcome.NO_SPACE: tier_counter("no_space", "Entries not written because the storage had no space"),
    m.KeyOutcome.TRANSFER_FAILED: tier_counter("transfer_failed", "Entries that Mooncake did not transfer"),
}


class MooncakeTier(Tier):
    """Entries in a Mooncake cluster. See `Tier`."""

    batch_entries = m.KEYS_A_MESSAGE
    gathers_stores = True

    def __init__(self, options: MooncakeOptions, pool: TierPool) -> None:
        self._options = options
        self._pool = pool
        self._counters = Counts()
        self._lock = threading.Lock()
        self._is_closed = False
        self._child = self._new_child()

    @property
    def writer_pid(self) -> int:
        """The pid of the present child, 0 without one."""
        return self._child.pid

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`. Asks only the master, which still reports entries of a node that died recently."""
        outcomes: list[m.KeyOutcome] = []
        for first in range(0, len(keys), m.KEYS_A_MESSAGE):
            outcomes += self._ask(m.Contains(list(keys[first : first + m.KEYS_A_MESSAGE]))).values
        return [outcome is m.KeyOutcome.HERE for outcome in outcomes]

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`. Without room, or if the target node does not answer, an entry is not written."""
        reply = self._ask(m.Write(list(keys), list(trailers), list(extents)))
        return [outcome is m.KeyOutcome.HERE for outcome in reply.values]

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`."""
        reply = self._ask(m.Read(list(keys), list(extents)))
        if len(reply.trailers) != len(keys):
            raise MooncakeUnavailable(f"{len(reply.trailers)} trailers for {len(keys)} keys")
        pairs = zip(reply.values, reply.trailers, strict=True)
        return [trailer if outcome is m.KeyOutcome.HERE else None for outcome, trailer in pairs]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        self._child.ask(m.Remove(list(keys)), m.Cleared)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`. Clears for all nodes that use the same prefix."""
        yield self._child.ask(m.RemoveNamed(tenant, model), m.Cleared).count

    def probe(self) -> None:
        """See `Tier`. Starts the child if none runs."""
        with self._lock:
            if self._child.dead.is_set() and not self._is_closed:
                self._child = self._new_child()
            child = self._child
        if not child.why:
            self._options.look_for_master()
        child.ask(m.Contains([bytes(KEY_BYTES)]), m.Outcomes, is_probe=True)

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the first child has joined the cluster or has failed.

        Raises:
            ConfigError: no child will ever be able to join.
        """
        self._child.start_ended.wait(timeout_seconds)
        if self._child.is_final:
            raise ConfigError(f"Mooncake's SDK cannot be used: {self._child.why}")
        if self._child.why:
            logger.warning(
                "mooncake: continuing without the cluster of %s: %s", self._options.setup.master, self._child.why
            )

    def usage(self) -> TierUsage:
        """See `Tier`. Only the master knows the contents of the cluster."""
        with self._lock:
            return TierUsage(counters=dict(self._counters))

    def close(self) -> None:
        """See `Tier`. The entries in the memory that this node contributed are lost."""
        with self._lock:
            self._is_closed = True
        self._child.leave()

    def _new_child(self) -> ChildProcess:
        self._counters[_CHILD_STARTS] += 1
        return ChildProcess(self._options, self._pool)

    def _ask(self, request: m.Write | m.Read | m.Contains) -> m.Outcomes:
        reply = self._child.ask(request, m.Outcomes)
        if len(reply.values) != len(request.keys):
            raise MooncakeUnavailable(f"{len(reply.values)} outcomes for {len(request.keys)} keys")
        with self._lock:
            for outcome, name in _COUNTERS.items():
                self._counters[name] += reply.values.count(outcome)
        return reply


def open_tier(url: TierUrl, pool: TierPool) -> MooncakeTier:
    """Open `mooncake://MASTER:PORT`. See `docs/tiers.md` for the options."""
    options = parse_options(url)
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            f"--tier {url.name} needs Mooncake's SDK: pip install mooncake-transfer-engine-non-cuda, or the variant for"
            " your accelerator (mooncake-transfer-engine for CUDA)"
        )
    url.check_done()  # before starting anything
    tier = MooncakeTier(options, pool)
    try:
        tier.wait(_OPEN_SECONDS)
    except ConfigError:
        tier.close()
        raise
    return tier

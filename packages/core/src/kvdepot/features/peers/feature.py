"""The feature: reads missing chunks from the pools of peers, and lets them read from this one's.

A lookup names the peer to ask (`Lookup.peer`), as its router knows who has a prefix: one of `--peer`, or one that
`--peer-hints` allows, as otherwise whoever sends requests could let the depot connect to any host. Without a name, the
peers of `--peer` are asked in their order; without these, nobody. A peer is driven as a tier is:
`kvdepot.features.peers.tier`.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Final

from kvdepot.config import ServerConfig, is_hinted, parse_address, read_secret
from kvdepot.counting import depot_counter
from kvdepot.errors import ConfigError
from kvdepot.features.peers import protocol as p
from kvdepot.features.peers.hottest import Hottest, HottestPrefixes, hottest_of
from kvdepot.features.peers.shelf import Shelf
from kvdepot.pool.files import PoolFiles
from kvdepot.server.depot import Depot
from kvdepot.server.feature import Feature, OperationHandler
from kvdepot.server.query import Query, Rank
from kvdepot.server.sources import Source
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Refused, Steps, run
from kvdepot.tiers.tier_state import TierState
from kvdepot.wire.messages import Done
from kvdepot.wire.operation import OperatorRequest

logger = logging.getLogger(__name__)

_PEERS_UNKNOWN: Final = depot_counter("peers_unknown", "Lookups that named a peer that cannot be asked")

_MOST_OFFERS: Final = 8  # being read at one time: each waits for the network most of its time
MOST_PEERS: Final = 64  # named by lookups at one time; each has two threads
_IDLE_SECONDS: Final = 60.0  # then a peer makes room for another one
_TIMEOUT_SECONDS: Final = 0.75  # of a call, below the deadline of a tier, which suspends it
_THREADS: Final = 2


def make(depot: Depot) -> "Peers | None":
    """Make the feature of a depot whose settings name peers or a token for them."""
    config = depot.config
    return (
        None
        if config is None or depot.files is None or config.peer_token is None
        else Peers(depot, config, depot.files)
    )


class Peers(Feature):
    """See the module.

    Raises:
        ConfigError: the token cannot be read, or the address to listen on cannot be used.
    """

    name = "peers"

    def __init__(self, depot: Depot, config: ServerConfig, files: PoolFiles) -> None:
        assert config.peer_token is not None
        token = read_secret(config.peer_token, "--peer-token").encode()
        if find_spec("xxhash") is None:  # for trailers
            raise ConfigError("peers need xxhash: pip install 'kvdepot[peers]'")
        self._depot = depot
        self._address = config.peers or ""
        self._source = PeerSource(depot, config, token)
        self.sources = (self._source,)
        self.shelf: Shelf | None = None
        if config.peers:
            self.shelf = Shelf(depot, files.pool_fd, parse_address(config.peers, "--peers"), token, self._source.take)

    def operations(self) -> Mapping[type[OperatorRequest], OperationHandler]:
        """See `Feature`."""
        return {Hottest: self._hottest}

    def _hottest(self, request: Hottest) -> Steps:
        turns = self._depot.background.operators
        yield from turns.first()
        prefixes = yield from hottest_of(self._depot.index, self._depot.labels, request.most_bytes, turns)
        return HottestPrefixes(self._depot.state.epoch, self._address, prefixes)

    def swept(self, now: float) -> None:
        """See `Feature`."""
        self._source.open_listed()
        if self.shelf is not None:
            self.shelf.swept(now)

    def close(self) -> None:
        """See `Feature`."""
        if self.shelf is not None:
            self.shelf.close()


class PeerSource(Source):
    """The pools of peers, by the names that lookups give them."""

    rank = Rank.PEERS

    def __init__(self, depot: Depot, config: ServerConfig, token: bytes) -> None:
        self._state: DepotState = depot.state
        self._tiers = depot.tiers
        self._token = token
        self._listed = {name: parse_address(text, f"--peer {name}") for name, text in config.peer_addresses.items()}
        self._hints = config.peer_hints
        self._peers: dict[str, TierState] = {}
        self._named_at: dict[str, float] = {}
        self._num_offers = 0  # being read

    def complete(self, query: Query, on_end: Callable[[], None]) -> bool:
        """See `Source`."""
        name = query.request.peer
        if not name and not self._listed:
            return False
        found = [self._peer(name)] if name else [self._peer(each) for each in self._listed]
        peers = [peer for peer in found if peer is not None]
        if not peers:
            self._state.counters[_PEERS_UNKNOWN] += 1
            query.why = f"peer {name} cannot be asked, see --peer and --peer-hints"
            return False
        return self._tiers.ask(query, on_end, self.rank, f"peer {name}" if name else "peers", peers)

    def take(self, offer: p.Take) -> p.Taking:
        """Begin to read a prefix that a peer offers, which has proved that it knows the token."""
        peer = self._peer(offer.address, is_trusted=True) if len(offer.digests) else None
        is_taken = False
        if peer is not None and self._num_offers < _MOST_OFFERS:
            self._num_offers += 1
            try:
                run(self._read(offer, peer), self._has_failed)
            except Refused:  # very many commands of operators wait
                self._num_offers -= 1
            else:
                is_taken = True
        return p.Taking(self._num_offers, is_taken, self._state.index.extents.capacity_bytes)

    def _read(self, offer: p.Take, peer: TierState) -> Steps:
        yield from self._state.background.operators.first()
        yield from self._tiers.bring_up(offer.tenant, offer.digests, (peer,))
        self._num_offers -= 1
        return Done(self._state.epoch)

    def _has_failed(self, error: Exception) -> Done:
        self._num_offers -= 1
        logger.error("an offered prefix was not read: %s", error)
        return Done(self._state.epoch)

    def open_listed(self) -> None:
        """Open the listed peers that are not open yet, so that the status shows whether they answer."""
        for name in self._listed:
            self._peer(name)

    def _peer(self, name: str, *, is_trusted: bool = False) -> TierState | None:
        """Return the peer of a name, None if it cannot be asked."""
        now = self._state.clock()
        peer = self._peers.get(name) or self._open(name, now, is_trusted=is_trusted)
        if peer is not None:
            self._named_at[name] = now
        return peer

    def _open(self, name: str, now: float, *, is_trusted: bool) -> TierState | None:
        from kvdepot.features.peers.tier import PeerTier  # needs xxhash

        tiering, opener = self._state.tiering, self._state.opener
        address = self._listed.get(name)
        if address is None and (is_trusted or is_hinted(name, self._hints)):
            with contextlib.suppress(ConfigError):
                address = parse_address(name, "the peer of a lookup")
        if address is None:
            return None
        if tiering is None or opener is None or not self._has_room(now):
            return None
        queue = opener.host(
            lambda pool: PeerTier(address, self._token, pool, _TIMEOUT_SECONDS), f"peer {name}", _THREADS
        )
        peer = self._peers[name] = tiering.invite(queue)
        return peer

    def _has_room(self, now: float) -> bool:
        """Close peers that no lookup has named for a while if there are too many. Return whether there is room."""
        if len(self._peers) < MOST_PEERS + len(self._listed):
            return True
        for name in [name for name in self._peers if name not in self._listed]:
            if now - self._named_at[name] > _IDLE_SECONDS:
                self._peers.pop(name).queue.retire()
                del self._named_at[name]
        return len(self._peers) < MOST_PEERS + len(self._listed)

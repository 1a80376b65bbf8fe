"""The feature: publishes KV events on ZeroMQ sockets, and serves engines that describe chunks and follow the news."""

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

import zmq

from kvdepot.config import ServerConfig
from kvdepot.features.routers.desk import NewsDesk
from kvdepot.features.routers.events import EVENT_BATCHES, EVENT_FLOODS, EventPublisher, check_endpoint
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.messages import AwaitNews, DescribeChunks
from kvdepot.features.routers.numbers import NUMBERS_FILE, Numbers
from kvdepot.features.routers.tokens import TOKENS_FILE, TokensFile
from kvdepot.features.routers.zeromq import LOOK_SECONDS, Listeners
from kvdepot.keys import digest_at
from kvdepot.server.contexts import Context
from kvdepot.server.depot import Depot
from kvdepot.server.feature import Feature, Handler
from kvdepot.server.query import Query
from kvdepot.server.stores import Ticket
from kvdepot.wire import messages as m
from kvdepot.wire.status import DepotStatus

logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.01  # between two batches: each costs a message and a wake-up of ZeroMQ, whatever its size
_MOST_BROKEN: Final = 128  # chunks removed as corrupt that a lookup considers, in 0.02 ms; nearly always there is none


def make(depot: Depot) -> "Routers | None":
    """Make the feature of a depot that publishes events. Others do not open the file of tokens, so it is removed."""
    config = depot.config
    return Routers(depot) if config is not None and (config.events or config.events_connect) else None


class Routers(Feature):
    """See the module.

    Args:
        depot: the depot. Without its settings, nothing is published, and only attached engines get news.
        holdings: the described chunks; None to make them from the settings.

    Raises:
        ConfigError: it cannot listen on an endpoint.
    """

    name = "routers"

    def __init__(self, depot: Depot, holdings: Holdings | None = None) -> None:
        config = depot.config
        topic = "" if config is None else config.topic
        is_union = config is not None and config.events_media == "union"
        self.holdings = Holdings(topic, self._in_tier, is_union=is_union) if holdings is None else holdings
        self.desk = NewsDesk(depot.state, self.holdings, depot.background.queue(1))
        self.publishers: list[EventPublisher] = []
        self._state = depot.state
        self._index = depot.index
        self._replays = depot.background.queue(2)  # of the sockets that listen and of one that connects
        depot.index.watchers.all.append(self.holdings)
        if depot.files is not None:
            self.desk.keep_in(depot.files.keep(TOKENS_FILE, TokensFile))
        if config is not None:
            self._publish(config)

    def handlers(self) -> Mapping[type[m.ContextRequest], Handler]:
        """See `Feature`."""
        return {DescribeChunks: self.desk.describe, AwaitNews: self.desk.await_news}

    def attached(self, context: Context) -> None:
        """See `Feature`. The new shelf of a model tells routers that it is empty."""
        if context.served_model:
            context.wants_tokens = True
            self.holdings.shelf_of(context.served_model)

    def detached(self, context: Context) -> None:
        """See `Feature`."""
        self.desk.end_context(context.number)

    def looked_up(self, query: Query) -> None:
        """See `Feature`."""
        nodes, holdings = query.match.nodes, self.holdings
        if nodes and query.context.served_model:
            lacks_last = not holdings.is_described(nodes[-1])
            query.wants_tokens = lacks_last or (bool(holdings.broken) and self._lacks_tokens(query))

    def missed(self, query: Query) -> None:
        """See `Feature`. Reports chunks as removed that no tier delivered."""
        if query.waited_for:
            self.holdings.missed(query.context.space, query.digests, query.found)

    def stored(self, ticket: Ticket, nodes: Sequence[int]) -> None:
        """See `Feature`."""
        self.desk.stored(self._index.nodes.space_of(nodes[0]), ticket.digests)

    def restored(self) -> None:
        """See `Feature`."""
        self.desk.restore()

    def swept(self, now: float) -> None:
        """See `Feature`. ZeroMQ's descriptors are edge-triggered, and another call may have consumed the edge."""
        if self.publishers:
            self._turn()

    def report(self, status: DepotStatus) -> None:
        """See `Feature`."""
        if self.publishers:
            first = self.publishers[0]
            status.event_endpoints = [first.endpoint, first.replay_endpoint]
            status.counters[EVENT_BATCHES] = sum(each.num_batches for each in self.publishers)
            status.counters[EVENT_FLOODS] = sum(each.num_floods for each in self.publishers)

    def close(self) -> None:
        """See `Feature`."""
        if self.publishers:
            self._listeners.close()
            self._context.destroy(linger=0)

    def _lacks_tokens(self, query: Query) -> bool:
        """Return whether routers do not know a found chunk before the last one.

        A chunk that was removed as corrupt and came back has no description, although those after it have theirs.
        """
        nodes, space = self._index.nodes, query.context.space
        for node in islice(self.holdings.broken, _MOST_BROKEN):
            depth = nodes.depth[node]
            is_of_space = depth < query.found and nodes.space_number[node] == space.number
            if is_of_space and nodes.tree.keys[node] == digest_at(query.digests, depth):
                return True
        return False

    def _in_tier(self, nodes: Sequence[int]) -> Collection[int]:
        tiering = self._state.tiering
        return () if tiering is None else {*filter(tiering.holds, nodes)}

    # --- the loop -------------------------------------------------------------------------------------------------

    def _publish(self, config: ServerConfig) -> None:
        sockets = [(config.events, config.events_replay, False), (config.events_connect, None, True)]
        numbers = Numbers(config.directory / NUMBERS_FILE)
        self._context = zmq.Context()
        try:
            for endpoint, replay, connects in sockets:
                if endpoint is not None:
                    made = EventPublisher(self._context, self.holdings, endpoint, replay, numbers, connects=connects)
                    self.publishers.append(made)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        flags = (
            (config.events, "--events"),
            (config.events_replay, "--events-replay"),
            (config.events_connect, "--events-connect"),
        )
        for each, flag in flags:
            if each is not None and not check_endpoint(each, flag):
                logger.warning("%s %s: everybody who can connect sees the tokens of prompts", flag, each)
        self._listeners = Listeners([each for publisher in self.publishers for each in publisher.listeners])
        self._timer, self._turned_at = 0, 0.0
        descriptors = [fd for publisher in self.publishers for fd in publisher.filenos()]
        self._state.watched.update(dict.fromkeys(descriptors, self._turn))
        self.holdings.await_change(self._turn_after_pause)
        self._look(descriptors[0])

    def _look(self, descriptor: int) -> None:
        """Keep new subscribers out while few descriptors are left. ZeroMQ accepts them in a thread of its own."""
        self._listeners.look(descriptor)
        self._state.timers.call_at(self._state.clock() + LOOK_SECONDS, partial(self._look, descriptor))

    def _turn_soon(self) -> None:
        self._turn_at(self._state.clock())

    def _turn_after_pause(self) -> None:
        self._turn_at(max(self._state.clock(), self._turned_at + _PAUSE_SECONDS))

    def _turn_at(self, when: float) -> None:
        self._state.timers.cancel(self._timer)
        self._timer = self._state.timers.call_at(when, self._turn)

    def _turn(self) -> None:
        """Serve subscribers. Come back soon if there is more to do."""
        self._turned_at = self._state.clock()
        for publisher in self.publishers:
            replay = publisher.serve()
            if replay is not None:
                self._replays.add(replay)
        if any(publisher.has_work for publisher in self.publishers):
            self._turn_soon()
        else:
            self._turn_at(min(publisher.due for publisher in self.publishers))
            self.holdings.await_change(self._turn_after_pause)

"""`NewsFeed`: a thread that follows which described chunks of a namespace the depot holds, and reports changes.

Engines that publish events use it to announce chunks that other engines stored, that tiers brought, or that were
evicted.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvdepot.client.connection import Connection
from kvdepot.client.session import Session
from kvdepot.errors import DepotUnavailable, KVDepotError
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 5.0  # per request, so that a new namespace is followed soon
_PAUSE_SECONDS: Final = 0.5  # between two attempts: asking a depot without events twice a second is cheap
_AWAY_SECONDS: Final = 10.0  # a restarting depot keeps its chunks, but one that stays away counts as empty


class NewsFeed:
    """Follows a namespace until it is closed.

    Args:
        connection: the connection to the depot.
        namespace: the digest of the namespace.
        on_news: called on the thread with each reply. If `is_start`, the reply begins to list everything anew, as does
            the first reply after the depot was away.
        on_lost: called on the thread when the depot has been away for ten seconds, which voids all earlier news.
        wants_all: called on the thread before each request, at least every five seconds. If it returns True, the depot
            lists everything anew.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: bytes,
        on_news: Callable[[m.News], None],
        on_lost: Callable[[], None],
        wants_all: Callable[[], bool],
    ) -> None:
        self.namespace = namespace  # assign another digest to follow that namespace from now on
        self._connection = connection
        self._on_news = on_news
        self._on_lost = on_lost
        self._wants_all = wants_all
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, within the wait of one request. Idempotent."""
        self._closing.set()

    def _run(self) -> None:
        lost_at: float | None = None  # when the depot went away; None while it is there, infinity after `on_lost`
        while not self._closing.is_set():
            try:
                session = self._connection.wait_until_open(_PAUSE_SECONDS)
                if session.wants_tokens:
                    lost_at = None
                    self._follow(session)
            except KVDepotError as error:
                logger.debug("cannot get news from the depot: %s", error)
            except Exception:
                logger.exception("lost track of the depot's news: asking for everything again")
            if lost_at is None:
                lost_at = time.monotonic()
            elif time.monotonic() >= lost_at + _AWAY_SECONDS:
                lost_at = float("inf")
                self._on_lost()
            self._closing.wait(_PAUSE_SECONDS)

    def _follow(self, session: Session) -> None:
        """Request news until the session is lost."""
        channel, position, namespace = self._connection.channel(session), 0, b""
        try:
            while not self._closing.is_set() and self._connection.session is session:
                if namespace != self.namespace or self._wants_all():
                    position, namespace = 0, self.namespace
                request = m.AwaitNews(session.context, namespace, position, _WAIT_SECONDS)
                reply = channel.call(request, _WAIT_SECONDS + self._connection.deadline_seconds)
                if not isinstance(reply, m.News):
                    raise DepotUnavailable(f"it answered with {type(reply).__name__}")
                position = reply.position
                if namespace == self.namespace:
                    self._on_news(reply)
        finally:
            channel.close()

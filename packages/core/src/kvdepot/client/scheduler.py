"""The scheduler's side: looks up prefixes in the depot and holds leases on them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Generic, Self, TypeVar

import msgspec

from kvdepot.client.answers import MISS, Lease, lease_of
from kvdepot.client.connection import Connection
from kvdepot.client.session import Channel, Session
from kvdepot.config import DEADLINE_SECONDS
from kvdepot.errors import DepotTimeout, DepotUnavailable, ErrorCode, KVDepotError, RemoteError
from kvdepot.keys import KeyRun
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

# Share of a deadline that the depot may spend waiting for tiers and other engines. The rest is for the loop's turns and
# the way back: a reply after the deadline would lose the hit. `tiers.url` takes the same share for a request.
_SHARE_FOR_WAITING: Final = 0.75
_SILENT = (
    ErrorCode.UNKNOWN_SESSION,
    ErrorCode.UNKNOWN_CONTEXT,  # the connection's thread is registering again already
)


Answer = TypeVar("Answer")


class Pending(Generic[Answer]):
    """A lookup under way. The caller owns it, polls `query`, and then takes `result`.

    Args:
        client: the client that sends it.
        make: returns the request; its argument is the number of the context. None: there is nothing to ask.
        missing: the answer if no reply arrives.
        read: returns the answer in a reply, None if the reply is of another kind.
    """

    def __init__(
        self,
        client: "SchedulerClient",
        make: Callable[[int], frames.Request] | None,
        missing: Answer,
        read: Callable[[frames.Reply, Session], Answer | None],
    ) -> None:
        self.make = make
        self.missing = missing
        self.read = read
        self.channel: Channel | None = None  # None while the depot is coming back
        self.sequence = 0
        self.sent_at = self.missing_at = time.monotonic()  # `missing_at`: the latest time without an answer
        self.deadline = self.sent_at + client.deadline_seconds
        self._client = client
        self._answer: Answer | None = missing if make is None else None

    def query(self) -> bool:
        """Return whether the answer has arrived or its deadline has passed. Never wait."""
        if self._answer is None:
            self._answer = self._client.take_answer(self, may_wait=False)
        return self._answer is not None

    def wait(self, timeout_seconds: float) -> bool:
        """Like `query`, but wait at most `timeout_seconds` for the answer."""
        end = time.monotonic() + timeout_seconds
        while not self.query():
            if time.monotonic() >= end:
                return False
            self._client.wait_for_answers(self.channel, end - time.monotonic())
        return True

    def result(self) -> Answer:
        """Return the answer, or a miss if the depot does not answer within the client's deadline after the lookup."""
        if self._answer is None:
            self._answer = self._client.take_answer(self, may_wait=True) or self.missing
        return self._answer

    def cancel(self) -> None:
        """Cancel the lookup. A lease that is granted later is released."""
        if self._answer is None:
            self._client.give_up(self.channel, self.sequence)
            self._answer = self.missing


PendingLookup = Pending[Lease]


class SchedulerClient:
    """Looks up prefixes for one engine. If the depot is away, hung or new, the answer is a miss, never an exception.

    Args:
        spec: the engine's cache, as its workers register it.
        instance: the engine's name, which its workers register, too.
        model: shown to operators.
        url: the depot's URL, None for the depot in the default directory.
        deadline_seconds: the limit of one call.
        remark: a line for operators, which the status shows.
        served_model: the model's name in requests if the depot may ask the engine for the tokens of chunks.
        weights: `Namespace.weights` of the engine. The depot evicts older generations of them first.

    Attributes:
        connection: the connection to the depot. The client closes it.
    """

    def __init__(
        self,
        spec: m.CacheSpec,
        instance: str,
        *,
        model: str = "",
        url: str | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        remark: str = "",
        served_model: str = "",
        weights: str = "",
    ) -> None:
        self.deadline_seconds = deadline_seconds
        self.token_seconds = 0.0  # the engine's time per prompt token, 0 if unknown; set by its adapter
        self._registration = registration = m.RegisterScheduler(
            m.PROTOCOL_VERSION, instance, model, spec, remark[:1024], served_model[:1024], weights
        )
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self.connection = Connection(
            url,
            f"scheduler of {instance}",
            registration,
            maps_pool=False,
            deadline_seconds=deadline_seconds,
            reap_late_replies=self._reap_late_replies,
            on_fork=self._on_fork,
        )

    @property
    def is_connected(self) -> bool:
        """Whether the depot is connected and usable now."""
        return self.connection.session is not None

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: the depot was not usable within `timeout_seconds`; the text gives the reason.
        """
        self.connection.wait_until_open(timeout_seconds)

    def lookup(self, request_id: str, key: KeyRun) -> Lease:
        """Lease the longest usable prefix of `key` (a run from chunk 0 on) for a request, in one round trip."""
        return self.submit_lookup(request_id, key).result()

    def submit_lookup(
        self,
        request_id: str,
        key: KeyRun,
        *,
        joins: bool = False,
        announces: bool = False,
        ahead_tokens: int = 0,
        awaits: int = 0,
        hands_over: bool = False,
        peer: str = "",
        wait_seconds: float | None = None,
    ) -> PendingLookup:
        """Like `lookup`, without waiting.

        Args:
            request_id: the engine's name for the request.
            key: a run from chunk 0 on.
            joins: wait for chunks that other lookups have announced.
            announces: the engine is about to compute and store the chunks that are not found. `end_request` withdraws
                the announcement.
            ahead_tokens: the tokens that the engine computes before those chunks.
            awaits: the number of leading chunks that another engine, perhaps of another node, computes for this
                request. A depot with tiers waits until the tiers bring them, within the deadline.
            hands_over: another engine waits for the chunks that the request stores. `end_request` withdraws this.
            peer: the depot of another node that has the chunks, as a router says: a name that this depot knows, or
                HOST:PORT.
            wait_seconds: the limit of the depot's wait for tiers and other engines; by default and at most a share of
                the deadline.
        """
        if key.first_chunk:
            raise KVDepotError(f"a lookup starts at chunk 0, not at {key.first_chunk}")
        longest = self.deadline_seconds * _SHARE_FOR_WAITING
        if not key.digests:
            return Pending(self, None, MISS, lease_of)
        return self.submit(
            lambda context: m.Lookup(
                context,
                request_id,
                key.digests,
                key.tenant,
                longest if wait_seconds is None else min(longest, wait_seconds),
                self.token_seconds,
                announces,
                ahead_tokens,
                joins,
                awaits,
                hands_over,
                peer,
            ),
            MISS,
            lease_of,
        )

    def submit(
        self,
        make: Callable[[int], frames.Request],
        missing: Answer,
        read: Callable[[frames.Reply, Session], Answer | None],
    ) -> Pending[Answer]:
        """Send a request that has a reply, without waiting: see `Pending`. `make` gets the number of the context.

        If the depot is just coming back, the request is sent once it is there, within the deadline.
        """
        pending = Pending(self, make, missing, read)
        with self._lock:
            if not self._send(pending) and not self.connection.seek():
                pending.cancel()
        return pending

    def _send(self, pending: Pending[Answer]) -> bool:
        """Send the request of a lookup, or answer it with a miss. Return False if there is no session."""
        channel = self._current()
        if channel is None or pending.make is None:
            return False
        try:
            pending.sequence = channel.submit(pending.make(channel.session.context))
        except DepotUnavailable:
            pending.cancel()
            return True
        pending.channel = channel
        pending.sent_at = pending.missing_at = time.monotonic()
        return True

    def post(self, make: Callable[[int], Iterable[frames.Request]]) -> None:
        """Send requests whose replies are ignored. `make` gets the number of the context.

        A depot that is away does not get them.
        """
        with self._lock:
            channel = self._current()
            if channel is not None:
                for request in make(channel.session.context):
                    self._post(channel.session, request)

    @property
    def wants_tokens(self) -> bool:
        """Whether the depot wants to know the tokens of chunks."""
        session = self.connection.session
        return session is not None and session.wants_tokens

    def release(self, lease: Lease) -> None:
        """Release a lease. Idempotent. Leases of an earlier server have ended already."""
        if lease.session is not None:
            self._post(lease.session, m.Release(lease.session.context, (lease.number,)))

    def end_request(self, request_id: str) -> None:
        """Release all leases of a request, also of lookups under way, and withdraw its announcement."""
        with self._lock:
            channel = self._current() or self._channel
            if channel is not None:
                self._post(channel.session, m.EndRequest(channel.session.context, request_id))

    def change_weights(self, weights: str) -> None:
        """Report that the engine computes with new weights from now on (`Namespace.weights`). There is no reply."""
        with self._lock:
            self._registration = msgspec.structs.replace(self._registration, weights=weights)
            self.connection.note_registration(self._registration)
            channel = self._current()
            if channel is not None:
                self._tell_weights(channel)

    def _tell_weights(self, channel: Channel) -> None:
        """Report the new weights to a depot with which the engine registered before the change."""
        if channel.session.registration is not self._registration:
            channel.session.registration = self._registration
            self._post(channel.session, m.ChangeWeights(channel.session.context, self._registration.weights))

    def close(self) -> None:
        """Close the connection, which ends all leases. Idempotent."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_answer(self, lookup: Pending[Answer], *, may_wait: bool) -> Answer | None:
        """Return the answer to a lookup. Return None if it may still arrive and `may_wait` is False. For `Pending`."""
        if lookup.channel is None and may_wait:
            self.connection.wait_while_coming(lookup.deadline - time.monotonic())
        with self._lock:
            # Read before the try to send, as the session may open in between.
            is_coming = not may_wait and self.connection.is_coming and time.monotonic() < lookup.deadline
            if lookup.channel is None and not self._send(lookup) and is_coming:
                return None
            channel, sequence = lookup.channel, lookup.sequence
            if channel is None:
                return lookup.missing
            session = channel.session
            if channel is not self._channel or self.connection.session is not session:
                self.give_up(channel, sequence)
                return lookup.missing
            try:
                reply = channel.poll(sequence)
                if reply is None:
                    lookup.missing_at = time.monotonic()
                    rest = lookup.deadline - lookup.missing_at
                    if not may_wait and rest > 0:
                        return None
                    reply = channel.wait(sequence, max(0.0, rest))
                    lookup.missing_at = time.monotonic()
            except RemoteError as error:
                if error.code not in _SILENT:
                    logger.error("the depot refused a lookup: %s", error)
                return lookup.missing
            except DepotTimeout:
                self.connection.suspend(session)
                self.give_up(channel, sequence)
                return lookup.missing
            except DepotUnavailable:
                return lookup.missing
            waited_seconds = reply.waited_seconds if isinstance(reply, m.LookupReply) else 0.0
            self.connection.note_wait(session, lookup.missing_at - lookup.sent_at - waited_seconds)
            return lookup.read(reply, session) or lookup.missing

    def wait_for_answers(self, channel: Channel | None, timeout_seconds: float) -> None:
        """Wait until a channel has data to receive; without a channel, until the depot is back. For `Pending`."""
        if channel is None:
            self.connection.wait_while_coming(timeout_seconds)
        with self._lock:
            if channel is not None and channel is self._channel:
                channel.wait_for_any(timeout_seconds)

    def give_up(self, channel: Channel | None, sequence: int) -> None:
        """Abandon a lookup, and release its lease if one is granted later. For `Pending`."""
        if channel is None:
            return

        def give_back(reply: frames.Reply) -> None:
            # Even over a suspended session: a depot that replies also reads requests.
            if lease := getattr(reply, "lease", 0):
                with contextlib.suppress(DepotUnavailable):
                    channel.post(m.Release(channel.session.context, (lease,)))

        with self._lock:
            channel.abandon(sequence, give_back)
            if channel is self._channel and channel.num_owed:
                self.connection.reap_soon()

    def _reap_late_replies(self) -> bool:
        # Never wait: the holder of the lock may be waiting for this thread to notice that the depot is dead.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            channel = self._channel
            if channel is None:
                return True
            try:
                channel.drain()
            except DepotUnavailable:
                return True
            return not channel.num_owed
        finally:
            self._lock.release()

    def _on_fork(self) -> None:
        self._lock, self._channel = threading.RLock(), None

    def _current(self) -> Channel | None:
        session = self.connection.session
        if session is None:
            return None
        if self._channel is None or self._channel.session is not session:
            if self._channel is not None:
                self._channel.close()
            self._channel = self.connection.channel(session)
            # They may have changed since the session registered: untold, the KV in use would be outdated.
            self._tell_weights(self._channel)
        return self._channel

    def _post(self, session: Session, request: frames.Request) -> None:
        """Send over the channel of a session, even of a suspended one: a hung depot gets the request later.

        The end of the session releases its leases and withdraws its announcements, so a lost one gets nothing.
        """
        with self._lock:
            channel = self._channel
            if channel is None or channel.session is not session or not session.mark_lost.alive:
                return
            try:
                channel.post(request)
            except DepotUnavailable as error:
                logger.warning("%s", error)
            if channel.num_owed:
                self.connection.reap_soon()

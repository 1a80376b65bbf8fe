"""A tier in an object store: S3, Google Cloud Storage, Azure, or a file system that several nodes share.

Stores cost money and time per request, so an object has many chunks: see `kvdepot.tiers.runs`. Its name is
`TENANT/MODEL/XX/REST` (hashes of names, place, cut and first chunk in hex). The objects of a tenant or a model lie
below a few prefixes, which a clear lists. Objects are never overwritten with other bytes. Lifecycle rules of the store
or `kvdepot tier gc` limit the size of the store.

Two depots may add an object at one time. So puts must fail if the object exists (`If-None-Match: *`). The first probe
begins to check that, without waiting. If the store refuses such puts, or overwrites, writes stop and reads go on. The
check is repeated every ten minutes.

The requests of a call run concurrently in one event loop on its own thread. The client's time limit ends each request:
before the call's deadline for a question, after ten times as long for writes and clears. A read ends when no byte
arrives for that time. Questions and writes of files have no limit: a hung file system hangs the call, which `TierQueue`
expects.

A read fills extents as the bytes arrive, so an object takes one request and no memory. A lookup's question about a long
prefix asks for one run in eight, as depots write the runs before a run first.

A put does not copy: the client reads the extent while it sends. The connection may use the memory a little longer than
the request lasts, so a call returns only when nothing refers to its extents any more (`_released`).

The client's threads enter Python when a request ends. If a thread is still in Python when the interpreter exits, it
aborts the process (SIGABRT; in 13 of 40 processes that exited right after their last put). `close` waits for running
calls and a moment more (then 0 of 40). Only `os._exit` is safe, so a process that used this tier must exit with it.

Payloads are not hashed for the request's signature, as that would make puts two to three times slower. The trailer has
a checksum, and TLS protects the bytes over https. A plain http endpoint must be given explicitly in the URL. There, a
signature would protect only writes, not reads, so it is off as well. `sign_payload=yes` is for stores that require it.
"""

import asyncio
import contextlib
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from kvdepot.counting import Counts, tier_counter
from kvdepot.errors import ConfigError
from kvdepot.keys import DIGEST_BYTES
from kvdepot.ownership import is_own
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES, MOST_BYTES_A_RUN, MOST_CHUNKS_A_RUN, begins_run, depth_of, digest_of, run_of
from kvdepot.tiers.runs import HEAD_BYTES, RunHead, first_name, make_head, name_of
from kvdepot.tiers.scatter import Scatter
from kvdepot.tiers.url import DEADLINE_SECONDS, PATIENCE, REQUEST_SHARE, TierUrl

logger = logging.getLogger(__name__)

_REQUEST_ERRORS: Final = tier_counter("request_errors", "Failed requests to the store")
_WRITES_STOPPED: Final = tier_counter(
    "writes_stopped", "Times that writes stopped because the store refuses to create objects, or overwrites them"
)

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")
_Found: TypeAlias = tuple[str, tuple[int, int, bytes]]  # an object; offset, size and trailer of a chunk in it

NAME: Final = re.compile(r"[0-9a-f]{16}/[0-9a-f]{16}/[0-9a-f]{2}/(?:[0-9a-f]{64}|[0-9a-f]{94})")
"""The name of an object of this format, or of the first format, which had one object per chunk."""
_NOTHING: Final = "kvdepot-probe"  # a prefix without objects
_MARK: Final = "kvdepot-writable"  # the object that checks put; it stays, so that no depot removes that of another one
RECHECK_SECONDS: Final = 600.0  # after a refused put: an operator may have granted the permission
_CONFLICT_SECONDS: Final = 0.5  # more than another depot's put of a few bytes takes
_QUESTIONS_AT_ONCE: Final = 64  # concurrent requests per call: one after the other, each would cost a round trip
_SAMPLED: Final = 8  # of so many consecutive runs, a question for a long prefix asks for the last
_MOST_STEPS: Final = 32  # objects per walk, each a round trip: enough for 128 chunks that were stored four at a time
_MOST_TRIES: Final = 4  # attempts to add an object at the end of a walk while others add there
_MOST_KNOWN: Final = 1 << 15  # cached places of chunks, 15 MB: eight of the largest questions
_PIECE_BYTES: Final = 256 << 10  # of an object, at least as many arrive in Python at once; above `HEAD_BYTES`
_DELETES_A_REQUEST: Final = 250  # Azure allows 256 per request, S3 1,000
_CLOSE_SECONDS: Final = 1.8  # below the limit of TierQueue
LAST_STEPS_SECONDS: Final = 0.1  # time that the client's threads spend in Python after a request
_BEYOND_END: Final = re.compile("status code: 416|InvalidRange")  # the client has no exception class for it
# Refusals that another attempt does not change. For all others, the tier is suspended as usual.
_REFUSED: Final = re.compile(r"status code: (?:400|405|411|501)\b|\(os error (?:1|13|30)\)")
_SLOW_DOWN: Final = re.compile(r"status code: (?:429|503)\b")
_JUDGED: Final = 20  # last requests, by which a store is overloaded: enough not to suspend it for a tenth of refusals
_QUERY: Final = re.compile(r"\?[\w.-]+=[^\s\"')]*")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")  # in an answer of S3


@dataclass(frozen=True, slots=True)
class _Walk:
    """The objects of a run that the walk for one prefix found, and the name of the next one; None after too many."""

    objects: Sequence[tuple[str, RunHead]]
    next_name: str | None

    def find(self, key: bytes) -> _Found | None:
        """Return the object with a chunk, and the chunk's offset, size and trailer there."""
        digest = digest_of(key)
        return next(((name, head.chunks[digest]) for name, head in self.objects if digest in head.chunks), None)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Extents to fill, and the outcomes: trailers by position, b"" for a chunk that is cut or has another size."""

    keys: Sequence[bytes]
    extents: Extents
    trailers: dict[int, bytes | None] = field(default_factory=dict[int, bytes | None])

    def settle(self, chunks: Sequence[tuple[int, tuple[int, int, bytes]]], scatter: Scatter) -> None:
        """Note the outcomes of chunks: their positions, and their places in an object that was read."""
        for place, (offset, _, trailer) in chunks:
            self.trailers[place] = trailer if offset in scatter.complete else b""


class ObjectTier(Tier):
    """Runs as objects of any store that obstore supports.

    Args:
        pool: contains the extents.
        store: ends requests by its own time limits.
        patient: the same store with longer time limits, for reads, writes and clears.
        stall_seconds: a read ends when it gets no byte for so long.
        name: the tier's name in logs.
        takes_writes: whether the depot writes to it.
    """

    batch_entries = MOST_CHUNKS_A_RUN
    keeps_runs = True
    gathers_stores = True
    wants_places = True
    ends_stalled_reads = True
    most_writes = 8

    def __init__(
        self,
        pool: TierPool,
        store: ObjectStore,
        patient: ObjectStore | None = None,
        *,
        stall_seconds: float = REQUEST_SHARE * DEADLINE_SECONDS,
        name: str = "",
        takes_writes: bool = True,
    ) -> None:
        self._pool = pool
        # The places of chunks, by key, as the last questions found them; used on the loop's thread. A walk with only
        # the last chunks of a run, which a read or a removal has, may not find them again.
        self._known: dict[bytes, _Found] = {}
        self.store = store
        self.patient = patient or store
        self._stall_seconds = stall_seconds
        self._name = name
        self._is_unchecked = takes_writes  # until the first probe begins to check puts
        self._check_at = math.inf  # when a write checks them again
        self._one_check = asyncio.Lock()
        self._why_no_puts = ""
        self._were_refused = deque[bool]([], _JUDGED)  # whether the store asked for fewer of the last requests
        self._is_overloaded = False
        self._counters = Counts()
        self._changed = threading.Condition()
        self._num_calls = 0
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="kvdepot-object", daemon=True).start()

    @property
    def declines_writes(self) -> bool:
        """See `Tier`. False when it is time for another check, which the next write makes."""
        return bool(self._why_no_puts) and time.monotonic() < self._check_at

    @property
    def is_overloaded(self) -> bool:
        """See `Tier`. True once half of the last requests were refused in vain, that is, after the client's retry."""
        return self._is_overloaded

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`. Asks for some of the runs only."""
        return self._run(lambda: self._contains(keys))

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """See `Tier`. Asks for every run, as depots write the missing ones."""
        del sizes
        return self._run(lambda: self._touch(keys))

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`. Raises only if no entry was written, unless the store takes none."""
        done = self._run(lambda: self._write(keys, trailers, extents))
        here = set[int]().union(*(some for some in done if some is not None))
        return [place in here for place in range(len(keys))]

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`. Raises only if no entry was read."""
        runs = _by_run(keys)
        done = self._run(lambda: self._each([self._get_run(places, keys, extents) for places in runs]))
        trailers: dict[int, bytes | None] = {}
        for some in done:
            trailers |= some or {}
        return [trailers.get(place) for place in range(len(keys))]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`. Removes whole objects."""
        self._run(lambda: self._remove(keys))

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`."""
        steps = self._clear(tenant, model)
        while (count := self._run(lambda: anext(steps, None))) is not None:
            yield count

    def probe(self) -> None:
        """See `Tier`. Lists an empty prefix, which fails if the bucket or the permission to list is missing.

        The first one also begins to check puts. Only writes wait for that, as it may take longer than a probe may.
        """
        self._run(self._probe)

    def usage(self) -> TierUsage:
        """See `Tier`. The contents of the store are unknown."""
        return TierUsage(counters=dict(self._counters))

    def close(self) -> None:
        """See `Tier`. Waits for running calls, which end by their time limits."""
        with self._changed:
            was_closed, self.is_closed = self.is_closed, True
            is_idle = self._changed.wait_for(lambda: not self._num_calls, _CLOSE_SECONDS)
        # A call that hangs waits for this loop: without the loop, its thread would wait for ever.
        if is_idle and not was_closed:
            time.sleep(LAST_STEPS_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _payloads(self, extents: Extents) -> list[memoryview]:
        return [self._pool.view[offset : offset + num_bytes] for offset, num_bytes in extents]

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    # --- in the loop ----------------------------------------------------------------------------------------------

    async def _probe(self) -> None:
        await _list_folders(self.store, _NOTHING)
        self._were_refused.clear()
        self._is_overloaded = False
        if self._is_unchecked:
            self._is_unchecked, self._check_at = False, 0.0
            self._first_check = asyncio.create_task(self._check())  # the loop itself keeps no reference

    async def _check(self) -> None:
        """Find out whether puts create objects and never overwrite them, if it is time to. Others wait meanwhile."""
        with self._changed:
            self._num_calls += 1  # `close` waits for the first check, which no call waits for
        try:
            async with self._one_check:
                if time.monotonic() >= self._check_at:
                    self._note(await self._refusal())
        except Exception as error:  # the store is away; the next write checks again
            logger.debug("tier %s: cannot check puts: %s", self._name, in_one_line(error))
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _note(self, why: str) -> None:
        before, self._why_no_puts = self._why_no_puts, why
        self._check_at = time.monotonic() + RECHECK_SECONDS if why else math.inf
        if why and not before:
            self._counters[_WRITES_STOPPED] += 1
            logger.warning("tier %s: writing nothing, still reading: %s", self._name, why)
        elif before and not why:
            logger.warning("tier %s: writing again", self._name)

    async def _refusal(self) -> str:
        """Return why objects cannot be created, "" if they can.

        Raises:
            Exception: the store does not answer.
        """
        why = ""
        for _ in range(3):  # the second put finds the object of the first one
            try:
                await obstore.put_async(self.patient, _MARK, b"kvdepot", mode="create", use_multipart=False)
            except AlreadyExistsError:
                with contextlib.suppress(FileNotFoundError):
                    await obstore.head_async(self.patient, _MARK)
                    return ""
                # S3 answers the same 409 while another depot puts it, so this one would stop its writes in vain.
                await asyncio.sleep(_CONFLICT_SECONDS)
                why = "the store refuses to put an object that does not exist with If-None-Match: *"
            except Exception as error:
                if not _is_refusal(error):
                    raise
                return f"the store refuses to put an object with If-None-Match: * ({in_one_line(error)})"
            else:
                why = "the store does not support If-None-Match: *, so depots would overwrite objects of each other"
        return why

    async def _write(
        self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents
    ) -> Sequence[set[int] | None]:
        await self._check()
        if self._why_no_puts:
            return ()
        try:
            return await self._each([self._put_run(places, keys, trailers, extents) for places in _by_run(keys)])
        except Exception as error:
            # A slow upload, too, may be answered with 400, so only the check decides.
            if not _is_refusal(error):
                raise
            if not self._why_no_puts:
                self._check_at = 0.0
            await self._check()
            if not self._why_no_puts:
                raise
            return ()

    async def _touch(self, keys: Sequence[bytes]) -> list[bool]:
        there = [False] * len(keys)
        await self._ask(_by_run(keys), keys, there)
        return there

    async def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        there, prefixes = [False] * len(keys), _by_prefix(_by_run(keys), keys)
        # One request for each run would cost as much as the reads.
        await self._ask([run for prefix in prefixes for run in _samples(prefix)], keys, there)
        doubtful = list[list[int]]()
        for prefix in prefixes:
            num_found = 0
            for number, run in enumerate(prefix, 1):
                if run in _samples(prefix):
                    if not there[run[0]]:
                        break
                    num_found = number
                else:
                    doubtful.append(run)
            for run in prefix[: max(0, num_found - 1)]:
                for place in run:
                    there[place] = True
        await self._ask([run for run in doubtful if not there[run[0]]], keys, there)
        return there

    async def _ask(self, runs: Sequence[Sequence[int]], keys: Sequence[bytes], there: list[bool]) -> None:
        """Walk runs, and note in `there` which keys are there.

        Stop after an error, as the rest would fail just as slowly.
        """
        room, failed = asyncio.Semaphore(_QUESTIONS_AT_ONCE), asyncio.Event()

        async def ask(places: Sequence[int]) -> _Walk | None:
            async with room:
                if failed.is_set():
                    return None
                try:
                    return await self._walk(places, keys)
                except BaseException:
                    failed.set()
                    raise

        walks = await asyncio.gather(*map(ask, runs), return_exceptions=True)
        self._judge(walks)
        for places, walk in zip(runs, walks, strict=True):
            if isinstance(walk, BaseException):
                raise walk
            for place in places:
                there[place] = walk is not None and walk.find(keys[place]) is not None

    async def _walk(self, places: Sequence[int], keys: Sequence[bytes], reading: "_Reading | None" = None) -> _Walk:
        """Find the objects of a run that have chunks of a prefix. `places` are the positions of its keys.

        With `reading`, read the objects that begin with a wanted chunk, instead of their heads.
        """
        left, objects = list(places), list[tuple[str, RunHead]]()
        name: str | None = first_name(keys[left[0]])
        for _ in range(_MOST_STEPS):
            if reading is not None and name == name_of(keys[left[0]]):
                head = await self._load(name, left, reading)
            else:
                head = await self._head(name)
            if head is None:
                break
            objects.append((name, head))
            self._learn(name, keys[left[0]], head)
            left = [place for place in left if digest_of(keys[place]) not in head.chunks]
            if not left:
                break
            name = name_of(keys[left[0]], [found for found, _ in objects])
        else:
            name = None
        return _Walk(objects, name)

    def _learn(self, name: str, key: bytes, head: RunHead) -> None:
        """Note the places of an object's chunks, which share a place with `key`."""
        start = key[: KEY_BYTES - DIGEST_BYTES]
        for digest, place in head.chunks.items():
            self._known.pop(start + digest, None)
            self._known[start + digest] = name, place
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _forget(self, names: set[str]) -> None:
        """Forget the chunks of objects that are gone."""
        for key in [key for key, (name, _) in self._known.items() if name in names]:
            del self._known[key]

    async def _look_up(self, places: Sequence[int], keys: Sequence[bytes]) -> None:
        """Walk for the chunks of a run, unless the places of all are known."""
        # A chunk whose place is not known counts as missing: its entry would not be read, or a broken one not removed.
        if not all(keys[place][:KEY_BYTES] in self._known for place in places):
            await self._walk(places, keys)

    async def _head(self, name: str) -> RunHead | None:
        """Return the head of an object, None if there is none.

        Remove an object without a head, as it blocks the name.
        """
        try:
            data = await self._get_range(name, 0, HEAD_BYTES)
        except FileNotFoundError:
            return None
        head = RunHead.parse(bytes(data))
        if head is None:
            await self._delete(self.store, [name])
        return head

    async def _get_range(self, name: str, start: int, stop: int) -> memoryview:
        """Return a range of an object; fewer bytes if it ends before `stop`."""
        try:
            return memoryview(await obstore.get_range_async(self.store, name, start=start, end=stop))
        except FileNotFoundError:
            raise
        except Exception as error:
            if _BEYOND_END.search(str(error)) is None:
                raise
            # The text also contains the object's URL and the store's words. As an empty object is removed, confirm it.
            if (await obstore.head_async(self.store, name))["size"] > start:
                raise
            return memoryview(b"")

    async def _remove(self, keys: Sequence[bytes]) -> None:
        for places in _by_run(keys):
            await self._look_up(places, keys)
        names = {found[0] for key in keys if (found := self._known.get(key[:KEY_BYTES]))}
        if names:
            self._forget(names)
            await self._delete(self.store, list(names))

    async def _each(self, works: Sequence[Coroutine[Any, Any, T]]) -> list["T | None"]:
        """Run all coroutines to their end. Return None for each that failed.

        Raises:
            Exception: the first error, if all failed.
        """
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        self._judge(outcomes)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        self._counters[_REQUEST_ERRORS] += len(errors)
        if errors and len(errors) == len(outcomes):
            raise errors[0]
        return [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]

    def _judge(self, outcomes: Sequence[object]) -> None:
        self._were_refused.extend(
            isinstance(outcome, Exception) and _SLOW_DOWN.search(str(outcome)) is not None for outcome in outcomes
        )
        self._is_overloaded = 2 * sum(self._were_refused) >= _JUDGED

    async def _put_run(
        self, places: Sequence[int], keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents
    ) -> set[int]:
        """Add an object with the chunks of a run that the store lacks.

        Return the positions of the chunks it has then.
        """
        first = keys[places[0]]
        # The first object of a run has a known name. Trying it first saves a new prompt the walk.
        name, left = first_name(first) if begins_run(first) else None, list(places)
        for _ in range(_MOST_TRIES):
            if name is not None and await self._put(name, left, keys, trailers, extents):
                return set(places)
            walk = await self._walk(places, keys)
            left = [place for place in places if walk.find(keys[place]) is None]
            name = walk.next_name
            if not left or name is None:
                break
        return set(places) - set(left)

    async def _put(
        self, name: str, places: Sequence[int], keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents
    ) -> bool:
        """Create an object. Return False if there is one with that name."""
        payloads = self._payloads([extents[place] for place in places])
        head = make_head(
            [digest_of(keys[place]) for place in places],
            [payload.nbytes for payload in payloads],
            [trailers[place] for place in places],
        )
        buffers = [memoryview(head), *payloads]
        try:
            await obstore.put_async(self.patient, name, buffers, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        finally:
            for buffer in buffers:
                await _released(buffer)
        return True

    async def _get_run(self, places: Sequence[int], keys: Sequence[bytes], extents: Extents) -> dict[int, bytes | None]:
        """Fill extents with chunks of a run. Return their trailers by position, b"" for a chunk of another size."""
        reading = _Reading(keys, extents)
        if not all(keys[place][:KEY_BYTES] in self._known for place in places):
            await self._walk(places, keys, reading)
        by_object: dict[str, list[tuple[int, tuple[int, int, bytes]]]] = {}
        for place in places:
            found = self._known.get(keys[place][:KEY_BYTES])
            if found is not None and place not in reading.trailers:
                by_object.setdefault(found[0], []).append((place, found[1]))
        for name, chunks in by_object.items():
            await self._fill(name, chunks, reading)
        return reading.trailers

    async def _load(self, name: str, places: Sequence[int], reading: "_Reading") -> RunHead | None:
        """Read an object that begins with the first of some wanted chunks. Return its head as `_head` does."""
        stop, head, scatter = HEAD_BYTES + sum(reading.extents[place][1] for place in places), None, Scatter(())
        chunks = list[tuple[int, tuple[int, int, bytes]]]()
        try:
            async for position, piece in self._pieces(name, 0, stop):
                if head is None:
                    head = RunHead.parse(bytes(piece[:HEAD_BYTES]))
                    if head is None:
                        break
                    digests = [(place, digest_of(reading.keys[place])) for place in places]
                    chunks = [(place, head.chunks[digest]) for place, digest in digests if digest in head.chunks]
                    # Others lie behind chunks that nobody wants.
                    chunks = [chunk for chunk in chunks if chunk[1][0] + chunk[1][1] <= stop]
                    scatter = self._scatter(chunks, reading)
                scatter.feed(position, piece)
        except FileNotFoundError:
            return None
        except Exception as error:
            if _BEYOND_END.search(str(error)) is None:
                raise
        if head is None:
            return await self._head(name)
        reading.settle(chunks, scatter)
        return head

    async def _fill(self, name: str, chunks: Sequence[tuple[int, tuple[int, int, bytes]]], reading: "_Reading") -> None:
        """Fill extents with chunks of one object: their positions, and their places in it."""
        start = min(offset for _, (offset, _, _) in chunks)
        stop = max(offset + size for _, (offset, size, _) in chunks)
        scatter = Scatter(())
        # A forged head.
        if stop - start <= max(MOST_BYTES_A_RUN, *(size for _, (_, size, _) in chunks)):
            scatter = self._scatter(chunks, reading)
            try:
                async for position, piece in self._pieces(name, start, stop):
                    scatter.feed(position, piece)
            except FileNotFoundError:
                self._forget({name})
                return
        reading.settle(chunks, scatter)

    def _scatter(self, chunks: Sequence[tuple[int, tuple[int, int, bytes]]], reading: "_Reading") -> Scatter:
        """Return the places of chunks in the pool. Leave out chunks of another size than expected."""
        wanted = [
            (offset, reading.extents[place]) for place, (offset, size, _) in chunks if size == reading.extents[place][1]
        ]
        return Scatter(
            zip((offset for offset, _ in wanted), self._payloads([extent for _, extent in wanted]), strict=True)
        )

    async def _pieces(self, name: str, start: int, stop: int) -> AsyncIterator[tuple[int, memoryview]]:
        """Yield a range of an object in pieces with their positions; fewer bytes if the object ends before `stop`.

        Raises:
            TimeoutError: no byte arrived for too long.
        """
        position, pieces = start, None
        while True:
            try:
                async with asyncio.timeout(self._stall_seconds):
                    if pieces is None:
                        found = await obstore.get_async(self.patient, name, options={"range": (start, stop)})
                        pieces = aiter(found.stream(min_chunk_size=_PIECE_BYTES))
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise TimeoutError(f"no byte of an object for {self._stall_seconds:g} s") from None
            if piece is None:
                return
            yield position, memoryview(piece)
            position += len(piece)

    async def _clear(self, tenant: bytes | None, model: bytes | None) -> AsyncIterator[int]:
        if tenant is None and model is not None:
            tenants = await _list_folders(self.patient, None)
        else:
            tenants = [tenant.hex() if tenant else ""]
        for tenant_hash in tenants:
            prefix = "/".join(filter(None, (tenant_hash, model.hex() if model else "")))
            pages: AsyncIterable[Sequence[ObjectMeta]] = obstore.list(  # pyright: ignore[reportUnknownMemberType]
                self.patient, prefix or None, chunk_size=_DELETES_A_REQUEST
            )
            async for objects in pages:
                names = [meta["path"] for meta in objects if NAME.fullmatch(meta["path"])]
                if names:
                    self._forget({*names})
                    await self._delete(self.patient, names)
                yield len(names)

    async def _delete(self, store: ObjectStore, names: list[str]) -> None:
        try:
            await obstore.delete_async(store, names)
        except FileNotFoundError:  # only with files: another process clears, too, so delete one at a time
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(store, name)

    # --- between the threads --------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the loop, and wait for it.

        Raises:
            OSError: the store's error, in one line and without possible secrets.
        """
        with self._changed:
            if self.is_closed:
                raise OSError("the tier is closed")
            self._num_calls += 1

        async def do() -> T:
            return await work()

        try:
            return asyncio.run_coroutine_threadsafe(do(), self._loop).result()
        except Exception as error:
            raise OSError(in_one_line(error)) from None
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()


def _by_run(keys: Sequence[bytes]) -> list[list[int]]:
    """Return the positions of keys by run, in the order of the prefix."""
    runs: dict[bytes, list[int]] = {}
    for place, key in enumerate(keys):
        runs.setdefault(run_of(key), []).append(place)
    return list(runs.values())


def _by_prefix(runs: Sequence[list[int]], keys: Sequence[bytes]) -> list[list[list[int]]]:
    """Join consecutive runs of a prefix. Runs of one chunk may be windows, of which depots leave out some."""
    prefixes = list[list[list[int]]]()
    for run in runs:
        first, last = keys[run[0]], keys[prefixes[-1][-1][-1]] if prefixes else b""
        goes_on = first[: KEY_BYTES - DIGEST_BYTES] == last[: KEY_BYTES - DIGEST_BYTES]
        if goes_on and depth_of(first) == depth_of(last) + 1 and len(prefixes[-1][-1]) > 1:
            prefixes[-1].append(run)
        else:
            prefixes.append([run])
    return prefixes


def _samples(prefix: list[list[int]]) -> list[list[int]]:
    """Return the runs to ask for first: all of a few, otherwise the last one and one in `_SAMPLED` before it."""
    return prefix if len(prefix) < _SAMPLED else [*prefix[_SAMPLED - 1 : -1 : _SAMPLED], prefix[-1]]


async def _released(view: memoryview) -> None:
    """Wait until no one reads this memory any more: releasing a view fails while it is in use."""
    while True:
        try:
            view.release()
        except BufferError:
            await asyncio.sleep(0.001)
        else:
            return


def _is_refusal(error: Exception) -> bool:
    """Return whether a store that answers refuses a put for good."""
    is_denied = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
    return is_denied or _REFUSED.search(str(error)) is not None


def in_one_line(error: BaseException) -> str:
    """Return an error's first line, without the queries of URLs, which may contain signatures, and without XML."""
    first, code = str(error).strip().partition("\n")[0].partition("<?xml")[0], _CODE.search(str(error))
    return f"{type(error).__name__}: {_QUERY.sub('?...', first)[:300]}{code[1] if code else ''}"


async def _list_folders(store: ObjectStore, prefix: str | None) -> list[str]:
    listed: ListResult[Sequence[ObjectMeta]] = await obstore.list_with_delimiter_async(  # pyright: ignore[reportUnknownMemberType]
        store, prefix
    )
    return [folder.strip("/") for folder in listed["common_prefixes"]]


def _take_flag(url: TierUrl, option: str) -> bool:
    text = url.take(option, "no")
    if text not in ("yes", "no"):
        raise ConfigError(f"--tier {url.name}: {option}={text}: yes or no")
    return text == "yes"


def open_tier(url: TierUrl, pool: TierPool) -> ObjectTier:
    """Open `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX?account=NAME` or `file:///FOLDER`.

    Credentials come from the environment or the machine. Options: `timeout`, the seconds of a request that a lookup
    waits for (three quarters of the tier's deadline by default, and below it; writes and clears have ten times as
    much), `ca` (a PEM file); for S3 `endpoint`, `region`, `virtual_hosted`, `sign_payload`, `anonymous`, `express`;
    for Azure `account`, `endpoint`.
    """
    timeout = url.take_timeout()
    try:
        if url.scheme == "file":
            store = patient = _open_file(url)
        else:
            open_store = _opener_of(url)
            store, patient = open_store(timeout), open_store(PATIENCE * timeout)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--tier {url.name}: {in_one_line(error)}") from None
    return ObjectTier(pool, store, patient, stall_seconds=timeout, name=url.name, takes_writes=url.takes_writes)


def _open_file(url: TierUrl) -> ObjectStore:
    if url.host or url.path in ("", "/"):
        raise ConfigError(f"--tier {url.name}: write file:///FOLDER, with three slashes")
    folder = Path(url.path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # obstore would let every user read it
    status = folder.stat()
    # No error as in `disk://`: nodes share the folder, and a server of files may show another owner, or need a group.
    if not is_own(status) or status.st_mode & 0o077:
        logger.warning(
            "--tier %s: the folder belongs to user %d and has mode %04o, so others can read or change the KV in it, if"
            " its path is open to them: chmod 700 it, or see that only depots reach it",
            url.name,
            status.st_uid,
            status.st_mode & 0o7777,
        )
    return LocalStore(folder)


def _opener_of(url: TierUrl) -> Callable[[float], ObjectStore]:
    """Take the options out of a URL. Return a function that opens its store, given the time limit of one request."""
    if not url.host:
        raise ConfigError(f"--tier {url.name}: write {url.scheme}://BUCKET/PREFIX")
    endpoint, certificates = url.take("endpoint", ""), url.take("ca", "")
    common: ClientConfig = {"pool_idle_timeout": timedelta(seconds=30)}
    if endpoint.startswith("http://"):
        common["allow_http"] = True
    if certificates:
        common["root_certificate"] = Path(certificates).read_bytes()
    prefix = url.path.strip("/") or None
    where = {"endpoint": endpoint}
    signing = {}
    if url.scheme == "s3":
        where["region"] = url.take("region", "")
        signing = {
            "unsigned_payload": not _take_flag(url, "sign_payload"),
            "virtual_hosted_style_request": _take_flag(url, "virtual_hosted"),
            "skip_signature": _take_flag(url, "anonymous"),
            "s3_express": _take_flag(url, "express"),
        }
    elif url.scheme == "az":
        where["account_name"] = url.take("account", "")
    named: Any = {name: value for name, value in where.items() if value}

    def open_store(timeout: float) -> ObjectStore:
        client: ClientConfig = {
            **common,
            "timeout": timedelta(seconds=timeout),
            "connect_timeout": timedelta(seconds=min(1.0, timeout)),
        }
        retry: RetryConfig = {  # for immediate failures, such as a connection that the store closed
            "max_retries": 1,
            "retry_timeout": timedelta(seconds=timeout / 4),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(milliseconds=200),
                "base": 2,
            },
        }
        if url.scheme == "s3":
            return S3Store(url.host, prefix=prefix, client_options=client, retry_config=retry, **signing, **named)
        if url.scheme == "gs":
            return GCSStore(url.host, prefix=prefix, client_options=client, retry_config=retry)
        return AzureStore(url.host, prefix=prefix, client_options=client, retry_config=retry, **named)

    return open_store

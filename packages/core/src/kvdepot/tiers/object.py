"""A tier in an object store: S3, Google Cloud Storage, Azure, or a file system that several nodes share.

Each entry is one object, first the seal and then the payload, named `TENANT/MODEL/XX/REST` (labels and key in hex).
The entries of a tenant or a model lie below few prefixes, and a clear lists these. Objects are never overwritten with
other bytes. The store decides how much it holds (lifecycle rules).

A call is a batch of requests, which run concurrently in one event loop on a thread of its own. The client's time limit
ends each request: before the call's deadline if a lookup waits for it, after ten times as long for writes and clears.
Files have no such limit: a hanging file system hangs the call, which `TierQueue` expects.

A put aliases the pool: the client reads the extent while it sends. The connection may hold the memory a little longer
than the request lasts, so a call returns only once nothing refers to its extents (`_released`).

The client's threads enter Python when a request ends. One that is still there when the interpreter exits aborts the
process (SIGABRT; in 13 of 40 processes that exited right after their last put). `close` waits for running calls and a
moment more (then 0 of 40). Only `os._exit` is safe, so a process that used this tier ends with it.

Payloads are not hashed for the request's signature, which would make puts two to three times slower. The seal has a
checksum, and TLS protects the bytes over https. The URL must name a plain http endpoint. There a signature would
protect only writes, not reads, so it is off as well. `sign_payload=yes` is for stores that insist.
"""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from kvdepot.counting import Counts, tier_counter
from kvdepot.errors import ConfigError
from kvdepot.tiers.base import Extents, TierPool, TierUsage
from kvdepot.tiers.keys import LABEL_BYTES
from kvdepot.tiers.seal import SEAL_BYTES
from kvdepot.tiers.url import PATIENCE, TierUrl

_REQUEST_ERRORS: Final = tier_counter("request_errors", "Failed requests to the store")

if TYPE_CHECKING:
    from obstore import ListResult, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")

_LABEL: Final = 2 * LABEL_BYTES  # hex digits
_NAME: Final = re.compile(r"[0-9a-f]{16}/[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{94}")
_NOTHING: Final = "kvdepot-probe"  # a prefix without objects
_QUESTIONS_AT_ONCE: Final = 64
_MOST_ENTRIES: Final = 1024  # per call
_COPIED_AT_ONCE: Final = 1 << 20  # bytes: about a tenth of a millisecond
_DELETES_A_REQUEST: Final = 250
_CLOSE_SECONDS: Final = 1.8  # less than the limit of TierQueue
_LAST_STEPS_SECONDS: Final = 0.1  # of the client's threads in Python after a request
_QUERY: Final = re.compile(r"\?[\w.-]+=[^\s\"')]*")


def object_name(key: bytes) -> str:
    """Return the name of an entry's object. Two digits of the chunk follow the labels and spread the names."""
    digits = key.hex()
    return f"{digits[:_LABEL]}/{digits[_LABEL : 2 * _LABEL]}/{digits[-2:]}/{digits[2 * _LABEL : -2]}"


class ObjectTier:
    """Entries as objects of any store that obstore speaks to.

    Args:
        pool: contains the extents.
        store: has time limits of its own.
        batch_entries: entries of one call, all requested at once. As many payloads are in memory beside the pool.
        patient: the same store with longer time limits, for writes and clears.
    """

    writer_pid = 0

    def __init__(
        self, pool: TierPool, store: ObjectStore, batch_entries: int = 4, patient: ObjectStore | None = None
    ) -> None:
        self.batch_entries = batch_entries
        self._pool = pool
        self.store = store
        self.patient = patient or store
        self._counters = Counts()
        self._changed = threading.Condition()
        self._num_calls = 0
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="kvdepot-object", daemon=True).start()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return self._run(lambda: self._contains(keys))

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """See `Tier`."""
        return self.contains(keys)

    def write(self, keys: Sequence[bytes], seals: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`. Raises only if nothing was written."""
        return [bool(ok) for ok in self._run(lambda: self._each(map(self._put, keys, seals, self._payloads(extents))))]

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`. Raises only if nothing was read."""
        return self._run(lambda: self._each(map(self._get, keys, self._payloads(extents))))

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        self._run(lambda: self._delete(self.store, [object_name(key) for key in keys]))

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`."""
        steps = self._clear(tenant, model)
        while (count := self._run(lambda: anext(steps, None))) is not None:
            yield count

    def probe(self) -> None:
        """See `Tier`. Lists an empty prefix, which fails without the bucket or the permission to list."""
        self._run(lambda: _list_folders(self.store, _NOTHING))

    def usage(self) -> TierUsage:
        """See `Tier`. The contents of the store are unknown."""
        return TierUsage(counters=dict(self._counters))

    def close(self) -> None:
        """See `Tier`. Waits for running calls, which their time limits end."""
        with self._changed:
            was_closed, self.is_closed = self.is_closed, True
            is_idle = self._changed.wait_for(lambda: not self._num_calls, _CLOSE_SECONDS)
        if is_idle and not was_closed:
            time.sleep(_LAST_STEPS_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _payloads(self, extents: Extents) -> list[memoryview]:
        return [self._pool.view[offset : offset + num_bytes] for offset, num_bytes in extents]

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    # --- in the loop ----------------------------------------------------------------------------------------------

    async def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask for all keys. Stop after an error, as the rest would fail as slowly."""
        room, failed = asyncio.Semaphore(_QUESTIONS_AT_ONCE), asyncio.Event()

        async def ask(key: bytes) -> bool:
            async with room:
                if failed.is_set():
                    return False
                try:
                    await obstore.head_async(self.store, object_name(key))
                except FileNotFoundError:
                    return False
                except BaseException:
                    failed.set()
                    raise
            return True

        outcomes = await asyncio.gather(*map(ask, keys), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome is True for outcome in outcomes]

    async def _each(self, works: "map[Coroutine[Any, Any, T]]") -> list["T | None"]:
        """Do all works, to the end. Return None for each that failed.

        Raises:
            Exception: the first error, if all failed.
        """
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        self._counters[_REQUEST_ERRORS] += len(errors)
        if errors and len(errors) == len(outcomes):
            raise errors[0]
        return [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]

    async def _put(self, key: bytes, seal: bytes, payload: memoryview) -> bool:
        buffers = [memoryview(seal), payload[:]]
        try:
            await obstore.put_async(self.patient, object_name(key), buffers, mode="create", use_multipart=False)
        except AlreadyExistsError:
            pass
        finally:
            for buffer in buffers:
                await _released(buffer)
        return True

    async def _get(self, key: bytes, payload: memoryview) -> bytes | None:
        """Fill `payload` and return its seal: b"" if the object has another size, None without an object."""
        try:
            result = await obstore.get_async(self.store, object_name(key))
        except FileNotFoundError:
            return None
        if result.meta["size"] != SEAL_BYTES + payload.nbytes:
            return b""
        body = memoryview(await result.buffer_async())
        copy(body[SEAL_BYTES:], payload)
        return bytes(body[:SEAL_BYTES])

    async def _clear(self, tenant: bytes | None, model: bytes | None) -> AsyncIterator[int]:
        if tenant is None and model is not None:
            tenants = await _list_folders(self.patient, None)
        else:
            tenants = [tenant.hex() if tenant else ""]
        for label in tenants:
            prefix = "/".join(filter(None, (label, model.hex() if model else "")))
            pages: AsyncIterable[Sequence[ObjectMeta]] = obstore.list(  # pyright: ignore[reportUnknownMemberType]
                self.patient, prefix or None, chunk_size=_DELETES_A_REQUEST
            )
            async for objects in pages:
                names = [meta["path"] for meta in objects if _NAME.fullmatch(meta["path"])]
                if names:
                    await self._delete(self.patient, names)
                yield len(names)

    async def _delete(self, store: ObjectStore, names: list[str]) -> None:
        try:
            await obstore.delete_async(store, names)
        except FileNotFoundError:  # files only: somebody else clears, too, so delete one at a time
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(store, name)

    # --- between the threads --------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the loop and wait for it.

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
            raise OSError(_in_one_line(error)) from None
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()


async def _released(view: memoryview) -> None:
    """Wait until this memory is no longer read: releasing a view fails while it is in use."""
    while True:
        try:
            view.release()
        except BufferError:
            await asyncio.sleep(0.001)
        else:
            return


def _in_one_line(error: BaseException) -> str:
    """Return an error's first line, without the queries of URLs, which may contain signatures."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {_QUERY.sub('?...', first)[:300]}"


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes in pieces, so that threads waiting for the GIL, such as the loop's, get it in between."""
    for first in range(0, len(source), _COPIED_AT_ONCE):
        target[first : first + _COPIED_AT_ONCE] = source[first : first + _COPIED_AT_ONCE]


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

    Credentials come from the environment or the machine. Options: `timeout`, seconds of a request that somebody waits
    for (three quarters of the tier's deadline, and below it; writes and clears have ten times as much), `batch` (4:
    entries per call), `ca` (a PEM file); for S3 `endpoint`, `region`, `virtual_hosted`, `sign_payload`, `anonymous`;
    for Azure `account`, `endpoint`.
    """
    timeout = url.take_timeout()
    batch_entries = int(url.take_number("batch", 4, least=1, most=_MOST_ENTRIES))
    try:
        if url.scheme == "file":
            store = patient = _open_file(url)
        else:
            open_store = _opener_of(url)
            store, patient = open_store(timeout), open_store(PATIENCE * timeout)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--tier {url.name}: {_in_one_line(error)}") from None
    return ObjectTier(pool, store, batch_entries, patient)


def _open_file(url: TierUrl) -> ObjectStore:
    if url.host or url.path in ("", "/"):
        raise ConfigError(f"--tier {url.name}: write file:///FOLDER, with three slashes")
    return LocalStore(Path(url.path), mkdir=True)


def _opener_of(url: TierUrl) -> Callable[[float], ObjectStore]:
    """Take the options out of a URL. Return a function that opens its store, given the seconds of one request."""
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
        retry: RetryConfig = {  # for immediate failures, for example a connection that the store has closed
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

"""The contracts of accelerator backends, and their discovery by entry points.

A backend author implements `Backend` and `Copier`. `kvdepot.client.WorkerTransfers` makes a `TransferContext` of the
copier. Finding a backend imports nothing heavy.
"""

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar, runtime_checkable

from kvdepot.config import DEADLINE_SECONDS
from kvdepot.errors import BackendUnavailable
from kvdepot.installing import install_line
from kvdepot.keys import KeyRun
from kvdepot.kvcache import NO_BLOCK, BlockIds, CacheGroup, CopyBatch, Direction, KVCache, MoveTokens
from kvdepot.layout import GroupKind
from kvdepot.pool.files import PoolMemory
from kvdepot.wire.messages import CacheSpec

__all__ = [
    "NO_BLOCK",
    "Backend",
    "BackendStatus",
    "BlockIds",
    "CacheGroup",
    "Capability",
    "Copier",
    "CopyBarrier",
    "CopyBatch",
    "Direction",
    "EngineTraits",
    "KVCache",
    "ReadyEvent",
    "TransferContext",
    "TransferFuture",
    "get_backend",
    "list_backends",
    "mover_module",
]

ENTRY_POINT_GROUP = "kvdepot.backends"
MOVER_GROUP = "kvdepot.movers"
KNOWN_BACKENDS = ("cpu", "cuda", "hpu", "xpu")  # names of extras, too

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class TransferFuture(Protocol[T_co]):
    """The outcome of one store or retrieve, owned and polled by the adapter that submitted it.

    Until it is done, the engine must neither write nor free the blocks of the transfer.
    """

    @property
    def num_chunks(self) -> int:
        """Once done: the number of leading chunks of the run that are in place (retrieve) or in the depot (store)."""
        ...

    @property
    def num_bytes(self) -> int:
        """Once done: the bytes that this transfer moved."""
        ...

    @property
    def seconds(self) -> float:
        """Once done: the time it took, without the wait in the queue."""
        ...

    def query(self) -> bool:
        """Return whether the transfer is done. Never wait."""
        ...

    def result(self, timeout_seconds: float | None = None) -> T_co:
        """Wait for the outcome. Return True if the whole run was moved, False if the depot had or accepted less.

        If the depot is away, the result is False, not an exception.

        Raises:
            TimeoutError: the transfer is not done within `timeout_seconds`.
        """
        ...


class ReadyEvent(Protocol):
    """An event that the device reaches when the blocks of a store are written, for example `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        ...


class UnrecordedEvent:
    """Stands for a `ReadyEvent` that could not be recorded. Waiting for it raises, so the transfer is a miss."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def synchronize(self) -> None:
        """Raise the error."""
        raise self._error


CopyBarrier = Callable[[], AbstractContextManager[object]]
"""Returns a context manager. Entering it waits for the worker's running copies, and no copy begins until its exit."""


class Copier(Protocol):
    """Moves bytes between one worker's device memory and the mapped pool.

    One store and one retrieve may run at the same time, each on its own thread. `mark_ready` runs on the submitting
    thread. A copier that inherits this class overrides only the hooks that its device needs.
    """

    def store(self, batch: CopyBatch) -> bytes | None:
        """Copy blocks into extents. Return or raise only when nothing reads the blocks or writes the extents any more.

        If the batch asks for checksums, a copier may compute them on the way and return the packed XXH3-128 of all
        extents. If it returns None, they are computed from the pool.
        """
        ...

    def retrieve(self, batch: CopyBatch) -> bytes | None:
        """Copy extents into blocks. Return checksums or None, as `store` does.

        Return or raise only when nothing reads the extents or writes the blocks any more.
        """
        ...

    def begin_retrieve(self, batch: CopyBatch) -> Callable[[], bytes | None] | None:
        """Begin a retrieve.

        Return a function that waits for its end and returns its checksums, or None if it has ended without checksums.

        The caller may begin the next retrieve before it calls that function. It always calls it, on the same thread. If
        this call raises, no copy of `batch` is running. If the returned function raises, no copy of any retrieve begun
        so far is running.
        """
        checksums = self.retrieve(batch)
        return None if checksums is None else lambda: checksums

    def mark_ready(self, direction: Direction, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Return the event that the transfer must wait for, None for none. Never wait here.

        A device with streams marks the engine's stream here: a retrieve, and a store without `ready`, come after the
        work that this stream has now.
        """
        del direction
        return ready

    def wait_for(self, direction: Direction, ready: ReadyEvent) -> None:
        """Order the following copies of this direction after `ready`. Called on the thread that copies."""
        del direction
        ready.synchronize()

    def attach(self, mapping: PoolMemory, barrier: CopyBarrier) -> None:
        """Prepare for a new mapping of the pool, for example register it with the device. Copies may already use it.

        Args:
            mapping: replaces the previous one.
            barrier: enter it to release the previous mapping. No copy uses that afterwards.
        """
        del mapping, barrier

    def start_registering(self) -> None:
        """See `TransferContext`.

        Mappings whose registration `attach` deferred, and later ones, may be registered now.
        """

    def close(self) -> None:
        """Release threads, buffers and the mapping. No copy is running."""
        ...


class TransferContext(Protocol):
    """Moves blocks between one worker's paged KV cache and the depot.

    Submitting never waits for the device or the depot. The caller owns the futures. Each transfer of a request has its
    own future.
    """

    @property
    def spec(self) -> CacheSpec:
        """The properties that two caches must share to exchange chunks. The engine's scheduler uses it for lookups."""
        ...

    @property
    def move_tokens(self) -> MoveTokens | None:
        """A compiled move of tokens within the cache. None: connectors move tokens by the framework."""
        ...

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: it was not usable within `timeout_seconds`; the text gives the reason.
        """
        ...

    def submit_store(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, ready: ReadyEvent | None = None
    ) -> TransferFuture[bool]:
        """Store the chunks of `key` that the depot lacks, after `ready`.

        The blocks may be read at any time until the future is done.

        Raises:
            LayoutError: `block_ids` do not fit the key or the cache.
        """
        ...

    def submit_retrieve(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, skip_tokens: int = 0
    ) -> TransferFuture[bool]:
        """Fill the blocks with the chunks of `key`.

        The blocks of the first `skip_tokens` tokens of the run (whole blocks of all groups) are not written. If the
        outcome is False, the blocks after the first `num_chunks` chunks contain nothing useful.

        Raises:
            LayoutError: `block_ids` or `skip_tokens` do not fit the key or the cache.
        """
        ...

    def start_registering(self) -> None:
        """Note that the engine has captured its graphs, so that the pool may be registered with the device.

        A context created with `register_when_asked` waits for this or for its first transfer. Idempotent.
        """
        ...

    def close(self) -> None:
        """Finish the running transfers and leave the depot. Idempotent."""
        ...


class Capability(enum.StrEnum):
    """An ability of a backend beyond store and retrieve."""

    ASYNCHRONOUS = "asynchronous"  # transfers may run on their own threads, beside the caller
    COMPILED_COPY = "compiled_copy"  # the backend's own copy was built; without it, copies are slower
    DEPOT_DRIVEN = "depot_driven"  # a mover of the depot can copy


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """The facts about an engine that decide whether a backend suits it."""

    name: str  # for example "vllm"
    kinds: tuple[GroupKind, ...]  # of its layer groups
    prefix_caching: bool  # whether the engine's own prefix cache is on


class Backend(Protocol):
    """An accelerator, found by the entry point group `kvdepot.backends`. Finding it imports nothing heavy.

    Derive from this class. Most backends suit every engine and cut pages, so they keep these two answers.

    Attributes:
        name: the entry point's name.
        device_type: the device type as in `torch.device`.
        capabilities: the abilities beyond store and retrieve.
        settings: the options of `create_context` that connectors pass on from their users.
    """

    name: str
    device_type: str
    capabilities: frozenset[Capability]
    settings: frozenset[str] = frozenset()

    def why_unsuited(self, engine: EngineTraits) -> str | None:
        """Return None if the described engine can use the backend on this device, else the reason and the remedy.

        An engine's port to a device may behave differently, for example move blocks without changing their ids.
        """
        del engine
        return None

    def cuts_pages(self, row_tokens: int, **options: Any) -> bool:
        """Return whether retrieves can cut entries of workers with other heads fast enough.

        Args:
            row_tokens: the neighbouring tokens of one head in a page.
            options: options of `create_context`.
        """
        del row_tokens, options
        return True

    def why_unavailable(self) -> str | None:
        """Return None if the backend can be used here, else the reason and the remedy."""
        ...

    def create_context(
        self, cache: KVCache, *, url: str | None = None, deadline_seconds: float = DEADLINE_SECONDS, **options: Any
    ) -> TransferContext:
        """Return a context for one worker.

        Args:
            cache: the worker's cache. The context keeps its tensors alive until `close`.
            url: the depot's URL, None for the depot in the default directory.
            deadline_seconds: the limit of each request to the depot.
            options: further options of the backend.

        Raises:
            BackendUnavailable: the driver refuses the device. `get_backend` has checked `why_unavailable`.
            LayoutError: the tensors do not fit their description.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend, and whether it can be used here."""

    name: str
    distribution: str  # name and version of the package; "" if it is not installed
    device_type: str
    capabilities: tuple[str, ...]
    why_unavailable: str | None


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def get_backend(name: str) -> Backend:
    """Return the backend of a device type: "cpu", "cuda", "xpu", "hpu" or a third party's.

    Raises:
        BackendUnavailable: it is not installed, broken, or without its device; the text gives the remedy.
    """
    entry = _entry_points().get(name)
    if entry is None:
        installed = ", ".join(sorted(_entry_points())) or "none"
        way_out = install_line(name) if name in KNOWN_BACKENDS else f"installed are: {installed}"
        raise BackendUnavailable(f"no backend {name!r} is installed: {way_out}")
    backend = _load(entry)
    reason = backend.why_unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r}: {reason}")
    return backend


def mover_module(name: str) -> str | None:
    """Return the module to run as the mover with this name, None if it is not installed. Imports nothing."""
    return next((entry.module for entry in entry_points(group=MOVER_GROUP, name=name)), None)


def _load(entry: EntryPoint) -> Backend:
    try:
        return entry.load()
    except Exception as error:
        raise BackendUnavailable(f"backend {entry.name!r} ({entry.value}) does not load: {error!r}") from error


def list_backends() -> list[BackendStatus]:
    """Return all known and all installed backends, with the reason if one cannot be used."""
    found = _entry_points()
    result: list[BackendStatus] = []
    for name in sorted({*found, *KNOWN_BACKENDS}):
        entry = found.get(name)
        if entry is None:
            result.append(BackendStatus(name, "", name, (), f"not installed: {install_line(name)}"))
            continue
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
        try:
            backend = _load(entry)
        except BackendUnavailable as error:
            result.append(BackendStatus(name, distribution, name, (), str(error)))
            continue
        capabilities = tuple(sorted(backend.capabilities))
        result.append(BackendStatus(name, distribution, backend.device_type, capabilities, backend.why_unavailable()))
    return result

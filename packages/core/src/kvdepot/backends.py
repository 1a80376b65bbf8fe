"""Backends of accelerators: what one offers (contexts, futures), and how it is found by its entry point.

Finding a backend imports nothing heavy. `kvdepot.client.transfers` is the part of a context that is the same for all.
"""

import argparse
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from kvdepot.errors import BackendUnavailable
from kvdepot.keys import KeyRun
from kvdepot.layout import GroupKind
from kvdepot.wire.messages import CacheSpec

ENTRY_POINT_GROUP = "kvdepot.backends"
MOVER_GROUP = "kvdepot.movers"
BENCH_GROUP = "kvdepot.benches"
KNOWN_BACKENDS = {"cpu": "kvdepot[cpu]", "cuda": "kvdepot[cuda]", "xpu": "kvdepot[xpu]", "hpu": "kvdepot[hpu]"}

T_co = TypeVar("T_co", covariant=True)

BlockIds = Sequence[Sequence[int]]
"""Block ids of a run of chunks, one sequence for each layer group, in token order.

A sequence may cover fewer chunks than the run: then it covers the run's *last* chunks (a sliding window holds only the
end of a prefix, a recurrent group one state for its last chunks). Always whole chunks. In a retrieve `NO_BLOCK` stands
for a block that is not wanted (before the window, in the first chunk that it reaches)."""

NO_BLOCK: Final = -1


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One layer group of an engine's KV cache, as a backend gets it.

    `tensors` has one tensor for each layer (or two, keys and values), each `(num_blocks, ...)` with the blocks as first
    dimension, on the backend's device: anything with `data_ptr`, `stride`, `element_size` and `shape`, in host memory
    also with `__array_interface__`. Blocks may be padded or interleaved with other layers', but the bytes of one block
    of one tensor are contiguous; where they do not lie in the order of the tensor's dimensions, the context's `format`
    names the order. The rest describes the group to the depot and its operator.
    """

    tensors: Sequence[Any]
    block_tokens: int
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int = 0
    shard: int = 0
    num_shards: int = 1
    num_layers: int = 0  # 0: one a tensor
    physical_block_tokens: int = 0  # 0: the same as the logical block
    compress_ratio: int = 1
    hidden_dims: tuple[int, ...] = ()
    is_mla: bool = False
    attention_backend: str = ""


@runtime_checkable
class TransferFuture(Protocol[T_co]):
    """The outcome of one store or retrieve. The adapter that submitted it owns it and polls it.

    Until it is done the engine must neither write nor free the blocks of the transfer.
    """

    @property
    def num_chunks(self) -> int:
        """Once done: leading chunks of the run that are in place (retrieve) or in the depot (store)."""
        ...

    @property
    def num_bytes(self) -> int:
        """Once done: bytes that this transfer moved."""
        ...

    @property
    def seconds(self) -> float:
        """Once done: how long it took, waiting in the queue left out."""
        ...

    def query(self) -> bool:
        """Return whether it is done. Never waits."""
        ...

    def result(self, timeout_seconds: float | None = None) -> T_co:
        """Wait for and return the outcome: True if the whole run was moved, False if the depot had or took less.

        A depot that is away is a False, not an exception.

        Raises:
            TimeoutError: not done within `timeout_seconds`.
        """
        ...


class ReadyEvent(Protocol):
    """What a device records when the blocks of a store are written, for example `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        ...


class TransferContext(Protocol):
    """Moves blocks between one worker's paged KV cache and the depot.

    Submitting never waits for the device or the depot. A context keeps no list of what is pending: the caller owns the
    futures. Several transfers of one request are several futures.
    """

    @property
    def spec(self) -> CacheSpec:
        """What decides who can share; the scheduler of the same engine looks up with an equal one."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether a depot is there now."""
        ...

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: none within `timeout_seconds`; the text says why.
        """
        ...

    def submit_store(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, ready: ReadyEvent | None = None
    ) -> TransferFuture[bool]:
        """Store the chunks of `key` that the depot lacks, once `ready` has happened.

        The blocks are read at any time until the future is done.

        Raises:
            LayoutError: `block_ids` do not fit the key or the cache.
        """
        ...

    def submit_retrieve(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, skip_tokens: int = 0
    ) -> TransferFuture[bool]:
        """Fill the blocks with the chunks of `key`.

        The blocks of the first `skip_tokens` tokens of the run (whole blocks of every group) are left as they are.
        After a False the blocks behind the first `num_chunks` chunks hold nothing of use.

        Raises:
            LayoutError: `block_ids` or `skip_tokens` do not fit the key or the cache.
        """
        ...

    def close(self) -> None:
        """Finish what is running and leave the depot. Twice is harmless."""
        ...


class Capability(enum.StrEnum):
    """What a backend can do beyond store and retrieve."""

    ASYNCHRONOUS = "asynchronous"  # transfers run beside the caller
    COMPILED_COPY = "compiled_copy"  # the backend's own copy was built; without it copies are slower
    DEPOT_DRIVEN = "depot_driven"  # a mover of the depot can copy


class Backend(Protocol):
    """An accelerator, as found under the entry point group `kvdepot.backends`. Finding it imports nothing heavy."""

    @property
    def name(self) -> str:
        """The entry point's name."""
        ...

    @property
    def device_type(self) -> str:
        """The device type as in `torch.device`."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can do."""
        ...

    def why_unavailable(self) -> str | None:
        """Return None if it can be used here, else a sentence with the way out."""
        ...

    def create_context(
        self,
        groups: Sequence[CacheGroup],
        instance: str,
        *,
        dtype: str,
        rank: int = 0,
        world_size: int = 1,
        model: str = "",
        format: str = "",  # noqa: A002  # the field's word
        chunk_tokens: int | None = None,
        url: str | None = None,
        deadline_seconds: float = 2.0,
        **options: Any,
    ) -> TransferContext:
        """Return a context for one worker.

        Args:
            groups: the cache; its tensors are kept alive until `close`.
            instance: the engine's name.
            dtype: of the cache, for example "bfloat16".
            rank: of this worker.
            world_size: workers of the engine.
            model: for the operator.
            format: how the bytes inside a block are arranged; caches that differ in it never share.
            chunk_tokens: None for the default (`default_chunk_tokens`). All workers and the scheduler say the same.
            url: the depot, None for the one in the default directory.
            deadline_seconds: of each request to the depot.
            options: the backend's own.

        Raises:
            BackendUnavailable: `why_unavailable` is not None.
            LayoutError: the tensors are not what they are said to be.
        """
        ...


class DeviceBench(Protocol):
    """A bench of one accelerator, named by its entry point under `kvdepot.benches`: `kvdepot bench NAME`.

    Finding it imports nothing heavy.
    """

    @property
    def help(self) -> str:
        """One line for the list of benches."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its own options; `--json` is there."""
        ...

    def run(self, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
        """Measure, say a line for people now and then, and return all of it for JSON.

        Raises:
            BackendUnavailable: no such device here.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend and whether it can be used here."""

    name: str
    distribution: str  # name and version of the package, "" when none is installed
    device_type: str
    capabilities: tuple[str, ...]
    why_unavailable: str | None


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def get_backend(name: str) -> Backend:
    """Return the backend of a device type: "cpu", "cuda", "xpu", "hpu" or a third party's.

    Raises:
        BackendUnavailable: not installed, broken, or without its device; the message has the way out.
    """
    entry = _entry_points().get(name)
    if entry is None:
        installed = ", ".join(sorted(_entry_points())) or "none"
        way_out = f"pip install '{KNOWN_BACKENDS[name]}'" if name in KNOWN_BACKENDS else f"installed are: {installed}"
        raise BackendUnavailable(f"no backend {name!r} is installed: {way_out}")
    backend = _load(entry)
    reason = backend.why_unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r}: {reason}")
    return backend


def mover_module(name: str) -> str | None:
    """Return the module that is run as a mover of this name, None if none is installed. Imports nothing."""
    return next((entry.module for entry in entry_points(group=MOVER_GROUP, name=name)), None)


def _load(entry: EntryPoint) -> Backend:
    try:
        return entry.load()
    except Exception as error:
        raise BackendUnavailable(f"backend {entry.name!r} ({entry.value}) does not load: {error!r}") from error


def find_benches() -> dict[str, DeviceBench | BackendUnavailable]:
    """Return every bench that a backend brings, by its name; what does not load is the error that says why."""
    found: dict[str, DeviceBench | BackendUnavailable] = {}
    for entry in entry_points(group=BENCH_GROUP):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            found[entry.name] = BackendUnavailable(f"bench {entry.name!r} ({entry.value}) does not load: {error!r}")
    return found


def list_backends() -> list[BackendStatus]:
    """Return every known and every installed backend, with the reason when it cannot be used."""
    found = _entry_points()
    result: list[BackendStatus] = []
    for name in sorted({*found, *KNOWN_BACKENDS}):
        entry = found.get(name)
        if entry is None:
            result.append(BackendStatus(name, "", name, (), f"not installed: pip install '{KNOWN_BACKENDS[name]}'"))
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

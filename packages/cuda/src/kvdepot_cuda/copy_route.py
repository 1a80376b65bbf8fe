"""Copies for a CUDA worker, in its own process or by a mover of the depot.

`MoverRoute` uses a mover instead of the worker's own copier, as long as the registration offers the
worker's memory to one, and falls back to the copier if no mover can copy.

Order: a store reads its blocks after `ready` or, if none is given, after the work that the engine's stream has at the
time of the call. A retrieve always comes after that work, which may still read or clear the blocks. In mode `direct`,
the device does both waits, and no thread waits for the engine. In mode `ipc`, the thread of the transfer waits before
it sends any request, because events are not shared between processes. The option `stream` sets the engine's stream.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec.structs

from kvdepot.backends import CopyBatch, Direction
from kvdepot.client.channel import Channel
from kvdepot.client.copy_route import CopyRoute
from kvdepot.client.session import Session
from kvdepot.client.transfers import TransferOptions
from kvdepot.errors import ConfigError, DepotUnavailable
from kvdepot.movers.client import MoverUnavailable, await_mover, move
from kvdepot.wire import messages as m
from kvdepot_cuda.copy import BATCH_RUNS, PIECE_BYTES, CopyEngine
from kvdepot_cuda.driver import OpenDriver
from kvdepot_cuda.export import MOVER
from kvdepot_cuda.gather import CompileGather, compile_gather
from kvdepot_cuda.nvidia import CudaDriver

logger = logging.getLogger(__name__)

DIRECT: Final = "direct"
IPC: Final = "ipc"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CudaOptions(TransferOptions):
    """Options of a `CudaTransferContext`.

    Raises:
        ConfigError: there is no such mode.
    """

    mode: str = DIRECT
    """The copying process. "direct": the worker itself. "ipc": a mover of the depot or, if no mover can open its
    memory, the worker itself. The log and `kvdepot status` report that in one line."""
    stream: Callable[[], int] | None = None
    """Returns the handle of the stream on which the engine writes and reads its cache; called at each submission. None:
    torch's current stream if the tensors are torch's, else transfers wait only for `ready`."""
    piece_bytes: int = PIECE_BYTES  # bytes of the pool that are registered per driver call
    batch_runs: int = BATCH_RUNS  # runs copied per driver call
    gather_kernel: bool | None = None
    """Have a kernel copy many small runs at once where the worker copies. None: if Triton is installed. True: warn if
    there can be none. A mover has none: without MPS a GPU runs either the mover's kernels or the model's, while copies
    run beside both."""
    compile_gather: CompileGather = compile_gather  # compiles that kernel
    open_driver: OpenDriver = CudaDriver  # opens the driver of the device with a number
    mover: str = MOVER  # entry point of the mover, in the depot's environment

    def __post_init__(self) -> None:
        if self.mode not in (DIRECT, IPC):
            raise ConfigError(f"mode {self.mode!r}: give {DIRECT!r} or {IPC!r}")


class MoverRoute(CopyRoute):
    """Copies batches by a mover of the depot, as long as the registration offers the worker's memory to one.

    Args:
        copier: the worker's own copier.
        registration: has an offer if a mover is to copy.
        deadline_seconds: the limit of each request to the depot.
        register_as: see `Connection`.
    """

    def __init__(
        self,
        copier: CopyEngine,
        registration: m.RegisterKVCache,
        deadline_seconds: float,
        register_as: Callable[[m.RegisterKVCache], None],
    ) -> None:
        super().__init__(copier)
        self._own_copier = copier
        self._registration = registration
        self._deadline_seconds = deadline_seconds
        self._register_as = register_as
        self._ready_session: Session | None = None  # the session whose mover accepts requests
        # The time until which transfers wait for the mover; queued transfers do not wait anew.
        self._patient_until = 0.0
        # The last session with a mover, and earlier ones whose movers are still alive.
        self._moved_sessions: list[Session] = []
        self._falling_back = threading.Lock()
        self.is_mover_warm = False
        copier.waits_on_host = self.transfer_mode == IPC

    @property
    def transfer_mode(self) -> str:
        """The mode in force: "direct" (the worker copies) or "ipc" (a mover does)."""
        return self._registration.transfer_mode

    def is_ready(self, session: Session) -> bool:
        """Return whether transfers over a session need not wait for a mover."""
        return self.transfer_mode == DIRECT or self._ready_session is session

    def wait_for_mover(self, channel: Channel, timeout_seconds: float) -> None:
        """Wait for the mover of a session, or fall back if there will be none.

        Raises:
            DepotUnavailable: the depot or its mover is not ready within `timeout_seconds`.
            RemoteError: the depot refused the request.
        """
        try:
            await_mover(channel, timeout_seconds, self._deadline_seconds)
            self._ready_session = channel.session
        except MoverUnavailable as error:
            self.fall_back(f"no mover: {error}")

    def fall_back(self, why: str) -> None:
        """Begin a new session, in which the worker copies by itself."""
        with self._falling_back:
            if self.transfer_mode == DIRECT:
                return
            registration = msgspec.structs.replace(
                self._registration, transfer_mode=DIRECT, offer=None, fallback=why[:1024]
            )
            # In this order: once only this process's streams wait, no mover may copy.
            self._register_as(registration)
            self._registration = registration
            self._own_copier.waits_on_host = False
        logger.warning("the worker copies by itself from now on: %s", why)

    def end_movers(self) -> None:
        """End the movers of all sessions, so that no other process has the device's memory open."""
        for session in self._moved_sessions:
            session.end_movers()

    def copies_here(self, session: Session) -> bool:
        """See `CopyRoute`."""
        return not (isinstance(session.registration, m.RegisterKVCache) and session.registration.offer is not None)

    def opened(self, session: Session) -> None:
        """See `CopyRoute`."""
        earlier = [moved for moved in self._moved_sessions if moved is not session and moved.has_movers()]
        if self.copies_here(session):
            # Drop earlier sessions, as each keeps its pool mapped.
            self._moved_sessions, self._ready_session = earlier, None
        else:
            self._moved_sessions = [*earlier, session]
            self._patient_until = time.monotonic() + self._deadline_seconds

    def prepare(self, channel: Channel) -> None:
        """See `CopyRoute`."""
        if self.copies_here(channel.session) or self._ready_session is channel.session:
            return
        wait_seconds = max(0.0, self._patient_until - time.monotonic())
        self._with_mover(lambda: await_mover(channel, wait_seconds, self._deadline_seconds))
        self._ready_session = channel.session

    def store(self, channel: Channel, batch: CopyBatch) -> bytes | None:
        """See `CopyRoute`."""
        if self.copies_here(channel.session):
            return super().store(channel, batch)
        self._move(Direction.STORE, channel, batch)
        return None

    def begin_retrieve(self, channel: Channel, batch: CopyBatch) -> Callable[[], None] | None:
        """See `CopyRoute`. A mover does one retrieve at a time, so this returns when its copy has ended."""
        if self.copies_here(channel.session):
            return super().begin_retrieve(channel, batch)
        self._move(Direction.RETRIEVE, channel, batch)
        return None

    def _move(self, direction: Direction, channel: Channel, batch: CopyBatch) -> None:
        """See `kvdepot.movers.client.move`."""
        try:
            self.is_mover_warm = self._with_mover(lambda: move(channel, direction, batch, self._deadline_seconds))
        except DepotUnavailable:
            self._ready_session = None
            self.is_mover_warm = False
            self._patient_until = time.monotonic() + self._deadline_seconds
            raise

    def _with_mover(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except MoverUnavailable as error:
            self.fall_back(f"no mover: {error}")
            raise

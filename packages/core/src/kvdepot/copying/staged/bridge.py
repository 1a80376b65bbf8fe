"""`Bridge`: the only access to torch and to a device's library. The constructor of a context makes it."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Bridge:
    """torch, its module for the device, and the peculiarities of the device."""

    torch: Any
    device_type: str  # as in `torch.device`
    module: Any  # torch.hpu, torch.xpu: Stream, Event, stream, current_stream
    launch: Callable[[], object] = _nothing  # starts work that the device's library has deferred; does not wait
    compiles_shapes: bool = False  # an operation on a new shape costs seconds
    index: int | None = None  # of the device; None: the current one

    def current_stream(self) -> Any:
        """Return the calling thread's stream of the device."""
        return self.module.current_stream() if self.index is None else self.module.current_stream(self.index)

    @contextlib.contextmanager
    def issuing(self, stream: Any) -> Generator[None]:
        """Issue work to `stream`, in inference mode: a cache made in that mode cannot be written outside it."""
        with self.torch.inference_mode(), self.module.stream(stream):
            yield

    def host_buffer(self, num_bytes: int) -> tuple[Any, bool]:
        """Return int8 memory of the host, and whether it is pinned.

        Some versions for some devices cannot pin memory, and some only claim to have pinned it. So ask, then check.
        """
        with contextlib.suppress(RuntimeError, TypeError):
            buffer = self.torch.empty(num_bytes, dtype=self.torch.int8, pin_memory=True)
            if buffer.is_pinned():
                return buffer, True
        return self.torch.empty(num_bytes, dtype=self.torch.int8), False

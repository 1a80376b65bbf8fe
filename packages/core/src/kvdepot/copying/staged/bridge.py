"""What is asked of torch and of a device's library, in one place, found when a context is made."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Bridge:
    """torch, its module of the device, and what is particular to the device."""

    torch: Any
    device_type: str  # as in `torch.device`
    module: Any  # torch.hpu, torch.xpu: Stream, Event, stream, current_stream
    launch: Callable[[], object] = _nothing  # starts work that the device's library has put off; waits for nothing
    compiles_shapes: bool = False  # an operation on a new shape costs seconds
    pins: bool = True  # try to pin staging memory

    @contextlib.contextmanager
    def issuing(self, stream: Any) -> Generator[None]:
        """Give work to `stream`; in inference mode, outside which a cache that was made in it cannot be written."""
        with self.torch.inference_mode(), self.module.stream(stream):
            yield

    def host_buffer(self, num_bytes: int) -> tuple[Any, bool]:
        """Return int8 memory of the host, and whether it is pinned.

        Some versions of some devices cannot pin, some say that they did and did not: asked, then checked.
        """
        if self.pins:
            with contextlib.suppress(RuntimeError, TypeError):
                buffer = self.torch.empty(num_bytes, dtype=self.torch.int8, pin_memory=True)
                if buffer.is_pinned():
                    return buffer, True
        return self.torch.empty(num_bytes, dtype=self.torch.int8), False

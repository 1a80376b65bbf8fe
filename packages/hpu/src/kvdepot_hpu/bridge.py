"""What is asked of torch and of Habana's bridge, in one place, found when a context is made."""

import contextlib
import importlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bridge:
    """torch, its module of the device, and the way to launch what lazy mode has accumulated."""

    torch: Any
    hpu: Any  # torch.hpu: Stream, Event, stream, current_stream
    launch: Callable[[], object]  # mark_step; harmless in eager mode, does not wait for the device

    @classmethod
    def load(cls) -> "Bridge":
        """Import it."""
        importlib.import_module("habana_frameworks.torch")  # registers torch.hpu
        core = importlib.import_module("habana_frameworks.torch.core")
        torch: Any = importlib.import_module("torch")
        return cls(torch, torch.hpu, getattr(core, "mark_step", lambda: None))

    @contextlib.contextmanager
    def issuing(self, stream: Any) -> Generator[None]:
        """Give work to `stream`; in inference mode, outside which a cache that was made in it cannot be written."""
        with self.torch.inference_mode(), self.hpu.stream(stream):
            yield

    def host_buffer(self, num_bytes: int) -> tuple[Any, bool]:
        """Return int8 memory of the host, and whether it is pinned.

        Some versions of the bridge cannot pin, some say that they did and did not: asked, then checked.
        """
        try:
            buffer = self.torch.empty(num_bytes, dtype=self.torch.int8, pin_memory=True)
            if buffer.is_pinned():
                return buffer, True
        except (RuntimeError, TypeError):
            pass
        return self.torch.empty(num_bytes, dtype=self.torch.int8), False

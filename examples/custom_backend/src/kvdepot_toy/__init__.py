"""A kvdepot backend for a toy accelerator. Discovering it loads no module of the device."""

import importlib.util
from typing import Any

from kvdepot.backends import Backend, Capability, KVCache, TransferContext


class ToyBackend(Backend):
    """See `kvdepot.backends.Backend`."""

    name = "toy"
    device_type = "toy"
    capabilities = frozenset({Capability.ASYNCHRONOUS})

    def why_unavailable(self) -> str | None:
        """Return None if the backend can be used here, else the reason and the way out."""
        if importlib.util.find_spec("numpy") is None:
            return "numpy is not installed: pip install kvdepot-toy"
        return None

    def create_context(
        self, cache: KVCache, *, url: str | None = None, deadline_seconds: float = 2.0, **options: Any
    ) -> TransferContext:
        """Return a context for one worker."""
        from kvdepot.client import TransferOptions
        from kvdepot_toy.context import create_context

        return create_context(cache, TransferOptions(url=url, deadline_seconds=deadline_seconds, **options))


backend = ToyBackend()

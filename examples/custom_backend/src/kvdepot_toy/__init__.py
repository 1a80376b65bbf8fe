"""A kvdepot backend for a toy accelerator. Finding it loads nothing of the device."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdepot.backends import CacheGroup, Capability
from kvdepot.errors import BackendUnavailable

if TYPE_CHECKING:
    from kvdepot_toy.context import ToyTransferContext


class ToyBackend:
    """See `kvdepot.backends.Backend`."""

    name = "toy"
    device_type = "toy"
    capabilities = frozenset({Capability.ASYNCHRONOUS})

    def why_unavailable(self) -> str | None:
        """Return None if it can be used here, else a sentence with the way out."""
        if importlib.util.find_spec("numpy") is None:
            return "numpy is not installed: pip install kvdepot-toy"
        return None

    def create_context(
        self, groups: Sequence[CacheGroup], instance: str, *, dtype: str, **options: Any
    ) -> "ToyTransferContext":
        """Return a context for one worker."""
        reason = self.why_unavailable()
        if reason is not None:
            raise BackendUnavailable(f"backend 'toy': {reason}")
        from kvdepot_toy.context import ToyTransferContext

        return ToyTransferContext(groups, instance, dtype=dtype, **options)


backend = ToyBackend()

"""A request's hints about the future of its prefix: `kv_transfer_params={"kvdepot": {"session_end": true}}`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvdepot.wire.messages import MAXIMUM_PRIORITY, MAXIMUM_TTL_SECONDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of one request. `kvdepot.wire.messages.Hint` carries them to the depot when the request has ended."""

    session_ended: bool = False
    priority: int = 0
    ttl_seconds: float = 0.0

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> "Hints | None":
        """Return the hints of a request, None if it gives none.

        A wrong value is ignored with a log line; no request fails because of it.
        """
        end, priority, ttl = (params.get(name) for name in ("session_end", "priority", "ttl_seconds"))
        if end is None and priority is None and ttl is None:
            return None
        if end is not None and type(end) is not bool:
            _warn(params, "session_end", "true or false")
            end = None
        if priority is not None and (type(priority) is not int or not 0 <= priority <= MAXIMUM_PRIORITY):
            _warn(params, "priority", f"a whole number from 0 to {MAXIMUM_PRIORITY}")
            priority = None
        if ttl is not None and (type(ttl) not in (int, float) or not 0 < ttl <= MAXIMUM_TTL_SECONDS):
            _warn(params, "ttl_seconds", f"a number above 0, at most {MAXIMUM_TTL_SECONDS:g}")
            ttl = None
        if end is None and priority is None and ttl is None:
            return None
        return cls(bool(end), priority or 0, float(ttl or 0))


def _warn(params: Mapping[str, Any], name: str, expected: str) -> None:
    logger.warning("kvdepot.%s of a request is %.64r and ignored: give %s", name, params[name], expected)

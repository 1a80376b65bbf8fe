"""Hints of engines: how long to keep a prefix, and the session that used it. `docs/wire.md` describes their fate."""

from typing import Annotated, Final

from msgspec import Meta

from kvdepot.wire.messages import ContextRequest, Digests, Name

# A month: after a longer pause, a session is found in a tier, or computed again.
MAXIMUM_RETAIN_SECONDS: Final = 30 * 86400.0
RetainSeconds = Annotated[float, Meta(ge=0.0, le=MAXIMUM_RETAIN_SECONDS)]


class Hint(ContextRequest, tag="hint", frozen=True):
    """Advise how long to keep a prefix: the given chunks, from chunk 0 on, as far as no other prefix needs them.

    `session_ended`: the prefix will not be used again, so evict it first within its share. A use of the prefix revokes
    this.

    `session`: the prefix is the latest one of this agent session of the tenant. Operations can refer to it by this name
    from now on. With `session_ended`, the session is forgotten. `retain_seconds`: pin the session's prefix for that
    long, within the tenant's quota.
    """

    tenant: Name
    digests: Digests
    session_ended: bool = False
    session: Name = ""
    retain_seconds: RetainSeconds = 0.0

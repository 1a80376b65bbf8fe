"""Replies that refuse a request and replies that come later."""

from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.errors import ErrorCode
from kvdepot.keys import DIGEST_BYTES
from kvdepot.wire import frames


class Refused(Exception):
    """Raised for a request that is not served and has changed nothing; becomes an error reply."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class Deferred:
    """A reply that comes later. `reply` may be set before the handler returns."""

    reply: frames.Reply | None = None
    on_reply: Callable[[frames.Reply], None] | None = None

    def send(self, reply: frames.Reply) -> None:
        """Give the reply."""
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)


def count_digests(digests: bytes) -> int:
    """Return the number of digests.

    Raises:
        Refused: the bytes are not whole digests.
    """
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if rest:
        raise Refused(ErrorCode.BAD_KEY, f"{len(digests)} bytes of digests: each chunk has {DIGEST_BYTES}")
    return count

"""Replies that refuse a request and replies that come later."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

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


Wait = Callable[[Callable[[], None]], bool]
"""Begins to wait and calls the function once, later or at once. Returns False if there is nothing to wait for."""

Steps = Generator[Wait, bool, frames.Reply]
"""A handler that yields what it waits for, is sent whether it waited, and returns its reply."""


def run(steps: Steps) -> frames.Reply | Deferred:
    """Run a handler to its reply, now or later."""
    deferred = Deferred()

    def go_on(has_waited: bool | None) -> None:
        try:
            wait = steps.send(has_waited)  # type: ignore[arg-type]
            while not wait(partial(go_on, True)):
                wait = steps.send(False)
        except StopIteration as end:
            deferred.send(end.value)

    go_on(None)
    return deferred.reply or deferred


def count_digests(digests: bytes) -> int:
    """Return the number of digests.

    Raises:
        Refused: the bytes are not whole digests.
    """
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if rest:
        raise Refused(ErrorCode.BAD_KEY, f"{len(digests)} bytes of digests: each chunk has {DIGEST_BYTES}")
    return count

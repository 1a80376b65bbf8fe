"""Runs handlers that wait.

A handler returns its reply. If it has to wait, it is a generator: it yields each of its waits, and returns the reply at
the end.
"""

from collections.abc import Callable, Generator
from typing import Generic, TypeAlias, TypeVarTuple

from kvdepot.errors import ErrorCode
from kvdepot.wire import frames

Wait: TypeAlias = Callable[[Callable[[], None]], bool]
"""Begins a wait, and calls the function once at its end. Returns False if there is nothing to wait for."""

Steps: TypeAlias = Generator[Wait, bool, frames.Reply]
"""A handler that yields its waits, is sent whether each has waited, and returns its reply."""

Ts = TypeVarTuple("Ts")


class Refused(Exception):
    """Refuses a request that has changed nothing. Becomes an error reply."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Awaited(Generic[*Ts]):
    """The outcome of an operation that a handler began. The handler waits for it by `yield from`."""

    def __init__(self) -> None:
        self._values: list[tuple[*Ts]] = []
        self._resume: Callable[[], None] | None = None

    def set(self, *values: *Ts) -> None:
        """Set the outcome, and resume the handler if it waits."""
        self._values.append(values)
        if self._resume is not None:
            self._resume()

    def wait(self) -> Generator[Wait, bool, tuple[*Ts]]:
        """Wait for the outcome and return it."""
        if not self._values:
            yield self._begin
        return self._values[0]

    def _begin(self, resume: Callable[[], None]) -> bool:
        self._resume = resume
        return True


class PendingReply:
    """A waiting handler, and later its reply. Only `run` creates one.

    An object, not two closures that refer to each other: such a cycle would keep the bytes of a finished request until
    the garbage collector runs.
    """

    __slots__ = ("_on_error", "_steps", "on_reply", "reply")

    def __init__(self, steps: Steps, on_error: Callable[[Exception], frames.Reply]) -> None:
        self.reply: frames.Reply | None = None
        # Set by the sender of the reply. If it raises, it is called again with the error reply.
        self.on_reply: Callable[[frames.Reply], None] | None = None
        self._steps = steps
        self._on_error = on_error

    def begin(self, wait: Wait) -> None:
        """Begin the handler's wait, or resume it at once if there is nothing to wait for."""
        while not wait(self._resume):
            wait = self._steps.send(False)

    def _resume(self) -> None:
        try:
            try:
                self.begin(self._steps.send(True))
            except StopIteration as end:
                self._give(end.value)
        except Exception as error:
            self._give(self._on_error(error))

    def _give(self, reply: frames.Reply) -> None:
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)


def run(steps: Steps, on_error: Callable[[Exception], frames.Reply]) -> frames.Reply | PendingReply:
    """Run a handler until its reply or its first wait.

    An exception before the first wait is raised here. `on_error` turns a later one into a reply.
    """
    pending = PendingReply(steps, on_error)
    try:
        pending.begin(next(steps))
    except StopIteration as end:
        return end.value
    return pending.reply or pending

"""Jobs for a tier, the calls that they are cut into, and their outcomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvdepot.tiers.base import Extents


class Operation(IntEnum):
    """What a job does; the smaller goes first."""

    CLEAR = 0
    CONTAINS = 1
    READ = 2
    WRITE = 3


def _ignore(*_: object) -> None:
    """Do nothing with what a job reports."""


@dataclass(slots=True, eq=False)
class Job:
    """Keys, and for reads and writes their places in the pool. The submitter owns it."""

    operation: Operation
    keys: Sequence[bytes] = ()
    extents: Extents = ()
    checksums: Sequence[bytes] = ()  # of payloads to write, empty or zeros if unknown; others are not written
    labels: tuple[bytes | None, bytes | None] = (None, None)  # to clear
    asks_first: bool = False  # write only entries that the tier lacks
    on_part: "Callable[[Part], object]" = _ignore  # called by the owner of the queue with each part that it polls
    on_late: Callable[[], object] = _ignore  # likewise, once, when a call overruns its deadline; parts may still come
    num_left: int = 0  # keys without an outcome
    num_cleared: int | None = None  # None: it failed
    is_late: bool = False  # a call of it has overrun its deadline

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all of it."""
        return sum(num_bytes for _, num_bytes in self.extents)


@dataclass(frozen=True, slots=True)
class Part:
    """The outcomes of some of a job's keys: of `keys[first : first + len(outcomes)]`. Their extents are free again."""

    job: Job
    first: int
    outcomes: Sequence[bool]
    is_last: bool = False  # of its job
    corrupt: Sequence[int] = ()  # places in `keys` whose bytes did not match: neither written nor served
    checksums: Sequence[bytes] = ()  # of what was read, one for each outcome, empty for a miss


@dataclass(slots=True, eq=False)
class Call:
    """Some of a job's keys, which one thread asks the tier for at once."""

    job: Job
    first: int
    last: int
    started_at: float = 0.0  # or its last step
    has_run: bool = False
    is_late: bool = False
    outcomes: Sequence[bool] | None = None  # None: it failed
    corrupt: Sequence[int] = ()
    checksums: Sequence[bytes] = ()
    was_here: Sequence[bool] = ()

    @property
    def keys(self) -> Sequence[bytes]:
        """Its part of the job's keys."""
        return self.job.keys[self.first : self.last]

    @property
    def extents(self) -> Extents:
        """Its part of the job's extents."""
        return self.job.extents[self.first : self.last]

    @property
    def operation(self) -> Operation:
        """What its job does."""
        return self.job.operation

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for it."""
        return self.operation in (Operation.CONTAINS, Operation.READ)

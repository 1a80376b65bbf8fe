"""Jobs for a tier, the calls into which the queue divides them, and their outcomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvdepot.tiers.base import Extents


class JobKind(IntEnum):
    """The kinds of jobs."""

    CLEAR = 0
    CONTAINS = 1
    READ = 2
    WRITE = 3
    TOUCH = 4
    OUTDATE = 5


def _ignore(*_: object) -> None:
    """Do nothing: the default of callbacks."""


@dataclass(slots=True, eq=False)
class Job:
    """One operation on keys and, except for questions, on their entries' extents in the pool. The submitter owns it."""

    operation: JobKind
    keys: Sequence[bytes] = ()
    extents: Extents = ()
    # Expected checksums of payloads to write; empty or zeros if unknown. Payloads that differ are not written.
    checksums: Sequence[bytes] = ()
    names: tuple[bytes | None, bytes | None] = (None, None)  # hashes of the tenant and the model to clear
    generations: frozenset[bytes] = frozenset()  # to outdate
    is_first: bool = False  # whether to write it before others, as an engine of another node waits for it
    on_part: "Callable[[JobPart], object]" = _ignore  # called with each part, on the thread of the queue's owner
    on_late: Callable[[], object] = _ignore  # called once on that thread if a call is late; parts may follow
    num_left: int = 0  # keys without an outcome
    num_cleared: int | None = None  # None: it failed
    is_late: bool = False  # one of its calls exceeded its deadline
    has_failed: bool = False  # one of its calls raised, or was dropped

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all entries."""
        return sum(num_bytes for _, num_bytes in self.extents)


@dataclass(frozen=True, slots=True)
class JobPart:
    """The outcomes of `keys[first : first + len(outcomes)]` of a job. Their extents are free again."""

    job: Job
    first: int
    outcomes: Sequence[bool]
    is_last: bool = False  # no other part of the job follows
    corrupt: Sequence[int] = ()  # places in `keys` whose bytes did not match: neither written nor served
    checksums: Sequence[bytes] = ()  # one for each outcome of a read, empty for a miss


@dataclass(slots=True, eq=False)
class Call:
    """Some of a job's keys, in one call of the tier on one thread."""

    job: Job
    first: int
    last: int
    started_at: float = 0.0  # or when its last step began
    has_run: bool = False
    is_late: bool = False
    outcomes: Sequence[bool] | None = None  # None: it failed
    corrupt: Sequence[int] = ()
    checksums: Sequence[bytes] = ()

    @property
    def keys(self) -> Sequence[bytes]:
        """Its part of the job's keys."""
        return self.job.keys[self.first : self.last]

    @property
    def extents(self) -> Extents:
        """Its part of the job's extents."""
        return self.job.extents[self.first : self.last]

    @property
    def operation(self) -> JobKind:
        """The operation of its job."""
        return self.job.operation

    @property
    def is_urgent(self) -> bool:
        """Whether a request waits for it."""
        return self.operation in (JobKind.CONTAINS, JobKind.READ)

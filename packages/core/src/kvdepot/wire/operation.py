"""Declares an operation: a request that needs no session, its reply, its HTTP paths, and its command.

Each operation is declared once, in `kvdepot.wire.operations`. The server finds the handler by the operation's class
(`kvdepot.server.commands.answers`). HTTP bodies, the OpenAPI document (`kvdepot.ops.http_app`) and the arguments
of commands (`kvdepot.ops.operate`) are derived from its fields.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args

from msgspec import Struct

R = TypeVar("R", bound=Struct)


class Count(Struct):
    """The number of entries, chunks, pins, stores or tiers that an operation affected."""

    count: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An operation over HTTP. The body of a POST has the operation's fields; digests are hex strings."""

    method: str
    path: str
    summary: str
    # Makes the JSON answer from the request and the reply.
    show: Callable[[Any, Any], object] = lambda _request, reply: Count(reply.count)
    shown: Any = Count  # the type of that answer


@dataclass(frozen=True, slots=True)
class Argument:
    """A field of an operation on the command line. A field without a default is a positional argument."""

    help: str | None = None
    metavar: str | None = None
    flag: str = ""  # instead of the field's name
    read: Callable[[str], Any] = str
    default: Any = None  # for options that are not fields; a bool is a switch


@dataclass(frozen=True, slots=True)
class Command:
    """An operation as a subcommand of `kvdepot`. Fields annotated with an `Argument` become its arguments."""

    name: str
    help: str
    description: str
    # Makes the printed line from the request and the reply.
    says: Callable[[Any, Any], str] = lambda _request, _reply: ""
    options: tuple[tuple[str, Argument], ...] = ()  # further options, for a command with its own function
    has_json: bool = False


class Operation(Struct, Generic[R], array_like=True, frozen=True):
    """A request that needs no session and is answered with an `R`."""

    endpoints: ClassVar[tuple[Endpoint, ...]] = ()
    command: ClassVar[Command | None] = None
    seconds: ClassVar[float] = 2.0  # how long its command waits for the reply: most take one step of the loop
    needs_entries: ClassVar[bool] = False  # refused while the entries of an earlier server are being read
    # Whether a request without fields means everything; tools then require an explicit "all".
    may_mean_all: ClassVar[bool] = False

    @classmethod
    def reply_type(cls) -> type[R]:
        """Return `R`."""
        declared: Any = cls.__dict__["__orig_bases__"][0]
        return get_args(declared)[0]


class Reply(Struct, array_like=True, frozen=True):
    """The reply to a request, with the epoch of the server."""

    epoch: int

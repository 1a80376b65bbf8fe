"""The declaration of an operation: a request that needs no session, its reply, its paths of HTTP and its command.

Each is declared once, in `kvdepot.wire.operations`. The server finds its handler by its class
(`kvdepot.server.commands.answers`). HTTP bodies, the OpenAPI document (`kvdepot.ops.http_operations`) and arguments of
commands (`kvdepot.ops.operate`) follow from its fields.
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
    show: Callable[[Any, Any], object] = lambda _request, reply: Count(reply.count)  # the answer for request and reply
    shown: Any = Count  # its type


@dataclass(frozen=True, slots=True)
class Argument:
    """A field of an operation on the command line; without a default, its position is the field's."""

    help: str | None = None
    metavar: str | None = None
    flag: str = ""  # instead of the field's name
    read: Callable[[str], Any] = str
    default: Any = None  # of an option that is no field; those of type bool take no value


@dataclass(frozen=True, slots=True)
class Command:
    """An operation as a subcommand of `kvdepot`. Its arguments are the fields that are annotated with an `Argument`."""

    name: str
    help: str
    description: str
    says: Callable[[Any, Any], str] = lambda _request, _reply: ""  # the line for request and reply
    options: tuple[tuple[str, Argument], ...] = ()  # further ones of a command that has its own code
    has_json: bool = False


class Operation(Struct, Generic[R], array_like=True, frozen=True):
    """A request that needs no session, and that a depot answers with an `R`."""

    endpoints: ClassVar[tuple[Endpoint, ...]] = ()
    command: ClassVar[Command | None] = None
    seconds: ClassVar[float] = 2.0  # that its command waits for the reply
    needs_entries: ClassVar[bool] = False  # refused while the entries of an earlier server are being read
    may_mean_all: ClassVar[bool] = False  # if no field is given; then tools want that said

    @classmethod
    def reply_type(cls) -> type[R]:
        """Return `R`."""
        declared: Any = cls.__dict__["__orig_bases__"][0]
        return get_args(declared)[0]


class OperationReply(Struct, array_like=True, frozen=True):
    """The reply to an operation, with the epoch of the server."""

    epoch: int

"""Declares an operation: a request that needs no session, its reply, its HTTP paths, and its command.

Each operation is declared once, with its answer, in a module that its distribution names in the entry point group
`kvdepot.messages`. HTTP bodies, the OpenAPI document (`kvdepot.operate.http_app`) and the arguments of commands
(`kvdepot.operate.commands`) are derived from its fields.
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from inspect import getdoc
from typing import Annotated, Any, ClassVar, Final, Generic, TypeAlias, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import FieldInfo, astuple, fields

from kvdepot.config import LONGEST_TENANT

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "kvdepot.messages"
"""Distributions name their modules of requests here: of operators, and of engines (`messages.ContextRequest`).

The command line imports them, so they stay light.
"""

PATIENT_SECONDS: Final = 30.0  # for requests with many steps

R = TypeVar("R", bound=Struct)
Sender: TypeAlias = Callable[[], str]
"""Describes the sender of a request for the log."""

TenantName = Annotated[str, Meta(min_length=1, max_length=LONGEST_TENANT)]


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
    read: Callable[[str], Any] | None = None  # instead of reading the field's type
    default: Any = None  # for options that are not fields; a bool is a switch


@dataclass(frozen=True, slots=True)
class Group:
    """A word before the names of several commands."""

    name: str
    help: str
    description: str


@dataclass(frozen=True, slots=True)
class Command:
    """An operation as a subcommand of `kvdepot`. Fields annotated with an `Argument` become its arguments."""

    name: str
    help: str
    description: str
    # Makes the printed line from the request and the reply.
    says: Callable[[Any, Any], str] = lambda _request, _reply: ""
    # Runs a command that sends several requests or prints more than a line. It returns the exit status.
    run: Callable[[argparse.Namespace], int] | None = None
    options: tuple[tuple[str, Argument], ...] = ()  # further options, for a command with its own function
    group: Group | None = None
    has_json: bool = False


class Operation(Struct, Generic[R], array_like=True, frozen=True):
    """A request that needs no session and is answered with an `R`."""

    endpoints: ClassVar[tuple[Endpoint, ...]] = ()
    command: ClassVar[Command | None] = None
    seconds: ClassVar[float] = 2.0  # how long its command waits for the reply: most take one step of the loop
    needs_entries: ClassVar[bool] = False  # refused while the entries of an earlier server are being read
    # Whether a request without fields means everything; tools then require an explicit "all".
    may_mean_all: ClassVar[bool] = False

    def answer(self, server: Any, sender: Sender, /) -> Any:
        """Answer in a server (`kvdepot.server.app.DepotServer`), now or in steps.

        It may raise `Refused` only if it has changed nothing. A feature answers its own operations instead
        (`kvdepot.server.feature.Feature.operations`).
        """
        raise NotImplementedError

    @classmethod
    def reply_type(cls) -> type[R]:
        """Return `R`."""
        declared: Any = cls.__dict__["__orig_bases__"][0]
        return get_args(declared)[0]


OperatorRequest = Operation[Any]


@cache
def known_operations() -> tuple[type[OperatorRequest], ...]:
    """Return the operations of all installed distributions."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:
            # Without this, one broken distribution would end `kvdepot serve` and every command.
            logger.warning("leaving out the requests of %s (%s): %r", entry.name, entry.value, error)
    return tuple(cast("list[type[OperatorRequest]]", Operation.__subclasses__()))


Hex = Annotated[list[str], Meta(description="Bytes as hex strings, for example the keys of a prefix's chunks")]


def is_bytes(each: FieldInfo) -> bool:
    """Return whether a field has bytes, which people write as `Hex`."""
    kind = get_args(each.type)[0] if get_origin(each.type) is Annotated else each.type
    return kind is bytes


@cache
def body_type(operation: type[OperatorRequest]) -> type[Struct]:
    """Return the type of an object with the fields of an operation as people write them."""
    declared: list[Any] = []
    for each in fields(operation):
        kind: Any = Hex if is_bytes(each) else each.type
        if each.required:
            declared.append((each.encode_name, kind))
        elif is_bytes(each):
            declared.append((each.encode_name, Hex | UnsetType, UNSET))
        else:
            declared.append((each.encode_name, kind, each.default))
    if operation.may_mean_all:
        declared.append(("means_all", bool, msgspec.field(default=False, name="all")))
    return msgspec.defstruct(
        f"{operation.__name__}Body",
        declared,
        namespace={"__doc__": getdoc(operation)},
        forbid_unknown_fields=True,
        kw_only=True,
    )


def request_of(operation: type[OperatorRequest], body: Any) -> OperatorRequest:
    """Return the request in an object of `body_type`.

    Raises:
        ValueError: bytes are not in hex, or the body gives no field without `all`, or fields with `all`.
    """
    given: dict[str, Any] = {}
    for each in fields(operation):
        value = getattr(body, each.encode_name)
        if value is not UNSET:
            given[each.name] = b"".join(map(bytes.fromhex, value)) if is_bytes(each) else value
    request = operation(**given)
    if operation.may_mean_all and body.means_all == any(astuple(request)):
        names = ", ".join(f'"{name}"' for name in operation.__struct_encode_fields__)
        raise ValueError(f'give {names}, or "all": true for everything')
    return request


class Reply(Struct, array_like=True, frozen=True):
    """The reply to a request, with the epoch of the server."""

    epoch: int

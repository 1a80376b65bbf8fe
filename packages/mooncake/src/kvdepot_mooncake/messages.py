"""Messages between the depot's process and the child process with Mooncake's SDK, one per packet."""

from enum import IntEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from kvdepot.tiers.keys import KEY_BYTES, NAME_HASH_BYTES
from kvdepot.tiers.trailer import TRAILER_BYTES

KEYS_A_MESSAGE: Final = 256  # with their extents, they fit into `MESSAGE_BYTES`
MESSAGE_BYTES: Final = 1 << 16  # 256 for each key: key and trailer take 184

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
NameHash = Annotated[bytes, msgspec.Meta(min_length=NAME_HASH_BYTES, max_length=NAME_HASH_BYTES)]
Trailer = Annotated[bytes, msgspec.Meta(min_length=TRAILER_BYTES, max_length=TRAILER_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_A_MESSAGE)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class KeyOutcome(IntEnum):
    """The outcome of one key."""

    MISS = 0
    HERE = 1
    NO_SPACE = 2
    TRANSFER_FAILED = 3  # the node that holds it, or was to hold it, does not answer


class Join(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Join the cluster. Answered by `Joined` or `NodeFailed`."""

    pool_bytes: int
    prefix: str  # begins all names in the cluster
    local: str  # address at which other nodes reach this node; "": the one from which it reaches the master
    metadata: str
    segment_bytes: int  # memory contributed to the cluster
    buffer_bytes: int  # the SDK's buffer, which entries do not pass through
    protocol: str
    device: str
    master: str  # in the SDK's notation
    replicas: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Put extents. Answered by `Outcomes`. If either side dies, an entry exists as a whole or not at all."""

    keys: Keys
    trailers: list[Trailer]
    extents: list[tuple[Natural, Natural]]


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Fill extents. Answered by `Outcomes` with trailers. If either side dies, the extents may contain anything.

    Nothing accesses them once the child process is dead.
    """

    keys: Keys
    extents: list[tuple[Natural, Natural]]


class Contains(msgspec.Struct, frozen=True, array_like=True, tag="contains"):
    """Ask the master for entries. Answered by `Outcomes`. Changes nothing."""

    keys: Keys


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Remove entries. Answered by `Cleared`. If either side dies, some, all or none are removed."""

    keys: Keys


class RemoveNamed(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Remove entries by the hashes of names.

    Answered by `Cleared`. If either side dies, some, all or none are removed.
    """

    tenant: NameHash | None
    model: NameHash | None


Request: TypeAlias = Join | Write | Read | Contains | Remove | RemoveNamed


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The cluster is joined and the pool registered."""


class Outcomes(msgspec.Struct, frozen=True, array_like=True, tag="outcomes"):
    """One outcome per key. After `Read`, also one trailer per key, empty for a miss or an object of another size."""

    values: list[KeyOutcome]
    trailers: list[bytes] = []


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """The number of removed entries."""

    count: int


class NodeFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The whole request failed. The child process continues, except after `Join`."""

    text: str
    is_final: bool = False  # whether it will fail again, because something is not installed


Reply: TypeAlias = Joined | Outcomes | Cleared | NodeFailed

_REPLY: Final = msgspec.msgpack.Decoder[Reply](Reply)


def decode_reply(message: bytes) -> Reply:
    """Return the reply in a packet of the child process.

    Raises:
        ConnectionError: the packet is not a reply.
    """
    try:
        return _REPLY.decode(message)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConnectionError(f"not a reply: {error}") from error

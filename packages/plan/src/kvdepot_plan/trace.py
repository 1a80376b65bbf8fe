"""Reads traces of real traffic in Mooncake's JSONL format: requests, and the blocks of 512 tokens that they share.

One request a line: `{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [4, 9]}`. Two requests whose
lists begin with the same ids begin with the same tokens; the last block may be partial. Generated tokens have no
ids. The file's order is the order of arrival.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from msgspec import Meta, Struct

from kvdepot.errors import KVDepotError

BLOCK_TOKENS: Final = 512  # of Mooncake's traces
MAXIMUM_LINE_BYTES: Final = 1 << 20  # over 50,000 blocks, 25 million tokens

_Tokens = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_HashId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class TraceError(KVDepotError):
    """A trace cannot be replayed. The text names the file and the line."""


class TraceRequest(Struct, frozen=True):
    """One request: its time, its lengths in tokens and the ids of its prompt's blocks."""

    timestamp_ms: Annotated[float, Meta(ge=0)] = msgspec.field(name="timestamp")
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[_HashId, ...]

    def __post_init__(self) -> None:
        whole, rest = divmod(self.input_length, BLOCK_TOKENS)
        most = whole + (rest > 0)
        if not whole <= len(self.hash_ids) <= most:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids for an input_length of {self.input_length}, which is {most} blocks of"
                f" {BLOCK_TOKENS} tokens"
            )


def read_trace(path: Path | str, limit: int | None = None) -> Iterator[TraceRequest]:
    """Read requests one by one, the first `limit` of them if it is given. Empty lines are skipped.

    Raises:
        TraceError: while iterating, with file and line: the file cannot be read, or a line is not a request.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            yield from islice(requests_of(file, path), limit)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def requests_of(file: BinaryIO, path: Path) -> Iterator[TraceRequest]:
    """Read requests from an open trace. `path` is its name in errors; see `read_trace`."""
    decoder = msgspec.json.Decoder(TraceRequest)
    number = 0
    while line := file.readline(MAXIMUM_LINE_BYTES + 1):
        number += 1
        if len(line) > MAXIMUM_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MAXIMUM_LINE_BYTES} bytes")
        if line.isspace():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is one
            raise TraceError(f"{path}, line {number}: {error}") from error

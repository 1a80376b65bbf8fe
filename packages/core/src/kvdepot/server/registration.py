"""Checks the caches that workers and schedulers describe when they register."""

import logging

from kvdepot.errors import ErrorCode
from kvdepot.index.entries import PartPlace
from kvdepot.index.tree import digest_of
from kvdepot.layout import MAXIMUM_CELLS, GroupKind, Part, Plane
from kvdepot.pool.table import MAXIMUM_ENTRY_BYTES
from kvdepot.server.turns import Refused
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)


def check_version(version: int) -> None:
    """Refuse a protocol version that this server does not support.

    Raises:
        Refused: the text names the supported version.
    """
    reason = m.check_protocol_version(version)
    if reason:
        logger.warning("%s", reason)
        raise Refused(ErrorCode.VERSION_MISMATCH, reason)


def check_spec(spec: m.CacheSpec) -> None:
    """Refuse a cache whose chunks are not whole rows, or whose windows do not fit its groups.

    Raises:
        Refused: the text names the first wrong group.
    """
    for number, group in enumerate(spec.groups):
        if group.kind is not GroupKind.RECURRENT:
            _check_blocks(number, spec.chunk_tokens, group.row_tokens)
        if group.layers * group.heads > MAXIMUM_CELLS:
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: {group.layers} layers of {group.heads} heads")
        if (group.kind is GroupKind.SLIDING_WINDOW) != (group.window_tokens > 0):
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: {group.kind} with a window of {group.window_tokens}")


def check_worker(request: m.RegisterKVCache) -> tuple[PartPlace, ...]:
    """Return the place of a worker's entries in each layer group.

    Raises:
        Refused: the version, spec, details, rank or offer is invalid.
    """
    check_version(request.protocol_version)
    check_spec(request.spec)
    groups = _groups_of(request)
    if request.rank >= request.world_size:
        raise Refused(ErrorCode.BAD_LAYOUT, f"rank {request.rank} of {request.world_size}")
    _check_offer(request)
    return groups


def _groups_of(request: m.RegisterKVCache) -> tuple[PartPlace, ...]:
    spec = request.spec
    if len(request.details) != len(spec.groups):
        raise Refused(ErrorCode.BAD_LAYOUT, f"{len(request.details)} details for {len(spec.groups)} layer groups")
    groups: list[PartPlace] = []
    for number, (shape, detail) in enumerate(zip(spec.groups, request.details, strict=True)):
        part, plane = Part.of(detail.part), Plane(shape.layers, shape.heads)
        if not part.is_in(plane):
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: {part} of {plane}")
        blocks = 1
        if shape.kind is not GroupKind.RECURRENT:
            blocks = _check_blocks(number, spec.chunk_tokens, shape.row_tokens * detail.rows)
        size = blocks * sum(detail.page_sizes_bytes)
        if size > MAXIMUM_ENTRY_BYTES:
            raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: a chunk has {size} bytes")
        cell = blocks * detail.rows, _sizes_of_cell(number, part, detail)  # independent of the number of rows per block
        check = int.from_bytes(digest_of(cell)[:4], "little")
        groups.append(PartPlace(number, detail.part, size, check))
    return tuple(groups)


def _check_blocks(number: int, chunk_tokens: int, block_tokens: int) -> int:
    """Return the number of blocks in a chunk. Refuse chunks that do not consist of whole blocks."""
    num_blocks, rest = divmod(chunk_tokens, block_tokens)
    if rest:
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"group {number}: chunks of {chunk_tokens} tokens are not whole blocks of {block_tokens}",
        )
    return num_blocks


def _sizes_of_cell(number: int, part: Part, detail: m.GroupDetail) -> tuple[int, ...]:
    """Return the bytes that one row of each page has of one cell. They locate a cell in entries of other parts."""
    sizes = detail.page_sizes_bytes
    of_layer = sizes[: len(sizes) // part.num_layers]
    if of_layer * part.num_layers != sizes or any(size % (part.num_heads * detail.rows) for size in of_layer):
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"group {number}: {len(sizes)} pages of {sorted(set(sizes))[:9]} bytes are not {detail.rows} rows of each"
            f" cell of {part}",
        )
    return tuple(size // (part.num_heads * detail.rows) for size in of_layer)


def _check_offer(request: m.RegisterKVCache) -> None:
    """Refuse an offer that contradicts the registration. The mover checks it against the device."""
    offer = request.offer
    if offer is None:
        return
    if [len(pages) for pages in offer.pages] != [len(detail.page_sizes_bytes) for detail in request.details]:
        raise Refused(ErrorCode.BAD_LAYOUT, "the pages of an offer do not match the layer groups")
    if len(set(offer.allocations)) != len(offer.allocations):
        raise Refused(ErrorCode.BAD_LAYOUT, "an offer that names an allocation twice")
    for pages, detail in zip(offer.pages, request.details, strict=True):
        for page, size in zip(pages, detail.page_sizes_bytes, strict=True):
            if page.allocation >= len(offer.allocations) or page.stride_bytes < size:
                raise Refused(
                    ErrorCode.BAD_LAYOUT,
                    f"an offer with pages of {size} bytes, {page.stride_bytes} apart, in allocation"
                    f" {page.allocation} of {len(offer.allocations)}",
                )

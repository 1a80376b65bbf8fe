"""Describes a worker's KV cache for a mover: its allocations, and the places of its pages in them."""

from kvdepot.layout import CacheLayout, LayerGroup, PageLayout, Part, Plane
from kvdepot.wire.messages import MAXIMUM_ALLOCATIONS, MoverOffer, PagePlace, RegisterKVCache
from kvdepot_cuda.driver import Driver, DriverError

MOVER = "cuda"
"""The entry point of the mover that opens the exported memory."""


def offer_of(driver: Driver, layout: CacheLayout, mover: str = MOVER) -> MoverOffer:
    """Return the offer that lets a mover open the pages of `layout`.

    Tensors of one allocation share its handle, as a process opens each handle only once.

    Raises:
        DriverError: another process cannot open the memory, or a tensor crosses the end of its allocation.
    """
    numbers: dict[bytes, int] = {}

    def place_of(page: PageLayout) -> PagePlace:
        handle, base, num_bytes = driver.export_memory(page.address)
        if last_byte_of(page) > base + num_bytes:
            raise DriverError("export_memory", "blocks beyond the end of their allocation", f"of {num_bytes} bytes")
        return PagePlace(numbers.setdefault(handle, len(numbers)), page.address - base, page.stride_bytes)

    with driver.activated():
        pages = tuple(tuple(map(place_of, group.pages)) for group in layout.groups)
    if len(numbers) > MAXIMUM_ALLOCATIONS:
        raise DriverError("export_memory", f"{len(numbers)} allocations", f"at most {MAXIMUM_ALLOCATIONS} are shared")
    return MoverOffer(mover, driver.uuid, tuple(numbers), pages)


def layout_of(registration: RegisterKVCache, bases: list[int]) -> CacheLayout:
    """Return the layout of an offer, given the addresses of its allocations in this process.

    Raises:
        LayoutError: the offer is inconsistent.
    """
    offer = registration.offer
    assert offer is not None
    spec = registration.spec
    groups = tuple(
        LayerGroup(
            shape.kind,
            shape.row_tokens * detail.rows,
            tuple(
                PageLayout(bases[place.allocation] + place.offset, detail.num_blocks, size, place.stride_bytes)
                for place, size in zip(places, detail.page_sizes_bytes, strict=True)
            ),
            shape.window_tokens,
            Part.of(detail.part),
            Plane(shape.layers, shape.heads),
            detail.rows,
        )
        for shape, detail, places in zip(spec.groups, registration.details, offer.pages, strict=True)
    )
    return CacheLayout(groups, spec.chunk_tokens, spec.dtype, spec.format)


def last_byte_of(page: PageLayout) -> int:
    """Return the end address of the last block."""
    return page.address + (page.num_blocks - 1) * page.stride_bytes + page.page_size_bytes

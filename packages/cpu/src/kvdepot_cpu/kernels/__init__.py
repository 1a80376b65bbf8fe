"""The compiled library: copies of runs and rows, copies that also compute checksums, and moves of tokens.

It is called through ctypes, which releases the GIL. `copy_runs.c` copies four runs side by side with stores that bypass
the caches. `copy_summed.c` also computes the checksums of a store. `move_tokens.c` moves tokens within a paged cache,
and rotates K for text reused at another position. The library exists if the package was installed with a C compiler.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.copying.runs import Addresses
from kvdepot.kvcache import MoveTokens, TokenLayout
from kvdepot.wire.messages import CHECKSUM_BYTES

BYTES_WORTH_A_THREAD: Final = 8 << 20  # 0.6 ms at 13 GB/s, many times the cost of waking a thread
BYTES_WORTH_STREAMING: Final = 1 << 20  # smaller copies stay in the caches for the next reader
SUMMED_BLOCK_BYTES: Final = 1024  # the block of XXH3: 16 stripes of 64 bytes
SUMMED_ALIGNMENT_BYTES: Final = 32  # of AVX2's streaming stores


class Kernels:
    """The functions of the library. Columns of numbers are contiguous, and no two targets of a call overlap."""

    def __init__(self, path: Path) -> None:
        library, array, size, flag = ctypes.CDLL(str(path)), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

        def declared(name: str, *arguments: Any) -> Any:
            function = library[f"kvdepot_{name}"]
            function.argtypes = arguments
            return function

        self._copy_runs = declared("copy_runs", array, array, array, size, flag)
        self._copy_rows = declared("copy_rows", array, array, array, size, array, array, size, flag)
        self._copy_and_sum = declared("copy_and_sum", array, array, array, size, array, size, array)
        self._move_tokens = declared("move_tokens", array, size, array, size, array, array, array, flag)
        self.can_move_tokens = bool(library.kvdepot_can_move_tokens())  # whether this processor can run it

    def copy_runs(self, sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        """Copy runs, `(num_runs,)` each; sizes are in bytes."""
        streams = int(sizes.sum()) >= BYTES_WORTH_STREAMING
        self._copy_runs(*_pointers(sources, targets, sizes), len(sizes), streams)

    def copy_rows(
        self,
        sources: Addresses,
        targets: Addresses,
        sizes: Addresses,
        source_steps: Addresses,
        target_steps: Addresses,
        num_rows: int,
    ) -> None:
        """Copy rows of pages.

        Args:
            sources: `(num_pages,)`, the first row of each page.
            targets: `(num_pages,)`, the first row of each page.
            sizes: `(num_pages,)`, bytes of a row.
            source_steps: `(num_pages,)`, bytes from row to row.
            target_steps: `(num_pages,)`, bytes from row to row.
            num_rows: the rows of every page.
        """
        first, steps = _pointers(sources, targets, sizes), _pointers(source_steps, target_steps)
        self._copy_rows(*first, len(sizes), *steps, num_rows, int(sizes.sum()) * num_rows >= BYTES_WORTH_STREAMING)

    def copy_and_sum(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, extents: Addresses
    ) -> npt.NDArray[np.uint8] | None:
        """Copy runs that fill extents one after the other. Return the XXH3-128 of each extent, `(num_extents, 16)`.

        Return None and copy nothing if runs or extents are not whole blocks of `SUMMED_BLOCK_BYTES`, targets are not
        aligned to `SUMMED_ALIGNMENT_BYTES`, the runs do not fill the extents, or the processor cannot.

        Args:
            sources: `(num_runs,)`.
            targets: `(num_runs,)`.
            sizes: `(num_runs,)`, in bytes.
            extents: `(num_extents,)`, sizes in bytes.
        """
        digests = np.empty((len(extents), CHECKSUM_BYTES), np.uint8)
        runs, (sums,) = _pointers(sources, targets, sizes), _pointers(digests)
        return digests if self._copy_and_sum(*runs, len(sizes), extents.ctypes.data, len(extents), sums) else None

    def move_tokens(
        self,
        pages: Sequence[int],
        slices: npt.NDArray[np.int64],
        layout: TokenLayout,
        turn: npt.NDArray[np.float32],
        in_place: bool,
        *,
        num_threads: int,
    ) -> None:
        """Move tokens: see `kvdepot.kvcache.MoveTokens`. Only if `can_move_tokens`."""
        slices, numbers = np.ascontiguousarray(slices), np.array(layout, np.int64)
        cosines, sines = (np.ascontiguousarray(each) for each in turn)

        def move(some: npt.NDArray[np.uint64]) -> None:
            moved = _pointers(slices)[0], len(slices), *_pointers(numbers, cosines, sines)
            self._move_tokens(some.ctypes.data, len(some), *moved, in_place)

        addresses = np.array(pages, np.uint64)
        token_bytes = layout.heads * (layout.k_dims + layout.v_dims) * layout.item_bytes
        num_bytes = len(pages) * int(slices[:, 4].sum()) * token_bytes
        parts = min(num_threads, len(pages), 1 + num_bytes // BYTES_WORTH_A_THREAD)
        if parts == 1:
            move(addresses)
            return
        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(move, np.array_split(addresses, parts)))


def _pointers(*columns: npt.NDArray[Any]) -> list[int]:
    return [column.ctypes.data for column in columns]


def load_kernels() -> Kernels | None:
    """Return the compiled library, None if it was not built here."""
    path = next(Path(__file__).parent.glob("_copy_runs.*"), None)
    return None if path is None else Kernels(path)


def native_move_tokens(num_threads: int) -> MoveTokens | None:
    """Return the compiled move, None if it was not built or this processor cannot run it."""
    kernels = load_kernels()
    if kernels is None or not kernels.can_move_tokens:
        return None
    return partial(kernels.move_tokens, num_threads=num_threads)


def memcpy_runs(sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
    """Copy runs one by one with libc's memcpy. Needs no compiler."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        memcpy(target, source, size)

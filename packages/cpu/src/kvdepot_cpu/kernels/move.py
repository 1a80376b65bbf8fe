"""Moves tokens within a paged cache by `move_tokens.c`, and rotates K for text reused at another position."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdepot.kvcache import MoveTokens, TokenLayout
from kvdepot_cpu.kernels.copy import BYTES_WORTH_A_THREAD, library_of_kernels


def native_move_tokens(num_threads: int) -> MoveTokens | None:
    """Return the compiled move, None if it was not built or this processor cannot run it."""
    library = library_of_kernels()
    if library is None or not library.kvdepot_can_move_tokens():
        return None
    function = library.kvdepot_move_tokens
    array: Any = ctypes.c_void_p
    function.argtypes = [array, ctypes.c_size_t, array, ctypes.c_size_t, array, array, array, ctypes.c_int]
    function.restype = None

    def move_tokens(
        pages: Sequence[int],
        slices: NDArray[np.int64],
        layout: TokenLayout,
        turn: NDArray[np.float32],
        in_place: bool,
    ) -> None:
        slices, numbers = np.ascontiguousarray(slices), np.array(layout, np.int64)
        cosines, sines = (np.ascontiguousarray(each) for each in turn)

        def move(some: NDArray[np.uint64]) -> None:
            function(
                some.ctypes.data,
                len(some),
                slices.ctypes.data,
                len(slices),
                numbers.ctypes.data,
                cosines.ctypes.data,
                sines.ctypes.data,
                in_place,
            )

        addresses = np.array(pages, np.uint64)
        token_bytes = layout.heads * (layout.k_dims + layout.v_dims) * layout.item_bytes
        num_bytes = len(pages) * int(slices[:, 4].sum()) * token_bytes
        parts = min(num_threads, len(pages), 1 + num_bytes // BYTES_WORTH_A_THREAD)
        if parts == 1:
            move(addresses)
            return
        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(move, np.array_split(addresses, parts)))

    return move_tokens

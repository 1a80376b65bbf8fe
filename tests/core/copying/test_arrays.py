"""Tensors of any library, recognized by their attributes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.copying.arrays import page_layout_of as layout_on
from kvdepot.errors import LayoutError
from kvdepot.layout import PageLayout


def page_layout_of(tensor: Any) -> PageLayout:
    return layout_on(tensor, "cpu")


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], device: str = "cpu") -> Any:
    """Return an object with the attributes of a torch tensor with 2-byte elements at address 4096."""
    return SimpleNamespace(
        shape=shape,
        stride=lambda: strides,
        element_size=lambda: 2,
        data_ptr=lambda: 4096,
        device=SimpleNamespace(type=device),
    )


def test_a_tensor_is_described_by_its_pointer_and_strides() -> None:
    assert page_layout_of(tensor((8, 2, 16), (32, 16, 1))) == PageLayout(4096, 8, 64, 64)


def test_blocks_may_be_padded_or_interleaved() -> None:
    assert page_layout_of(tensor((8, 2, 16), (128, 16, 1))) == PageLayout(4096, 8, 64, 256)


def test_dimensions_of_one_have_any_stride() -> None:
    assert page_layout_of(tensor((8, 1, 16), (16, 999, 1))) == PageLayout(4096, 8, 32, 32)


def test_an_array_is_described_by_its_interface() -> None:
    array = np.zeros((8, 100), np.float32)[:, :50]
    assert page_layout_of(array) == PageLayout(array.ctypes.data, 8, 200, 400)


def test_the_dimensions_of_a_block_may_lie_in_any_order() -> None:
    assert page_layout_of(tensor((8, 2, 4, 16), (512, 16, 32, 1))) == PageLayout(4096, 8, 256, 1024)
    assert page_layout_of(tensor((8, 2, 16), (32, 1, 2))) == PageLayout(4096, 8, 64, 64)


@pytest.mark.parametrize("strides", [(1, 8, 64), (32, 0, 1), (32, 1, 4), (64, 32, 1)])
def test_blocks_whose_bytes_are_scattered_are_refused(strides: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="not contiguous"):
        page_layout_of(tensor((8, 2, 16), strides))


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(LayoutError, match="use the backend of cuda"):
        page_layout_of(tensor((8, 16), (16, 1), device="cuda"))


def test_objects_that_are_not_tensors_and_read_only_arrays_are_refused() -> None:
    read_only = np.zeros((8, 8))
    read_only.flags.writeable = False
    for bad in ("text", [1, 2], np.zeros(()), read_only):
        with pytest.raises(LayoutError):
            page_layout_of(bad)

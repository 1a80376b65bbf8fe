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


@pytest.mark.parametrize(
    ("shape", "strides", "page", "step"),
    [
        ((8, 2, 16), (32, 16, 1), 64, 64),
        ((8, 2, 16), (128, 16, 1), 64, 256),  # padded or interleaved
        ((8, 1, 16), (16, 999, 1), 32, 32),  # a dimension of one has any stride
        ((8, 2, 4, 16), (512, 16, 32, 1), 256, 1024),  # the dimensions of a block lie in any order
        ((8, 2, 16), (32, 1, 2), 64, 64),
    ],
)
def test_a_tensor_is_described_by_its_pointer_and_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], page: int, step: int
) -> None:
    assert page_layout_of(tensor(shape, strides)) == PageLayout(4096, 8, page, step)


def test_an_array_is_described_by_its_interface() -> None:
    array = np.zeros((8, 100), np.float32)[:, :50]
    assert page_layout_of(array) == PageLayout(array.ctypes.data, 8, 200, 400)


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

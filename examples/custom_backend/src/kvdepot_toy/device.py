"""Stands for a vendor's library. Only `copy_out` and `copy_in` can access its memory."""

from dataclasses import dataclass

_memory = bytearray()


@dataclass(frozen=True)
class ToyTensor:
    """Blocks in the device's memory, each `page_size_bytes` long and `stride_bytes` after the previous one."""

    address: int
    num_blocks: int
    page_size_bytes: int
    stride_bytes: int


def allocate(num_blocks: int, page_size_bytes: int, stride_bytes: int) -> ToyTensor:
    """Return zeroed memory."""
    tensor = ToyTensor(len(_memory), num_blocks, page_size_bytes, stride_bytes)
    _memory.extend(bytes(num_blocks * stride_bytes))
    return tensor


def copy_out(address: int, target: memoryview) -> None:
    """Copy from the device. Return when the copy is done."""
    target[:] = memoryview(_memory)[address : address + len(target)]


def copy_in(source: memoryview, address: int) -> None:
    """Copy to the device. Return when the copy is done."""
    memoryview(_memory)[address : address + len(source)] = source

"""Kernels, each in a module that imports its compiler. Users import them; `import kvdepot_cuda` does not."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatherImage:
    """The kernel for one kind of device.

    Its parameters are an address (u64), a count (u32), and hidden null pointers.
    """

    image: bytes
    name: str
    num_threads: int
    shared_bytes: int
    num_hidden: int

"""`GatherImage`: a compiled kernel, handed from `kernels.gather`, which compiles it, to `gather`, which launches it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatherImage:
    """The kernel for one kind of device. It takes an address (u64) and a count (u32), and hidden null pointers."""

    image: bytes
    name: str
    num_threads: int
    shared_bytes: int
    num_hidden: int

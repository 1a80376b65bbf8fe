# pyright: basic, reportMissingImports=false
"""The gather kernel, in Triton (3.3 and newer): one launch copies a table of runs, from any address to any address.

It is compiled for a given kind of device, without needing one. `kvdepot_cuda.driver` launches it, so it runs without
torch and without Triton's own launcher.
"""

from typing import Final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WORDS: Final = 1024  # words of 8 bytes that a program copies at a time: 8 KiB
NUM_WARPS: Final = 4  # 64 bytes of each lane under way, in words of 16 bytes


@triton.jit
def gather_runs(table, num_runs, WORDS: tl.constexpr):  # noqa: N803  # Triton's way to write a constant
    """Copy runs; each program takes every `num_programs`-th of them.

    Args:
        table: address of int64 `(num_runs, 3)`: source address, target address, bytes.
        num_runs: rows of the table.
        WORDS: how many lanes a program has; a power of two.
    """
    rows = table.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, WORDS)
    for run in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        row = rows + run * 3
        source = tl.load(row)
        target = tl.load(row + 1)
        size = tl.load(row + 2)
        # Copy in words if both addresses allow it; copy the rest, or all, in bytes.
        words = tl.where(((source | target) & 15) == 0, size // 16 * 2, 0)
        wide_source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        wide_target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        for at in range(0, words, WORDS):
            inside = at + lane < words
            # The value is read only once: it must not evict the model's data from the caches.
            value = tl.load(wide_source + at + lane, mask=inside, eviction_policy="evict_first")
            tl.store(wide_target + at + lane, value, mask=inside)
        byte_source = source.to(tl.pointer_type(tl.int8))
        byte_target = target.to(tl.pointer_type(tl.int8))
        for at in range(words * 8, size, WORDS):
            inside = at + lane < size
            tl.store(byte_target + at + lane, tl.load(byte_source + at + lane, mask=inside), mask=inside)


def compile_for(capability: int):
    """Return the kernel as Triton compiles it for a compute capability (90 is 9.0); no device is needed."""
    source = ASTSource(
        fn=gather_runs,
        signature={"table": "i64", "num_runs": "i32", "WORDS": "constexpr"},
        constexprs={(2,): WORDS},
    )
    return [triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": NUM_WARPS})]

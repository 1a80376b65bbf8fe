# pyright: basic, reportMissingImports=false
"""XXH3-128 of extents, in Triton (3.3 and newer): two launches over one table.

Only the last step of XXH3 with each block of 1,024 bytes, the scramble, depends on the blocks before. So
`sum_blocks` sums all blocks side by side, and `digest_extents` takes the sums of each extent in order.
`kvdepot_cuda.sums` describes the table and launches both. The algorithm is that for more than 240 bytes and seed 0 of
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from typing import Any, Final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvdepot_cuda.sums import CONSTANTS, EXTENTS, RUNS

BLOCKS: Final = 8  # of each run at a time: with `RUNS`, 8 words of 16 bytes of each lane under way
NUM_WARPS: Final = 8
_CONSTANTS: Final = tl.constexpr(len(CONSTANTS))


@triton.jit
def _product(mixed):
    """Return the products of 32 by 32 bits of words, their low half by their high half."""
    return mixed.to(tl.uint32).to(tl.uint64) * (mixed >> 32).to(tl.uint32).to(tl.uint64)


@triton.jit
def sum_blocks(table, num_extents, num_runs, scratch, RUNS: tl.constexpr, BLOCKS: tl.constexpr):  # noqa: N803  # Triton's way to write a constant
    """Sum the blocks of runs; each program takes every `num_programs`-th group of `RUNS` runs.

    Args:
        table: address of the constants, the extents and the runs. A run is the address of its first byte, the number
            of its first block in the batch, and how many blocks it has.
        num_extents: in the table.
        num_runs: in the table.
        scratch: address of the digests, `(num_extents, 2)`, then the sums, `(num_blocks, 8)`.
        RUNS: a power of two.
        BLOCKS: a power of two.
    """
    words = table.to(tl.pointer_type(tl.uint64))
    rows = words + _CONSTANTS + num_extents * 3
    sums = scratch.to(tl.pointer_type(tl.uint64)) + num_extents * 2
    unit = tl.arange(0, RUNS * BLOCKS)
    # Eight stripes at a time: they and the pairs of lanes are the threads of one warp, so no other joins the reduction.
    stripe = tl.arange(0, 8)[None, :, None, None]
    lane = tl.arange(0, 4)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    pair = tl.arange(0, 4)[None, :] * 2
    for group in range(tl.program_id(0), tl.cdiv(num_runs, RUNS), tl.num_programs(0)):
        run = group * RUNS + unit // BLOCKS
        is_run = run < num_runs
        data = tl.load(rows + run * 3, mask=is_run, other=0).to(tl.pointer_type(tl.uint64))
        first = tl.load(rows + run * 3 + 1, mask=is_run, other=0)
        count = tl.load(rows + run * 3 + 2, mask=is_run, other=0).to(tl.int32)
        for at in range(0, tl.max(count, 0), BLOCKS):
            block = at + unit % BLOCKS
            inside = (block < count)[:, None]
            even, odd = tl.zeros((RUNS * BLOCKS, 4), tl.uint64), tl.zeros((RUNS * BLOCKS, 4), tl.uint64)
            for half in tl.static_range(0, 16, 8):
                place = (data + block * 128)[:, None, None, None] + (half + stripe) * 8 + lane
                value = tl.load(
                    tl.multiple_of(place, (1, 1, 1, 16)),
                    mask=inside[:, :, None, None],
                    other=0,
                    eviction_policy="evict_first",  # a value is read only once
                )
                mixed = value ^ tl.load(words + half + stripe + lane)
                # Each lane adds its product, and its neighbour's data.
                even_product, odd_product = tl.split(_product(mixed))
                even_value, odd_value = tl.split(value)
                even += tl.sum(even_product + odd_value, 1)
                odd += tl.sum(odd_product + even_value, 1)
            target = sums + (first + block)[:, None] * 8 + pair
            tl.store(target, even, mask=inside)
            tl.store(target + 1, odd, mask=inside)


@triton.jit
def _half_digest(even, odd, secret, start):
    """Return half of the digests, `(EXTENTS,)`, of the sums of extents, `(EXTENTS, 4)`."""
    pair = tl.arange(0, 4)[None, :] * 2
    even ^= tl.load(secret + pair)
    odd ^= tl.load(secret + pair + 1)
    value = start + tl.sum((even * odd) ^ tl.umulhi(even, odd), 1)
    value = (value ^ (value >> 37)) * 0x165667919E3779F9
    return value ^ (value >> 32)


@triton.jit
def digest_extents(table, num_extents, num_runs, scratch, EXTENTS: tl.constexpr):  # noqa: N803
    """Write the high and the low half of the digests; each program takes `EXTENTS` extents. See `sum_blocks`.

    An extent in the table is the number of its first block in the batch, how many blocks it has, and the address of its
    last stripe, which has a secret of its own.
    """
    words = table.to(tl.pointer_type(tl.uint64))
    number = tl.program_id(0) * EXTENTS + tl.arange(0, EXTENTS)
    is_extent = number < num_extents
    row = words + _CONSTANTS + number * 3
    first = tl.load(row, mask=is_extent, other=0)
    count = tl.load(row + 1, mask=is_extent, other=1).to(tl.int32)
    stripe = tl.load(row + 2, mask=is_extent, other=0).to(tl.pointer_type(tl.uint64))
    pair = tl.arange(0, 4)[None, :] * 2
    digests = scratch.to(tl.pointer_type(tl.uint64))
    sums = digests + num_extents * 2 + first[:, None] * 8 + pair
    even = tl.load(words + 48 + pair) + tl.zeros((EXTENTS, 4), tl.uint64)
    odd = tl.load(words + 49 + pair) + tl.zeros((EXTENTS, 4), tl.uint64)
    even_secret, odd_secret = tl.load(words + 16 + pair), tl.load(words + 17 + pair)
    # The loads of 16 blocks are under way at a time, as each block takes less time than a load.
    for block in tl.range(0, tl.max(count, 0) - 1, loop_unroll_factor=16):
        more = (block < count - 1)[:, None]
        next_even = even + tl.load(sums + block * 8, mask=more, other=0)
        next_odd = odd + tl.load(sums + block * 8 + 1, mask=more, other=0)
        even = tl.where(more, (next_even ^ (next_even >> 47) ^ even_secret) * 0x9E3779B1, even)
        odd = tl.where(more, (next_odd ^ (next_odd >> 47) ^ odd_secret) * 0x9E3779B1, odd)
    inside = is_extent[:, None]
    last = sums + (count - 1)[:, None] * 8
    even_data = tl.load(stripe[:, None] + pair, mask=inside, other=0)
    odd_data = tl.load(stripe[:, None] + pair + 1, mask=inside, other=0)
    even += tl.load(last, mask=inside, other=0) - _product(even_data ^ tl.load(words + 15 + pair))
    odd += tl.load(last + 1, mask=inside, other=0) - _product(odd_data ^ tl.load(words + 16 + pair))
    even += _product(even_data ^ tl.load(words + 24 + pair))
    odd += _product(odd_data ^ tl.load(words + 25 + pair))
    size = count.to(tl.uint64) * 1024
    low = _half_digest(even, odd, words + 32, size * 0x9E3779B185EBCA87)
    high = _half_digest(even, odd, words + 40, ~(size * 0xC2B2AE3D27D4EB4F))
    tl.store(digests + number * 2, high, mask=is_extent)
    tl.store(digests + number * 2 + 1, low, mask=is_extent)


def compile_for(capability: int):
    """Return both kernels as Triton compiles them for a compute capability (90 is 9.0); no device is needed."""
    target = GPUTarget("cuda", capability, 32)

    def compiled(kernel: Any, num_warps: int, **constants: int) -> Any:
        signature = {"table": "i64", "num_extents": "i32", "num_runs": "i32", "scratch": "i64"}
        places = {(len(signature) + place,): value for place, value in enumerate(constants.values())}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        return triton.compile(source, target=target, options={"num_warps": num_warps})

    return [
        compiled(sum_blocks, NUM_WARPS, RUNS=RUNS, BLOCKS=BLOCKS),
        compiled(digest_extents, 1, EXTENTS=EXTENTS),
    ]

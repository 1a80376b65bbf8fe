# pyright: basic, reportMissingImports=false
"""Measures loads that a blend moves to other positions: `python benchmarks/blend/blend_moves.py` in tox's `torch`.

The pages are laid out like vLLM's on CPUs without and with AMX, in bfloat16 and the shape of SmolLM2-135M: 30 layers,
three heads of 64 dims, blocks of 128 tokens. AMX's tiles are only moved here, never multiplied, so any CPU will do.
Each round retrieves a prompt from a depot as an exact hit does. Then torch and the compiled move each move it, in
place, or out of staging blocks to targets that are not aligned to blocks. Prints the time of a retrieve and a move as a
ratio to the retrieve alone in the same round.
"""

import argparse
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from kvdepot.backends import CacheGroup, KVCache, get_backend
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_cpu.kernels import native_move_tokens
from kvdepot_vllm.blend.layers import Layer, Rotation
from kvdepot_vllm.blend.moves import move

LAYERS, HEADS, DIM, BLOCK_TOKENS = 30, 3, 64, 128


class Attention:
    """Writes K with its tokens innermost and V with its dims innermost, head by head."""

    scale = 1.0

    def do_kv_cache_update(self, module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        """Write one block."""
        del module
        pages = cache.view(len(cache), HEADS, 2 * BLOCK_TOKENS, DIM)[int(slots[0]) // BLOCK_TOKENS]
        pages[:, :BLOCK_TOKENS] = k.permute(1, 2, 0).reshape(HEADS, BLOCK_TOKENS, DIM)
        pages[:, BLOCK_TOKENS:] = v.transpose(0, 1)


class TiledAttention(Attention):
    """Writes K and V in AMX's tiles: a tile of K has 16 tokens and pairs of dims, one of V 16 dims and pairs of
    tokens.
    """

    def do_kv_cache_update(self, module: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        """Write one block."""
        del module
        pages = cache.view(len(cache), HEADS, 2, BLOCK_TOKENS * DIM)[int(slots[0]) // BLOCK_TOKENS]
        pages[:, 0] = k.reshape(-1, 16, HEADS, DIM // 2, 2).permute(2, 0, 3, 1, 4).reshape(HEADS, -1)
        pages[:, 1] = v.reshape(-1, 2, HEADS, DIM // 16, 16).permute(2, 3, 0, 4, 1).reshape(HEADS, -1)


class Angles:
    """A rotary embedding."""

    is_neox_style = True

    def _compute_cos_sin_cache(self) -> Any:
        angles = torch.outer(torch.arange(8192.0), 1e4 ** -(torch.arange(DIM // 2) / (DIM // 2)))
        return torch.cat([angles.cos(), angles.sin()], -1)


def layers_of(attention: Attention, num_blocks: int) -> list[Layer]:
    """Return layers with pages of random values."""
    rotation, layers = Rotation.of(Angles(), "cpu"), list[Layer]()
    for _ in range(LAYERS):
        cache = torch.randn(num_blocks, HEADS, BLOCK_TOKENS, 2 * DIM).bfloat16()
        module = SimpleNamespace(
            impl=attention, kv_cache=cache, num_heads=HEADS, num_kv_heads=HEADS, head_size=DIM, head_size_v=DIM
        )
        layers.append(Layer(module, rotation, BLOCK_TOKENS, 0, layers[0] if layers else None))
    return layers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of a retrieve and of the compiled move")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, attention in (("without AMX", Attention()), ("with AMX", TiledAttention())):
        for what, each in measure(attention, arguments.blocks, arguments.rounds, arguments.threads).items():
            print(
                f"{name:12} {what:30} {statistics.median(each):5.2f}  ({min(each):.2f} to {max(each):.2f})", flush=True
            )
    return 0


def measure(attention: Attention, num_blocks: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Return the ratios of all rounds by target ("in place" or "from staging blocks") and implementation."""
    num_tokens = num_blocks * BLOCK_TOKENS
    layers = layers_of(attention, 2 * num_blocks + 2)
    old = torch.arange(num_tokens)
    places = {"in place": old, "from staging blocks": old + num_tokens + 37}
    ways = {"torch": None, "compiled": native_move_tokens(threads)}
    ratios: dict[str, list[float]] = {}
    with DepotProcess(pool_size="512MiB") as depot:
        group = CacheGroup([layer.module.kv_cache for layer in layers], BLOCK_TOKENS)
        context = get_backend("cpu").create_context(
            KVCache([group], "bench", "bfloat16", chunk_tokens=BLOCK_TOKENS),
            url=depot.url,
            copy_threads=threads,
        )
        context.wait_until_connected(10)
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes)
        key, blocks = hash_prefix(Namespace("bench"), BLOCK_TOKENS, old.tolist()), [list(range(num_blocks))]
        assert context.submit_store("r", key, blocks).result()
        for turn in range(rounds + 1):
            for place, target in places.items():
                for way, compiled in ways.items():
                    began = time.perf_counter()
                    assert context.submit_retrieve("r", key, blocks).result()
                    retrieved = time.perf_counter()
                    move(layers, old, target, old, old + 1000, compiled)
                    ended = time.perf_counter()
                    if turn:  # the first round warms up
                        ratios.setdefault(f"{place}, {way}", []).append((ended - began) / (retrieved - began))
        context.close()
    return ratios


if __name__ == "__main__":
    sys.exit(main())

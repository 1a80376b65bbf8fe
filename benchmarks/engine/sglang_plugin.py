# pyright: basic, reportMissingImports=false
"""A plugin of SGLang for the benchmark of decoders beside loads.

- Copies out of the depot take as long as over a link of 5 GB/s.
- `torch_native` computes the attention of the new tokens alone. SGLang's computes that of the whole prompt, which takes
  seconds for 10,000 tokens on a CPU, and the decoders wait for it.
- The time of each decoding step is appended to the file that `KVDEPOT_STEPS` names, as a line of seconds and requests.
"""

import importlib
import os
import time
from typing import Any, Final

import numpy as np

from kvdepot.backends import Copier, CopyBatch
from kvdepot.copying.runs import EXTENT_DTYPE
from kvdepot_cpu.context import PageCopier

BYTES_PER_SECOND: Final = 5e9
_ATTENTION: Final = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
_RESULTS: Final = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"


def slowly(copy: Any) -> Any:
    """Return `PageCopier.retrieve` at the speed of the link."""

    def retrieve(copier: Copier, batch: CopyBatch) -> None:
        began = time.perf_counter()
        copy(copier, batch)
        num_bytes = int(np.frombuffer(batch.extents, EXTENT_DTYPE)["num_bytes"].sum())
        time.sleep(max(0.0, num_bytes / BYTES_PER_SECOND - (time.perf_counter() - began)))

    return retrieve


def around_attention(
    original: Any, backend: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, req_to_token: Any, *args: Any,
    **options: Any,
) -> Any:  # fmt: skip
    import torch

    rows, seq_lens, _, new_lens = args[:4]
    start = 0
    for row, length, new in zip(rows.tolist(), seq_lens.tolist(), new_lens.tolist(), strict=True):
        slots = req_to_token[row, :length]
        keys, values = (cache[slots].movedim(0, 1).unsqueeze(0) for cache in (k_cache, v_cache))
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        found = torch.nn.functional.scaled_dot_product_attention(
            query[start : start + new].movedim(0, 1).unsqueeze(0), keys, values, attn_mask=mask, enable_gqa=True
        )
        output[start : start + new] = found.squeeze(0).movedim(1, 0)
        start += new
    return output


def around_results(original: Any, scheduler: Any, batch: Any, result: Any) -> None:
    original(scheduler, batch, result)
    if batch.forward_mode.is_decode():
        with open(os.environ["KVDEPOT_STEPS"], "a") as file:
            file.write(f"{time.perf_counter()} {batch.batch_size()}\n")


def register() -> None:
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for method, hook in ((_ATTENTION, around_attention), (_RESULTS, around_results)):
        hooks.HookRegistry.register(method, hook, hooks.HookType.AROUND)
    PageCopier.retrieve = slowly(PageCopier.retrieve)

# pyright: basic, reportMissingImports=false
"""A plugin of SGLang for tests: a copy out of the depot ends only after the engine has decoded twenty more steps.

If decoding requests waited for the copy, it would fail after half a minute.
"""

import importlib
import threading
from typing import Any, Final

from kvdepot.backends import Copier, CopyBatch
from kvdepot_cpu.context import PageCopier

_RESULTS: Final = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
_STEPS: Final = 20
_SECONDS: Final = 30.0

_decoded = threading.Semaphore(0)  # released by each step


def around_results(original: Any, scheduler: Any, batch: Any, result: Any) -> None:
    original(scheduler, batch, result)
    if batch.forward_mode.is_decode():
        _decoded.release()


def register() -> None:
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_RESULTS, around_results, hooks.HookType.AROUND)
    copier_class: Any = PageCopier
    copy = copier_class.retrieve

    def retrieve(copier: Copier, batch: CopyBatch) -> None:
        while _decoded.acquire(blocking=False):
            pass  # steps before
        for _ in range(_STEPS):
            if not _decoded.acquire(timeout=_SECONDS):
                raise TimeoutError("the engine decodes nothing")
        copy(copier, batch)

    copier_class.retrieve = retrieve

# pyright: basic
"""A stand-in for SGLang: the base class of linkers, its wrapper and pools, with arrays instead of tensors.

The wrapper calls a linker as SGLang's wrapper does. The tree is a list of pages for each prompt.
"""

import abc
import contextlib
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvdepot_sglang import around_match, around_offload_nodes, around_update

PAGE = 16
HEADS, DIM, LAYERS, PAGES = 2, 4, 2, 64


class Buffer(np.ndarray):
    """An array with the attributes of a tensor that the linker uses."""

    def view(self, *shape: Any) -> Any:
        return self.reshape(shape) if all(isinstance(each, int) for each in shape) else super().view(*shape)

    def is_contiguous(self) -> bool:
        return bool(self.flags.c_contiguous)


def buffer(num_slots: int = PAGES * PAGE) -> Any:
    return np.zeros((num_slots, HEADS, DIM), np.float32).view(Buffer)


class LayerWiseLoadCounter:
    def __init__(self, num_layers: int) -> None:
        self.num_layers, self.index = num_layers, -1
        self.done: dict[int, set[int]] = {}

    def update_producer(self) -> int:
        self.index += 1
        self.done[self.index] = set()
        return self.index

    def complete(self, index: int, layer: int) -> None:
        self.done[index].add(layer)

    def finish(self, index: int) -> bool:
        return index == -1 or len(self.done.pop(index)) == self.num_layers

    def reset(self) -> None:
        self.done.clear()


class UnifiedCacheLinker(abc.ABC):
    def record_offload_ready(self) -> list[Any]:
        return []

    @abc.abstractmethod
    def lookup(self, rid: str, transfers: Any) -> Any: ...

    @abc.abstractmethod
    def load(self, rid: str, transfers: Any) -> Any: ...

    @abc.abstractmethod
    def start_layer_wise_loading(self) -> Any: ...

    @abc.abstractmethod
    def finish_layer_wise_loading(self, counter_index: int) -> Any: ...

    @abc.abstractmethod
    def cancel_queued_load(self, rid: str) -> Any: ...

    @abc.abstractmethod
    def offload(self, transfers: Any, session_id: Any = None) -> Any: ...

    @abc.abstractmethod
    def num_completed_offloads(self) -> Any: ...

    @abc.abstractmethod
    def pop_completed_offload(self) -> Any: ...

    @abc.abstractmethod
    def reset(self) -> Any: ...

    @abc.abstractmethod
    def close(self) -> Any: ...


class UnifiedCacheLinkerWrapper:
    def match(self, key: Any, req: Any, result: Any) -> Any: ...

    def offload_nodes(self, node_ids: Any) -> None: ...


class Component(Enum):
    FULL = 0
    SWA = 1
    MAMBA = 2


class MHATokenToKVPool:
    kv_cache_layout = "nhd"
    layer_num, head_num = LAYERS, HEADS
    k_scale_buffer = None
    device = "cpu"

    def __init__(self) -> None:
        self.k_buffer = [buffer() for _ in range(LAYERS)]
        self.v_buffer = [buffer() for _ in range(LAYERS)]


class Model:
    """A model with one tensor. Only its name for the content is digested."""

    def __init__(self, content: str) -> None:
        self._content = content

    def state_dict(self) -> dict[str, Any]:
        return {"weight": SimpleNamespace(numel=lambda: 0, dtype=self._content, shape=(0,))}


class SWAKVPool:
    layer_num = 2 * LAYERS
    device = "cpu"

    def __init__(self) -> None:
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(), MHATokenToKVPool()


class _ModelConfig:
    hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})

    @classmethod
    def from_server_args(cls, server_args: Any) -> "_ModelConfig":
        return cls()

    def get_total_num_kv_heads(self) -> int:
        return HEADS


@contextlib.contextmanager
def installed(*, is_hooked: bool = True) -> Iterator[types.ModuleType]:
    """Import `kvdepot_sglang.linker` with the stand-in in SGLang's place. Yield the module."""
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang" or name == "kvdepot_sglang.linker"]:
        del sys.modules[name]
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.unified_cache",
                 "sglang.srt.configs", "sglang.srt.runtime_context"):  # fmt: skip
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules["sglang"].__dict__["__version__"] = "0.5.23"
    serving = SimpleNamespace(weight_version="default")
    sys.modules["sglang.srt.runtime_context"].__dict__["get_serving"] = lambda: serving
    linkers = types.ModuleType("sglang.srt.mem_cache.unified_cache.unified_cache_linker")
    wrapper = type("UnifiedCacheLinkerWrapper", (UnifiedCacheLinkerWrapper,), {})
    if is_hooked:
        for name in ("match", "offload_nodes"):
            original = getattr(UnifiedCacheLinkerWrapper, name)
            setattr(wrapper, name, functools.wraps(original)(lambda *_: None))
    linkers.__dict__.update(
        LayerWiseLoadCounter=LayerWiseLoadCounter,
        UnifiedCacheLinker=UnifiedCacheLinker,
        UnifiedCacheLinkerWrapper=wrapper,
    )
    sys.modules[linkers.__name__] = linkers
    configs = types.ModuleType("sglang.srt.configs.model_config")
    configs.__dict__["ModelConfig"] = _ModelConfig
    sys.modules[configs.__name__] = configs
    try:
        import kvdepot_sglang.linker

        yield sys.modules[kvdepot_sglang.linker.__name__]
    finally:
        sys.modules.clear()
        sys.modules.update(before)


def names_of(prompt: int, num_pages: int, shared: int = 0) -> list[str]:
    """Return the names of a prompt's pages. The first `shared` names are those of prompt 0."""
    name, found = b"", list[str]()
    for page in range(num_pages):
        name = hashlib.sha256(name + b"%d %d" % (0 if page < shared else prompt, page)).digest()
        found.append(name.hex())
    return found


class Scheduler:
    """Calls a linker as SGLang's wrapper does. It names and places the pages of its prompts itself."""

    def __init__(self, linker: Any, pool: Any) -> None:
        self.linker, self.pool = linker, pool
        self.cache_linker = linker  # for the hooks
        self.cache = self
        self.tree_core = self
        self.page_size = PAGE
        self._nodes: dict[int, tuple[list[str], int, Any]] = {}
        self._model = Model("of the files")

    def slots(self, first_page: int, num_pages: int) -> Any:
        return np.arange(first_page * PAGE, (first_page + num_pages) * PAGE)

    def transfers(self, names: Sequence[str], slots: Any, window_pages: int = 0) -> list[Any]:
        """Return SGLang's transfers of pages. With windows, the last pages have the same slots in the other pool."""
        found = [SimpleNamespace(name="kv", keys=list(names), device_indices=slots)]
        if window_pages:
            last = None if slots is None else slots[-window_pages * PAGE :]
            found.append(SimpleNamespace(name="swa", keys=names[-window_pages:], device_indices=last))
        return found

    # --- the hooks' view of SGLang

    def get_prefix_hash_values(self, node: int) -> list[str]:
        names, first, _ = self._nodes[node]
        return names[:first]

    def get_hash_values(self, node: int) -> list[str]:
        names, first, _ = self._nodes[node]
        return names[first:]

    def path_device_indices(self, node: int) -> Any:
        return self._nodes[node][2]

    # --- a scheduler's actions

    def store(
        self, names: list[str], slots: Any, first: int = 0, window_pages: int = 0, session: str | None = None
    ) -> bool:
        """Store a prompt's pages from `first` on; `slots` are the whole prompt's. Return whether all were stored."""
        node = len(self._nodes)
        self._nodes[node] = names, first, slots
        queued: list[bool] = []

        def original(_: Any, node_ids: Any) -> None:
            assert list(node_ids) == [node]
            given = self.transfers(names[first:], slots[first * PAGE :], window_pages)
            queued.append(self.linker.offload(given, session_id=session))

        around_offload_nodes(original, self, [node])
        assert queued == [True]
        _wait(lambda: self.linker.num_completed_offloads() == 1)
        return self.linker.pop_completed_offload()

    def look_up(self, rid: str, names: list[str], on_device: int = 0, window_pages: int = 0) -> int:
        """Return how many pages after those on the device can be loaded. SGLang asks for whole pages only."""
        node = len(self._nodes)
        self._nodes[node] = names[:on_device], 0, None
        found: list[list[int]] = []

        def original(*_: Any) -> None:
            if names[on_device:]:
                found.append(self.linker.lookup(rid, self.transfers(names[on_device:], None, window_pages)))

        result = SimpleNamespace(device_prefix_len=on_device * PAGE, last_device_node=node)
        key = range(len(names) * PAGE + 1)  # the token after them is always computed
        around_match(original, self, key, SimpleNamespace(rid=rid), result)
        return max(found[0], default=0) if found else 0

    def update(self, weights: str, *, flush: bool = True) -> None:
        """Give the engine other weights. The same call flushes the cache, as SGLang does by default."""
        manager = SimpleNamespace(
            scheduler=SimpleNamespace(tree_cache=SimpleNamespace(linker=self)),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self._model)),
        )

        def original(given: Any) -> None:
            assert given is manager
            self._model.__init__(weights)
            if flush:
                self.linker.reset()

        around_update(original, manager)

    def load(self, rid: str, names: list[str], slots: Any, window_pages: int = 0) -> bool:
        """Load pages and return whether they came. Check that a refused load queues nothing."""
        if not self.linker.load(rid, self.transfers(names, slots, window_pages)):
            assert self.linker.start_layer_wise_loading() == -1
            return False
        index = self.linker.start_layer_wise_loading()
        assert index >= 0
        return self.linker.finish_layer_wise_loading(index)


def _wait(condition: Callable[[], bool]) -> None:
    from kvdepot.lab.processes import wait_until

    wait_until(condition)

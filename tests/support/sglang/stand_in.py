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
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvdepot_sglang import around_insert, around_load_back, around_match, around_offload_nodes, around_update

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
        self.num_layers = num_layers

    def reset(self) -> None: ...


class Verdict(Enum):
    """SGLang's `AddReqResult`."""

    CONTINUE = 0
    NO_TOKEN = 1
    OTHER = 2


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


def _hooked(name: str, methods: Sequence[str], *, is_hooked: bool) -> type:
    """Return a class of SGLang with methods that a plugin has wrapped, or has not."""

    def method(*_: Any) -> None: ...

    return type(name, (), {each: functools.wraps(method)(lambda *_: None) if is_hooked else method for each in methods})


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

    def replaced() -> dict[str, Any]:
        linker = "kvdepot_sglang.linker"
        return {
            name: each for name, each in sys.modules.items() if name.partition(".")[0] == "sglang" or name == linker
        }

    before = replaced()
    for name in before:
        del sys.modules[name]
    cache = "sglang.srt.mem_cache"
    for name in ("sglang", "sglang.srt", "sglang.srt.configs", "sglang.srt.managers", cache, f"{cache}.unified_cache"):
        _install(name, __path__=[])
    _install("sglang", __path__=[], __version__="0.5.23")
    serving = SimpleNamespace(weight_version="default")
    _install("sglang.srt.runtime_context", get_serving=lambda: serving)
    _install("sglang.srt.configs.model_config", ModelConfig=_ModelConfig)
    _install(
        f"{cache}.unified_cache.unified_cache_linker",
        LayerWiseLoadCounter=LayerWiseLoadCounter,
        UnifiedCacheLinker=UnifiedCacheLinker,
        UnifiedCacheLinkerWrapper=_hooked(
            "UnifiedCacheLinkerWrapper", ("match", "offload_nodes", "load_back"), is_hooked=is_hooked
        ),
    )
    _install(f"{cache}.base_prefix_cache", InsertParams=SimpleNamespace)
    _install(f"{cache}.radix_cache", RadixKey=lambda *parts, **named: (*parts, named))
    _install(
        f"{cache}.unified_radix_cache",
        UnifiedRadixCache=_hooked("UnifiedRadixCache", ("insert",), is_hooked=is_hooked),
    )
    _install(
        "sglang.srt.managers.schedule_policy",
        AddReqResult=Verdict,
        PrefillAdder=_hooked("PrefillAdder", ("add_one_req",), is_hooked=is_hooked),
    )
    _install("sglang.srt.managers.scheduler", Scheduler=_hooked("Scheduler", ("on_idle",), is_hooked=True))
    try:
        import kvdepot_sglang.linker

        yield sys.modules[kvdepot_sglang.linker.__name__]
    finally:
        for name in replaced():
            del sys.modules[name]
        sys.modules.update(before)


def _install(name: str, **content: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(content)


def names_of(prompt: int, num_pages: int, shared: int = 0) -> list[str]:
    """Return the names of a prompt's pages. The first `shared` names are those of prompt 0."""
    name, found = b"", list[str]()
    for page in range(num_pages):
        name = hashlib.sha256(name + b"%d %d" % (0 if page < shared else prompt, page)).digest()
        found.append(name.hex())
    return found


class Key:
    """SGLang's `RadixKey` of a prompt: its tokens are derived from the names of its pages."""

    def __init__(self, names: Sequence[str], extra_key: str | None = None, cache_salt: str | None = None) -> None:
        self.token_ids = array("q", [token for name in names for token in tokens_of(name)])
        self.token_ids.append(1)  # the token after the last page is always computed
        self.extra_key, self.cache_salt = extra_key, cache_salt

    def __len__(self) -> int:
        return len(self.token_ids)


def tokens_of(name: str) -> list[int]:
    """Return the tokens of a page."""
    return list(bytes.fromhex(name)[:PAGE])


class Scheduler:
    """Calls a linker as SGLang's wrapper does. It names and places the pages of its prompts itself."""

    def __init__(self, linker: Any, pool: Any) -> None:
        self.linker, self.pool = linker, pool
        self.cache_linker = linker  # for the hooks
        self.cache = self
        self.tree_core = self
        self.page_size = PAGE
        self._nodes: dict[int, tuple[list[str], int, Any]] = {}
        self.hit_markers: dict[str, Any] = {}
        self.inflight_load_rids: list[str] = []
        self.private_load_indices: dict[str, Any] = {}
        self.locked: list[int] = []  # nodes
        self.inserted: list[Any] = []  # `InsertParams`
        self.freed: list[Any] = []  # slots
        self.token_to_kv_pool_allocator = SimpleNamespace(free=self.freed.append)
        self._model = Model("of the files")

    def slots(self, first_page: int, num_pages: int) -> Any:
        import torch  # pyright: ignore[reportMissingImports]

        return torch.arange(first_page * PAGE, (first_page + num_pages) * PAGE)

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

    def lock(self, node: int) -> Any:
        self.locked.append(node)
        return SimpleNamespace(node=node)

    def unlock(self, lock: Any) -> None:
        self.locked.remove(lock.node)

    def insert(self, params: Any) -> None:
        self.inserted.append(params)

    # --- a scheduler's actions

    def store(
        self,
        names: list[str],
        slots: Any,
        first: int = 0,
        window_pages: int = 0,
        session: str | None = None,
        **prompt: Any,
    ) -> bool:
        """Store a prompt's pages from `first` on; `slots` are the whole prompt's. Return whether all were stored."""
        node = len(self._nodes)
        self._nodes[node] = names, first, slots
        queued: list[bool] = []

        def original(_: Any, node_ids: Any) -> None:
            assert list(node_ids) == [node]
            given = self.transfers(names[first:], slots[first * PAGE :], window_pages)
            queued.append(self.linker.offload(given, session_id=session))

        def insert(cache: Any, params: Any) -> None:
            around_offload_nodes(original, self, [node])

        around_insert(insert, SimpleNamespace(linker=self), SimpleNamespace(key=Key(names, **prompt)))
        assert queued == [True]
        _wait(lambda: self.linker.num_completed_offloads() == 1)
        return self.linker.pop_completed_offload()

    def look_up(self, rid: str, names: list[str], on_device: int = 0, window_pages: int = 0, **prompt: Any) -> int:
        """Return how many pages after those on the device can be loaded. SGLang asks for whole pages only."""
        node = len(self._nodes)
        self._nodes[node] = names[:on_device], 0, None
        found: list[list[int]] = []

        def original(*_: Any) -> None:
            if names[on_device:]:
                found.append(self.linker.lookup(rid, self.transfers(names[on_device:], None, window_pages)))

        result = SimpleNamespace(device_prefix_len=on_device * PAGE, last_device_node=node)
        key = Key(names, **prompt)
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

    def begin_load(
        self, rid: str, names: list[str], slots: Any, window_pages: int = 0, before: Any = (), **facts: Any
    ) -> Any:
        """Ask for a load where SGLang would admit a request. Return the answer: None if the request has to wait.

        Args:
            rid: the request.
            names: names of the pages to load.
            slots: their slots.
            window_pages: the number of pages in the window.
            before: the slots of the prompt's pages on the device.
            facts: more attributes of the request.
        """
        node = len(self._nodes)
        self._nodes[node] = [], 0, before
        first = len(before)
        defaults = {"extra_key": None, "cache_salt": None, "priority": None, "session_id": None}
        tokens = list(range(first + len(slots) + 1))
        request = SimpleNamespace(rid=rid, last_node=node, full_untruncated_fill_ids=tokens, **{**defaults, **facts})
        self.hit_markers[rid] = SimpleNamespace(tail_hashes=names, device_hit_len=first)

        def original(_: Any, holder: Any) -> Any:
            del self.hit_markers[holder.rid]
            if not self.linker.load(holder.rid, self.transfers(names, slots, window_pages)):
                return 0, holder.last_node
            self.private_load_indices[holder.rid] = slots
            self.inflight_load_rids.append(holder.rid)
            if window_pages:
                holder.kv = SimpleNamespace(
                    component_evicted_seqlens={Component.SWA: first + len(slots) - window_pages}
                )
            return len(slots), holder.last_node

        answer = around_load_back(original, self, request)
        assert not self.inflight_load_rids, "SGLang would wait for these in the batch, and abort them on a failure"
        assert not self.private_load_indices
        self.request = request
        return answer

    def load(self, rid: str, names: list[str], slots: Any, window_pages: int = 0, before: Any = ()) -> bool:
        """Load pages, and return whether they came to SGLang's tree. If not, their slots must have been freed."""
        num_inserted, num_freed = len(self.inserted), len(self.freed)
        assert self.begin_load(rid, names, slots, window_pages, before) is None
        assert self.locked, "SGLang could evict the pages before the load"
        self.end_loads()
        assert self.linker.start_layer_wise_loading() == -1
        if len(self.inserted) == num_inserted:
            assert [each.tolist() for each in self.freed[num_freed:]] == [slots.tolist()]
            return False
        assert len(self.freed) == num_freed
        assert self.inserted[-1].value.tolist() == [*before, *slots.tolist()]
        assert self.inserted[-1].prev_prefix_len == len(before)
        return True

    def end_loads(self) -> None:
        """Begin steps until all loads have ended."""
        _wait(lambda: (self.linker.num_completed_offloads(), not self.linker.is_loading())[1])
        assert not self.locked


MakeEngine = Callable[..., Scheduler]


def server_args(**changes: Any) -> Any:
    facts = {
        "model_path": "a/model", "served_model_name": "model", "port": 30000, "dtype": "float32", "load_format": "auto",
        "kv_cache_dtype": "auto", "pp_size": 1, "attention_backend": "torch_native",
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


@contextlib.contextmanager
def engines(url: str, page_size: int = PAGE) -> Iterator[MakeEngine]:
    """Yield a function that makes engines, which differ in the given options, on a depot."""
    made: list[Any] = []
    with installed() as module:

        def make(pool: Any = None, arguments: Any = None, components: Any = None, **settings: Any) -> Scheduler:
            pool = pool or MHATokenToKVPool()
            windows = {Component.SWA} if isinstance(pool, SWAKVPool) else set()
            components = components or {Component.FULL, *windows}
            params = SimpleNamespace(
                page_size=page_size,
                token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
                tp_cache_group=None,
                swa_retain_window=2 * PAGE,
            )
            settings = {"url": url, "weights": "w", "lookup_seconds": 20.0, "deadline_seconds": 20.0, **settings}
            linker = module.KVDepotLinker(
                arguments or server_args(), params, components=components, extra_config=settings
            )
            made.append(linker)
            return Scheduler(linker, pool)

        yield make
        for linker in made:
            linker.close()


def _wait(condition: Callable[[], bool]) -> None:
    from kvdepot.lab.processes import wait_until

    wait_until(condition)

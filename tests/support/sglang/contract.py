# pyright: basic
"""Checks with `ast` that SGLang's source has everything that the linker uses.

Run: python -m support.sglang.contract TREE_OR_WHEEL

Nothing is imported, so SGLang need not be installed. Each problem is a sentence.
"""

import ast
import functools
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvdepot_sglang import UPDATING_METHODS

Read = Callable[[str], str]

_parse: Final = functools.cache(ast.parse)
_unparse: Final = functools.cache(ast.unparse)

UPDATER: Final = "managers/scheduler_components/weight_updater.py"
POLICY: Final = "managers/schedule_policy.py"
LINKER: Final = "mem_cache/unified_cache/unified_cache_linker.py"
ABSTRACT: Final = {
    "lookup": ["self", "rid", "transfers"],
    "load": ["self", "rid", "transfers"],
    "start_layer_wise_loading": ["self"],
    "finish_layer_wise_loading": ["self", "counter_index"],
    "cancel_queued_load": ["self", "rid"],
    "offload": ["self", "transfers", "session_id"],
    "num_completed_offloads": ["self"],
    "pop_completed_offload": ["self"],
    "reset": ["self"],
    "close": ["self"],
}
CALLED: Final = (  # of SGLang's objects: file, class, method, parameters
    (LINKER, "UnifiedCacheLinkerWrapper", "match", ["self", "key", "req", "result"]),
    (LINKER, "UnifiedCacheLinkerWrapper", "offload_nodes", ["self", "node_ids"]),
    (LINKER, "UnifiedCacheLinker", "record_offload_ready", ["self"]),
    (LINKER, "UnifiedCacheLinkerWrapper", "load_back", ["self", "req"]),
    (LINKER, "LayerWiseLoadCounter", "reset", ["self"]),
    (POLICY, "PrefillAdder", "add_one_req", ["self", "req", "has_chunked_req", "truncation_align_size"]),
    ("managers/scheduler.py", "Scheduler", "on_idle", ["self"]),
    ("mem_cache/unified_radix_cache.py", "UnifiedRadixCache", "insert", ["self", "params"]),
    ("mem_cache/unified_radix_cache.py", "UnifiedRadixCache", "lock", ["self", "node_id", "skip_lock_components"]),
    ("mem_cache/unified_radix_cache.py", "UnifiedRadixCache", "unlock", ["self", "lock"]),
    ("mem_cache/unified_radix_cache.py", "UnifiedRadixCache", "get_prefix_hash_values", ["self", "node_id"]),
    ("mem_cache/unified_radix_cache.py", "UnifiedRadixCache", "path_device_indices", ["self", "node"]),
    (
        "mem_cache/unified_cache/unified_tree_core_interface.py",
        "UnifiedTreeCoreInterface",
        "get_hash_values",
        ["self", "node_id"],
    ),
    *((UPDATER, "SchedulerWeightUpdaterManager", name, ["self", "recv_req"]) for name in UPDATING_METHODS),
    ("plugins/hook_registry.py", "HookRegistry", "register", ["cls", "target", "hook", "hook_type", "source"]),
)
ATTRIBUTES: Final = (  # file, class, attributes
    ("mem_cache/hicache_storage.py", "PoolTransfer", {"name", "device_indices", "keys"}),
    ("mem_cache/hicache_storage.py", "PoolName", {"KV", "SWA"}),
    (
        "mem_cache/cache_init_params.py",
        "CacheInitParams",
        {"page_size", "token_to_kv_pool_allocator", "tp_cache_group", "attn_tp_cache_group", "is_eagle"},
    ),
    ("mem_cache/memory_pool.py", "MHATokenToKVPool", {"k_buffer", "v_buffer", "head_num", "kv_cache_layout"}),
    ("mem_cache/memory_pool.py", "MLATokenToKVPool", {"kv_buffer"}),
    ("mem_cache/swa_memory_pool.py", "SWAKVPool", {"full_kv_pool", "swa_kv_pool"}),
    (
        LINKER,
        "UnifiedCacheLinkerWrapper",
        {"cache", "cache_linker", "hit_markers", "inflight_load_rids", "private_load_indices"},
    ),
    (LINKER, "ExternalCacheHitMarker", {"tail_hashes", "device_hit_len"}),
    ("mem_cache/radix_cache.py", "RadixKey", {"token_ids", "extra_key", "cache_salt"}),
    (POLICY, "PrefillAdder", {"tree_cache"}),
    (POLICY, "AddReqResult", {"CONTINUE", "NO_TOKEN", "OTHER"}),
    ("managers/schedule_batch.py", "ReqKvInfo", {"component_evicted_seqlens"}),
    (
        "managers/schedule_batch.py",
        "Req",
        {"full_untruncated_fill_ids", "extra_key", "cache_salt", "priority", "session_id", "last_node"}
        | {"storage_hit_start", "storage_hit_length"},
    ),
    (
        "mem_cache/base_prefix_cache.py",
        "InsertParams",
        {"key", "value", "prev_prefix_len", "component_evicted_seqlens", "priority", "session_id"},
    ),
    ("mem_cache/base_prefix_cache.py", "TreeLock", {"node"}),
    (UPDATER, "SchedulerWeightUpdaterManager", {"scheduler", "tp_worker"}),
    ("mem_cache/unified_radix_cache.py", "UnifiedRadixCache", {"linker"}),
    ("mem_cache/base_prefix_cache.py", "MatchResult", {"device_prefix_len", "last_device_node"}),
    ("plugins/hook_registry.py", "HookType", {"AROUND"}),
)
SENTENCES: Final = (  # file, class or "", method or "", source text that must be there, why
    (
        LINKER,
        "UnifiedCacheLinkerWrapper",
        "load_back",
        "self.inflight_load_rids.append(req.rid)",
        "the request owns the slots of a load",
    ),
    (POLICY, "", "", "if loaded is None:\n                    return AddReqResult.OTHER", "a load is tried again"),
    (
        "mem_cache/unified_radix_cache.py",
        "UnifiedRadixCache",
        "init_load_back",
        "if self.linker is not None and self.linker.has_hit(req.rid):\n        return self.linker.load_back(req)",
        "None passes through",
    ),
    (
        "mem_cache/unified_radix_cache.py",
        "UnifiedRadixCache",
        "insert",
        "self._apply_cache_actions(step.actions)",
        "pages are offered during an insert, whose key has their tokens",
    ),
    (
        "managers/scheduler.py",
        "Scheduler",
        "get_next_batch_to_run",
        "self.process_pending_chunked_abort()\n    self._process_hicache_events()",
        "loads end before a batch is built",
    ),
    ("mem_cache/radix_cache.py", "RadixKey", "__init__", "self.cache_salt = cache_salt or None", "keys have salts"),
    (LINKER, "UnifiedCacheLinkerWrapper", "_offload_node", "cache.inc_lock_ref(node_id)", "stores lock their pages"),
    (
        "mem_cache/unified_cache/linker_factory.py",
        "",
        "",
        "extra_config=deepcopy(config.linker_extra_config), forward_stream=forward_stream)",
        "linkers are constructed so",
    ),
    ("plugins/__init__.py", "", "", "GENERAL_PLUGINS_GROUP = 'sglang.srt.plugins'", "plugins are found so"),
    # The tests' workers are forks, and inherit what is loaded.
    ("managers/scheduler.py", "", "run_scheduler_process", "load_plugins()", "a worker that is spawned loads plugins"),
    (UPDATER, "", "", "self.tp_worker.model_runner.model", "the model that gets other weights"),
    ("runtime_context.py", "", "", "def get_serving()", "weights have a version"),
    (
        "managers/scheduler.py",
        "Scheduler",
        "record_weight_version_change",
        "get_serving().weight_version",
        "it is that of the serving context",
    ),
    ("mem_cache/utils.py", "", "", "def get_storage_hash_str(", "pages have names"),
    ("configs/model_config.py", "ModelConfig", "", "def get_total_num_kv_heads(self)", "the heads of a model are told"),
)


def reader(path: Path) -> Read:
    """Return a function that reads a file below `srt` in SGLang's tree or wheel. A missing file reads as ""."""
    if path.suffix == ".whl":
        wheel = zipfile.ZipFile(path)
        names = set(wheel.namelist())
        return lambda name: wheel.read(f"sglang/srt/{name}").decode() if f"sglang/srt/{name}" in names else ""
    root = path / "sglang" / "srt"
    return lambda name: (root / name).read_text() if (root / name).exists() else ""


def problems(read: Read) -> list[str]:
    """Return everything that the linker needs and this SGLang lacks."""
    found: list[str] = []
    abstract = {
        name: parameters(each)
        for name, each in methods(_class(read, LINKER, "UnifiedCacheLinker")).items()
        if any(getattr(decorator, "id", "") == "abstractmethod" for decorator in each.decorator_list)
    }
    for name in sorted({*abstract, *ABSTRACT}):
        if abstract.get(name) != ABSTRACT.get(name):
            found.append(f"UnifiedCacheLinker.{name} has {abstract.get(name)}, expected {ABSTRACT.get(name)}")
    for path, owner, name, expected in CALLED:
        method = methods(_class(read, path, owner)).get(name)
        if method is None or parameters(method) != expected:
            found.append(f"{owner}.{name} has {method and parameters(method)}, expected {expected}")
    for name in methods(_class(read, UPDATER, "SchedulerWeightUpdaterManager")):
        if name.startswith("update_weights") and name not in UPDATING_METHODS:
            found.append(f"SchedulerWeightUpdaterManager.{name} writes weights, and no hook is around it")
    for path, owner, expected in ATTRIBUTES:
        missing = expected - _attributes(_class(read, path, owner))
        if missing:
            found.append(f"{owner} lacks {', '.join(sorted(missing))}")
    for path, owner, name, text, why in SENTENCES:
        node: Any = _class(read, path, owner) if owner else _parse(read(path))
        node = methods(node).get(name) if name else node
        if node is None or text not in _unparse(node):
            found.append(f"{path} does not say {text!r}: {why}")
    return found


def methods(node: ast.ClassDef | None) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class."""
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)} if node else {}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    return [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]


def _class(read: Read, path: str, name: str) -> ast.ClassDef | None:
    found = (each for each in _parse(read(path)).body if isinstance(each, ast.ClassDef) and each.name == name)
    return next(found, None)


def _attributes(node: ast.ClassDef | None) -> set[str]:
    """Return the fields, properties and attributes that a class mentions."""
    if node is None:
        return set()
    names = set(methods(node))
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            names.add(each.attr)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
    return names


if __name__ == "__main__":
    sentences = problems(reader(Path(sys.argv[1])))
    print("\n".join(sentences) or "all that the linker needs is there")
    sys.exit(bool(sentences))

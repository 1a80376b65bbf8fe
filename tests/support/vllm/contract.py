# pyright: basic
"""Prints the part of vLLM that the connector uses as JSON: `python -m support.vllm.contract TREE_OR_WHEEL >FILE`.

Nothing is imported: names and signatures are read from source, so vLLM need not be installed. The connector's own
source defines that part: the names that it imports, the methods of vLLM's base classes that it overrides, and the
attributes of vLLM's objects that `kvdepot_vllm.engine` lists.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[3] / "packages/vllm_connector/src/kvdepot_vllm"
OBJECTS = {  # protocols of kvdepot_vllm.engine
    "EngineRequest": ("vllm.v1.request", "Request"),
    "Block": ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"),
    "BlockPool": ("vllm.v1.core.block_pool", "BlockPool"),
    "Step": ("vllm.v1.core.sched.output", "SchedulerOutput"),
}
SLEEP = {  # methods that put an engine to sleep and wake it, and the calls in them whose order matters
    "vllm.v1.engine.core.EngineCore": ("sleep", "wake_up", "release_kv_cache_memory", "_reset_caches"),
    "vllm.v1.worker.gpu_worker.Worker": ("sleep", "wake_up", "discard"),
}
STEPS = {
    "pause_scheduler", "reset_prefix_cache", "_reset_caches", "sleep", "unregister_kv_caches", "suspend", "discard",
    "wake_up", "resume", "restore_kv_caches", "_set_kv_connector_handshake_metadata", "resume_scheduler",
}  # fmt: skip
KERNELS = {  # find the slot of each token. `support.vllm.slots` interprets them
    "v1": ("vllm.v1.worker.block_table", "kernel"),
    "v2": ("vllm.v1.worker.gpu.block_table", "_compute_slot_mappings_kernel"),
}
SPAN = ("vllm.v1.core.kv_cache_utils", "resolve_dcp_kv_block_size")
Read = Callable[[str], str | None]


def reader(path: Path) -> Read:
    """Return a function that reads a file of vLLM's tree or wheel. A missing file reads as None."""
    if path.suffix == ".whl":
        wheel = zipfile.ZipFile(path)
        names = set(wheel.namelist())
        return lambda name: wheel.read(name).decode() if name in names else None
    return lambda name: (path / name).read_text() if (path / name).exists() else None


def touched() -> dict[str, set[str]]:
    """Return the names that the connector imports from each module of vLLM."""
    names: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return names


def overrides() -> dict[str, list[str]]:
    """Return the methods that each class of the connector overrides, with their parameters."""
    tree = ast.parse((SOURCE / "connector.py").read_text())
    (connector,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVDepotConnector")
    return {node.name: parameters(node) for node in connector.body if isinstance(node, ast.FunctionDef)}


def attributes() -> dict[str, list[str]]:
    """Return the attributes of vLLM's objects that the connector reads, by protocol."""
    tree = ast.parse((SOURCE / "engine.py").read_text())
    return {
        node.name: [
            name for each in node.body if isinstance(each, ast.AnnAssign | ast.FunctionDef) for name in _bound(each)
        ]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in OBJECTS
    }


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters of a function: `name`, `name=` with a default, `*name`, `**name`."""
    spec = function.args
    plain = [*spec.posonlyargs, *spec.args]
    first_default = len(plain) - len(spec.defaults)
    listed = [each.arg + "=" * (place >= first_default) for place, each in enumerate(plain)]
    listed += [f"*{spec.vararg.arg}"] if spec.vararg else []
    listed += [
        each.arg + "=" * (default is not None) for each, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    return listed + ([f"**{spec.kwarg.arg}"] if spec.kwarg else [])


def describe(read: Read) -> dict[str, Any]:
    """Return everything that the connector uses as this vLLM has it, None for missing names."""
    objects = {name: _class(read, *place) for name, place in sorted(OBJECTS.items())}
    base = _class(read, "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1") or {}
    hma = _class(read, "vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA") or {}
    methods = {**base, **hma}
    return {
        "imports": {
            f"{module}.{name}": _exists(read, module, name)
            for module, names in sorted(touched().items())
            for name in sorted(names)
        },
        "methods": {name: methods[name] for name in sorted(overrides()) if name in methods},
        "attributes": {
            name: {each: (members or {}).get(each) is not None for each in attributes()[name]}
            for name, members in objects.items()
        },
        "sleep": {
            f"{place}.{name}": calls
            for place, names in SLEEP.items()
            for name, calls in _calls(read, *place.rsplit(".", 1)).items()
            if name in names
        },
        "kernels": {name: _source(read, *place) for name, place in KERNELS.items()},
        "span": _source(read, *SPAN),
    }


def _source(read: Read, module: str, name: str) -> str | None:
    """Return the source of a function without its decorators, annotations and docstring."""
    tree = _module(read, module)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list, node.returns = [], None
            for each in node.args.args:
                each.annotation = None
            node.body = node.body[ast.get_docstring(node) is not None :]
            return ast.unparse(node)
    return None


def _calls(read: Read, module: str, name: str) -> dict[str, list[str]]:
    """Return the steps of sleep mode that each method of a class calls, in the order of the source."""
    tree = _module(read, module)
    methods = (
        method
        for node in (tree.body if tree is not None else ())
        if isinstance(node, ast.ClassDef) and node.name == name
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    )
    return {
        method.name: [
            call.func.attr
            for call in sorted(
                (each for each in ast.walk(method) if isinstance(each, ast.Call)), key=lambda each: each.lineno
            )
            if isinstance(call.func, ast.Attribute) and call.func.attr in STEPS
        ]
        for method in methods
    }


def _module(read: Read, module: str) -> ast.Module | None:
    place = module.replace(".", "/")
    text = read(f"{place}.py") or read(f"{place}/__init__.py")
    return None if text is None else ast.parse(text)


def _exists(read: Read, module: str, name: str) -> bool:
    """Return whether a module has a name, or a submodule of that name."""
    tree = _module(read, module)
    if _module(read, f"{module}.{name}") is not None:
        return True
    return tree is not None and any(name in _bound(node) for node in ast.walk(tree))


def _bound(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.Assign():
            return [each.id for each in node.targets if isinstance(each, ast.Name)]
        case ast.AnnAssign() if isinstance(node.target, ast.Name):
            return [node.target.id]
        case ast.Constant() if isinstance(node.value, str):
            return [node.value]  # names that a module provides by `__getattr__`
        case _:
            return []


def _class(read: Read, module: str, name: str) -> dict[str, list[str]] | None:
    """Return the members of a class: methods with parameters, and attributes, including those set in `__init__`."""
    tree = _module(read, module)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            members: dict[str, list[str]] = {}
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef):
                    members.setdefault(each.name, parameters(each))
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    members.setdefault(each.target.id, [])
                elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    members.setdefault(each.attr, [])
            return members
    return None


if __name__ == "__main__":
    print(json.dumps(describe(reader(Path(sys.argv[1]))), indent=1, sort_keys=True))  # noqa: T201

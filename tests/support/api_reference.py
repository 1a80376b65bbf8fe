"""Writes docs/reference/python.md from the docstrings of the public objects: `python -m support.api_reference`.

Reads the sources, because a signature's text at run time differs between versions of Python.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "python.md"
_SOURCES: Final = ROOT / "packages" / "core" / "src" / "kvdepot"

_INTRODUCTION: Final = """\
# Python objects

Written from the docstrings by `python -m support.api_reference`, in the folder `tests`.
[The quick start](../index.md#your-own-engine) has an example. Names that are not here may change at any time.
"""

OBJECTS: Final = {
    "In an engine": {
        "backends": ("list_backends", "get_backend", "TransferContext", "TransferFuture"),
        "kvcache": ("KVCache", "CacheGroup"),
        "keys": ("Namespace", "PrefixHasher", "hash_prefix", "KeyRun"),
        "client/scheduler": ("SchedulerClient",),
        "client/answers": ("Lease",),
        "errors": ("KVDepotError",),
    },
    "In a backend of your own": {
        "backends": ("Backend", "BackendStatus", "Copier"),
        "client/transfers": ("TransferOptions", "WorkerTransfers"),
        "client/transfer_protocol": ("CopyRoute",),
    },
    "In a tier of your own": {"tiers/base": ("Tier", "TierPool", "TierUsage")},
}
"""The public objects, by section and module."""

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_SECTION: Final = re.compile(r"^(Args|Attributes|Raises|Returns):$")
_ITEM: Final = re.compile(r"^ {4}(\w+): (.*)")


def page() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for section, modules in OBJECTS.items():
        parts.append(f"## {section}\n")
        for module, names in modules.items():
            tree = ast.parse((_SOURCES / f"{module}.py").read_text())
            found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | _Function)}
            parts += (_of(f"kvdepot.{module.replace('/', '.')}", found[name]) for name in names)
    return "\n".join(parts)


def _of(module: str, node: ast.ClassDef | _Function) -> str:
    if not isinstance(node, ast.ClassDef):
        return f"### `{node.name}`\n\n{_code(module, _signature(node))}\n{_text(node)}"
    made = next((each for each in node.body if isinstance(each, _Function) and each.name == "__init__"), None)
    head = f"class {node.name}" + ("" if made is None else f"({_arguments(made)})")
    fields = [f"\n    {_plain(each)}" for each in node.body if isinstance(each, ast.AnnAssign)]
    code = head + ":" * bool(fields) + "".join(fields)
    return "\n".join((f"### `{node.name}`\n", _code(module, code), _text(node), *_members(node)))


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, _Function) and not each.name.startswith("_") and ast.get_docstring(each):
            is_property = any(ast.unparse(decorator) == "property" for decorator in each.decorator_list)
            signature = _signature(each, with_self=False)
            if is_property:
                assert each.returns is not None
                signature = f"{each.name}: {ast.unparse(each.returns)}"
            yield f"{_fenced(signature)}\n{_text(each)}"


def _signature(node: _Function, *, with_self: bool = True) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = _plain(node.args) if with_self else _arguments(node)
    return f"{node.name}({arguments}){returns}"


def _arguments(node: _Function) -> str:
    """Return the arguments without the first one."""
    return _plain(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ")


def _plain(node: ast.AST) -> str:
    """Return source text with double quotes, as everywhere else."""
    return ast.unparse(node).replace("'", '"')


def _code(module: str, text: str) -> str:
    return _fenced(f"# {module}\n{text}")


def _fenced(text: str) -> str:
    return f"```py\n{text}\n```\n"


def _text(node: ast.ClassDef | _Function) -> str:
    """Return a docstring as Markdown: its sections as lists."""
    lines: list[str] = []
    has_items = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if section := _SECTION.match(line):
            has_items = section[1] != "Returns"
            lines += [f"*{section[1]}*", ""]
        elif has_items and (item := _ITEM.match(line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            lines.append(line.strip() if not has_items else "  " * bool(line) + line.strip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

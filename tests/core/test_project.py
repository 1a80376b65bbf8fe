"""The project's own rules that no linter checks."""

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PATCH_OF_PRIVATE: Final = re.compile(r'\b(?:setattr|delattr|patch|object)\((?:[^"()]+, )?"(?:[^"]*\.)?_(?!_)')
UNNAMED: Final = re.compile(r"(?<!`)\b(those|such|what|who)\b", re.IGNORECASE)
MAKES_ENTRY: Final = re.compile(r"\bEntry\(|\bcast\([^,]*\bEntry\b")


def test_no_test_patches_what_is_private() -> None:
    """The linter sees `it._name`; a name in a string it does not see."""
    paths = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    assert len(paths) > 200
    assert [path for path in paths if PATCH_OF_PRIVATE.search(path.read_text())] == []
    assert PATCH_OF_PRIVATE.search('monkeypatch.setattr("kvdepot.backends._load", load)')
    assert PATCH_OF_PRIVATE.search('patch.object(flights, "_flights", {})')


def test_only_the_pool_and_the_index_make_entries() -> None:
    """The type checker refuses plain numbers in place of an `Entry`, also those that arithmetic gives."""
    paths = sorted((ROOT / "packages").rglob("*.py"))
    makers = {"/".join(path.parts[-2:]) for path in paths if MAKES_ENTRY.search(path.read_text())}
    assert makers == {"index/entries.py", "pool/table.py"}


def test_the_first_line_of_a_docstring_names_its_object() -> None:
    paths = sorted((ROOT / "packages").rglob("*.py"))
    assert len(paths) > 100
    unnamed = {
        f"{path}: {first}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if UNNAMED.search(first := (ast.get_docstring(node) or "").partition("\n")[0])
    }
    assert unnamed == set()


def test_every_benchmark_is_in_the_table() -> None:
    folder = ROOT / "benchmarks"
    listed = re.findall(r"`(\w+/\w+\.py)`", (folder / "README.md").read_text())
    assert sorted(set(listed)) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))


def test_every_picture_of_the_docs_is_for_light_and_for_dark_pages() -> None:
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert len(pictures) > 10
    for path in pictures:
        picture = path.read_text()
        if path.name != "demo.svg":  # a terminal, which is dark everywhere
            width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0]
            assert f'<rect class="paper" width="{width}" height="{height}"/>' in picture, path.name
            assert "@media (prefers-color-scheme: dark)" in picture, path.name

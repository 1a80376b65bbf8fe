"""docs/reliability.md agrees with the tests: each kept promise has a test, and each marker names a promise."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "packages/core/src/kvdepot/testing")
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Promise:
    number: int
    text: str
    state: str

    @property
    def is_kept(self) -> bool:
        return self.state.startswith("kept")


@cache
def promises() -> tuple[Promise, ...]:
    page = (ROOT / "docs" / "reliability.md").read_text()
    return tuple(Promise(int(number), text, state) for number, text, state in ROW.findall(page))


def marks_of(tree: ast.AST, where: str) -> Iterator[tuple[str, int]]:
    """Yield the marked functions, methods and classes with the numbers of their promises."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise":
                assert node.name.lower().startswith("test"), f"{where}: {node.name} is no test"
                assert decorator.args, f"{where}: {node.name} names no promise"
                assert not decorator.keywords
                for argument in decorator.args:
                    assert isinstance(argument, ast.Constant), f"{where}: {node.name}"
                    assert isinstance(argument.value, int)
                    yield f"{where}: {node.name}", argument.value


@cache
def marks() -> tuple[tuple[str, int], ...]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 40
    return tuple(mark for path in paths for mark in marks_of(ast.parse(path.read_text()), str(path.relative_to(ROOT))))


def test_promises_are_numbered_one_after_the_other() -> None:
    assert [promise.number for promise in promises()] == list(range(1, len(promises()) + 1))
    assert len(promises()) >= 60


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: str(promise.number))
def test_a_promise_has_a_test_or_says_why_it_is_open(promise: Promise) -> None:
    shown = [where for where, number in marks() if number == promise.number]
    if promise.is_kept:
        assert shown, f"{promise.number} is kept, says the page: {promise.text}"
    else:
        assert promise.state.startswith(("open: ", "withdrawn: ")), promise.state
        assert not shown, f"{promise.number} is shown by {shown}: is it still open?"
    if "open" in promise.state:
        assert re.search(r"open: \w", promise.state), "say what is missing"


def test_every_marker_names_a_promise() -> None:
    known = {promise.number for promise in promises()}
    assert [mark for mark in marks() if mark[1] not in known] == []

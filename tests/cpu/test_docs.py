"""The docs' examples work: Python code runs unchanged, commands parse, and links have targets."""

import fnmatch
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.cli import make_parser
from kvdepot.wire.frames import request_types
from support.commands import run_kvdepot

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NOT_RUN = "<!-- not run: "  # and a reason, in the line before a block whose requirements are missing here


def python_blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines):
            if line == "```python" and not lines[max(0, number - 1)].startswith(_NOT_RUN):
                end = lines.index("```", number)
                yield f"{page.name}:{number + 1}", "\n".join(lines[number + 1 : end])


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            command = re.match(r"(?:    |\$ )?(?:uv run )?(kvdepot [a-z].*)", line)
            if command and "|" not in line:
                yield f"{page.name}:{number}", command[1].rstrip("&").strip()


def spans() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for span in re.findall(r"`kvdepot ([^`]*)`", line):
                yield f"{page.name}:{number}", span


BLOCKS, COMMANDS = dict(python_blocks()), dict(commands())


@pytest.mark.slow
@pytest.mark.parametrize("place", BLOCKS)
@pytest.mark.promise(6)
def test_python_runs_as_it_stands(place: str, tmp_path: Path) -> None:
    with DepotProcess(directory=tmp_path / "kvdepot"):
        result = subprocess.run(
            [sys.executable, "-c", BLOCKS[place]],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )
    assert result.returncode == 0, result.stderr
    assert "True" in result.stdout, result.stdout


def test_the_quick_start_has_an_example() -> None:
    assert any(place.startswith("index.md") for place in BLOCKS)


@pytest.mark.parametrize("place", COMMANDS)
def test_commands_parse(place: str) -> None:
    make_parser().parse_args(shlex.split(COMMANDS[place], comments=True)[1:])


@pytest.mark.slow
def test_flags_that_are_named_in_passing_are_flags() -> None:
    unknown: list[str] = []
    help_of: dict[str, str] = {}
    for place, span in spans():
        command, *words = span.split()
        flags = [word.split("=")[0] for word in words if word.startswith("--")]
        if not flags:
            continue
        if command in ("session", "tier"):
            command = f"{command} {words[0]}"
        if command not in help_of:
            help_of[command] = run_kvdepot(*command.split(), "--help").stdout
        unknown += [f"{place}: {command} {flag}" for flag in flags if not re.search(rf"{flag}\b", help_of[command])]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "zensical.toml").read_text()
    assert tomllib.loads(site)["project"]["docs_dir"] == "docs"
    missing = [page for page in PAGES[1:] if f'"{page.relative_to(ROOT / "docs")}"' not in site]
    assert not missing


@pytest.mark.parametrize(("page", "least"), [("architecture.md", 40), ("reliability.md", 15)])
def test_the_files_that_a_page_names_exist(page: str, least: int) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    named = {span.rstrip("/") for span in re.findall(r"`([\w/*]+(?:\.py|/))`", text)}
    paths = [str(path) for folder in ("packages", "tests", "benchmarks") for path in (ROOT / folder).rglob("*")]
    assert len(named) > least
    assert [name for name in named if not fnmatch.filter(paths, f"*/{name}")] == []


def test_the_wire_protocol_has_a_row_for_the_fate_of_each_request() -> None:
    page = (ROOT / "docs" / "wire.md").read_text()
    table = page[page.index("| message → reply | client dies") :].partition("\n\n")[0]
    described = re.findall(r"`(\w+)`", " ".join(row.partition("→")[0] for row in table.splitlines()[2:]))
    assert sorted(described) == sorted(str(kind.__struct_config__.tag) for kind in request_types())

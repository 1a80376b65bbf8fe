"""Commands fit their output to a terminal. For programs they break no line."""

import re
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvdepot.lab.processes import DepotProcess
from support.commands import KVDEPOT, run_kvdepot
from support.peer import Peer, prompt, registration
from support.terminal import run_in_terminal

ENGINE = "vllm meta-llama-3.1-8b-instruct 127.0.0.1:18101 3360e073"
MODEL = "/models/meta-llama/Meta-Llama-3.1-8B-Instruct"


@pytest.fixture
def busy() -> Iterator[DepotProcess]:
    """A depot with a tier and an engine."""
    with DepotProcess("--tier", "memory://?capacity=1MiB") as depot:
        peer = Peer(depot, replace(registration(instance=ENGINE), model=MODEL))
        peer.store(prompt(3, "a"))
        yield depot
        peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["status", "--verbose"], ["doctor"], ["pools"]], ids=" ".join)
def test_a_line_is_broken_between_words_in_a_terminal_alone(command: list[str], busy: DepotProcess) -> None:
    named = [str(busy.pool_directory)] if command == ["pools"] else ["--url", busy.url]
    lines = run_in_terminal([*KVDEPOT, *command, *named], columns=60).lines
    plain = run_kvdepot(*command, *named).stdout.splitlines()
    assert max(map(len, plain)) > 60
    assert [line for line in lines if len(line) > 60 and " " in line.strip()] == []
    changing = ("kvdepot 0", "loop ", "lookups ")  # these may change between the two runs
    shown, expected = ([each for each in found if not each.startswith(changing)] for found in (lines, plain))
    texts = (" ".join(" ".join(each).split()) for each in (shown, expected))
    text, other = (re.sub(r"\d[\d.]*", "0", text) for text in texts)  # free memory changes
    assert text == other


@pytest.mark.slow
def test_the_live_view_shows_whole_names_in_80_columns(busy: DepotProcess) -> None:
    pytest.importorskip("rich", reason="pip install 'kvdepot[cli]'")
    shown = run_in_terminal([*KVDEPOT, "top", "--url", busy.url, "--frames", "1"])
    assert max(map(len, shown.lines)) <= 80
    engine = "".join(line[:28].strip() for line in shown.lines)
    assert "127.0.0.1:18101" in engine
    assert "3360e073" in engine
    assert "…" not in shown.text

"""The examples do what they say, with a tiny model."""

import json
import re
import sys
import tempfile
from pathlib import Path

from kvdepot.lab.processes import DepotProcess
from kvdepot.pool.inventory import find_pools
from support.vllm.engines import MakeModel, prompts
from support.vllm.examples import EXAMPLES, OPTIONS, free_port, run

# Runs a script whose children are not started by the Python that runs it.
WITH_PYTHON = (
    "import runpy, sys; sys.executable, *sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], None, '__main__')"
)


def example(name: str, model: Path, *arguments: str, **variables: str) -> str:
    """Run the `serve.sh` of an example with a small engine and pool. Return its output."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS.items() if key != "enforce_eager"]
    command = ("bash", str(EXAMPLES / name / "serve.sh"), str(model), *arguments, *flags, "--enforce-eager")
    return run(*command, **{"PORT": str(free_port()), "POOL_SIZE": "128MiB", **variables})


def test_one_engine_and_then_two(depot: DepotProcess, model: MakeModel, forking_python: str) -> None:
    arguments = [str(model("gqa")), "--url", depot.url, "--options", json.dumps(OPTIONS)]
    script = str(EXAMPLES / "vllm" / "two_engines.py")
    output = run(sys.executable, "-c", WITH_PYTHON, forking_python, script, *arguments)
    assert re.findall(r"(\d+) of \d+ tokens reused", output) == ["0", "896", "896", "896"]


def test_a_prompt_outlives_its_engine_and_the_example_leaves_no_memory(model: MakeModel, serve: dict[str, str]) -> None:
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:  # short, as it will contain sockets
        output = example("vllm", model("gqa"), PORT=port, TMPDIR=folder, **serve)
    said = re.findall(
        r"^(\w+) engine: (\d+) of 700 prompt tokens came .*, first token after [\d.]+ s$", output, re.MULTILINE
    )
    assert said == [("first", "0"), ("second", "640")]
    assert "It works" in output
    attached = re.findall(r"^\[\d+\] vllm (?:\S+) (\S+) [0-9a-f]{8}, (scheduler|worker)", output, re.MULTILINE)
    assert sorted(attached) == [(f"127.0.0.1:{port}", role) for role in ("scheduler", "worker")]
    assert not [pool for pool in find_pools() if folder in pool.server]


def test_documents_in_another_order_are_blended(model: MakeModel, serve: dict[str, str], tmp_path: Path) -> None:
    documents = [tmp_path / f"{number}.txt" for number in range(4)]
    for number, path in enumerate(documents):
        path.write_text(" ".join(f"t{token}" for token in prompts(1, 400, seed=90 + number)[0]))
    output = example("blend", model("gqa"), *map(str, documents), "--", **serve)
    assert re.search(r"^blended +first token after +\d+ ms  \{.*'reused_tokens': \d{3,}", output, re.MULTILINE)


def test_an_agent_s_session_leaves_the_pool_during_a_long_tool_and_is_back_before_it_returns(
    model: MakeModel, serve: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        output = example("agents", model("gqa"), TMPDIR=folder, TOOL_SECONDS="0.1 3.1", **serve)
    found: list[tuple[str, str]] = re.findall(r"turn: (\d+) of (\d+) prompt", output)
    turns = [(int(cached), int(tokens)) for cached, tokens in found]
    assert len(turns) == 3
    assert turns[0][0] == 0
    assert all(tokens - cached < 128 + 72 for cached, tokens in turns[1:]), "an incomplete chunk, and what is new"
    moved: list[tuple[str, str]] = re.findall(r"(\d+) chunks of \S+ (leave|are)", output)
    assert [verb for _, verb in moved] == ["leave", "are"]
    assert moved[0][0] == moved[1][0] != "0"
    assert "is forgotten" in output

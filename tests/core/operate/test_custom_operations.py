"""An operation of another distribution: one declaration makes it a message, an HTTP path and a command."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from kvdepot.lab.processes import DepotProcess, start_child
from support.commands import run_kvdepot

_MODULE: Final = """
from typing import Annotated

from kvdepot.server.feature import Feature
from kvdepot.wire.operation import Argument, Command, Endpoint, Operation, Reply


class Touched(Reply, tag="touched", frozen=True):
    count: int
    owner: str


class Touch(Operation[Touched], tag="touch", frozen=True):
    endpoints = (Endpoint("POST", "/touch", "Touch chunks", lambda _, reply: reply.owner, str),)
    command = Command("touch", "touch chunks", "Touch chunks.", lambda _, reply: reply.owner)

    digests: Annotated[bytes, Argument("keys")]
    times: Annotated[int, Argument()] = 1
    salt: Annotated[bytes, Argument(flag="--salt")] = b"none"
    owner: str = "nobody"


class Toucher(Feature):
    name = "toucher"

    def operations(self):
        return {Touch: lambda asked: Touched(1, 1, f"{asked.digests.hex()} {asked.times} {asked.salt} {asked.owner}")}


def make(_depot):
    return Toucher()
"""
_ENTRY_POINTS: Final = """
[kvdepot.features]
toucher = touching:make
[kvdepot.messages]
toucher = touching
broken = no_such_module
"""


@pytest.fixture
def toucher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DepotProcess]:
    """A depot, and a path for its clients, with the distribution above."""
    (tmp_path / "touching.py").write_text(_MODULE)
    information = tmp_path / "touching-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: touching\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(_ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(DepotProcess, "start_child", staticmethod(start_child))  # a fork has its metadata already
    with DepotProcess() as depot:
        yield depot


@pytest.mark.slow
def test_bytes_of_a_custom_operation_come_over_socket_http_and_command_line_alike(toucher: DepotProcess) -> None:
    pytest.importorskip("uvicorn", reason="pip install 'kvdepot[http]'")
    from support.http import Http

    asked = (
        "from kvdepot.client.operator import ask_depot; import sys, touching;"
        "print(ask_depot(touching.Touch(b'12', 3, b'4'), sys.argv[1]).owner)"
    )
    by_socket = subprocess.run([sys.executable, "-c", asked, toucher.url], capture_output=True, text=True, check=True)
    assert by_socket.stdout == "3132 3 b'4' nobody\n"

    by_command = run_kvdepot("touch", "31", "32", "--times", "3", "--salt", "34", "--url", toucher.url)
    assert (by_command.stdout, by_command.returncode) == ("3132 3 b'4' nobody\n", 0), by_command.stderr
    assert run_kvdepot("touch", "3132", "--url", toucher.url).stdout == "3132 1 b'none' nobody\n"
    assert "leaving out the requests of broken" in by_command.stderr
    for words, why in ((["3"], "hexadecimal"), (["31", "--times", "x"], "times: Expected `int`, got `str`")):
        refused = run_kvdepot("touch", *words, "--url", toucher.url)
        assert refused.returncode == 1
        assert refused.stderr.splitlines()[-1].startswith("kvdepot: touch: ")
        assert why in refused.stderr

    http = Http(toucher)
    with closing(http.server):
        body: dict[str, Any] = {"digests": ["31", "32"], "times": 3, "salt": ["34"]}
        assert http.post("/touch", body) == (200, "3132 3 b'4' nobody")
        assert http.post("/touch", {"digests": ["31"]}) == (200, "31 1 b'none' nobody")
        assert http.post("/touch", {"digests": "31"})[0] == http.post("/touch", {"digests": ["3"]})[0] == 400

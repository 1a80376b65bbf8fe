"""The commands as a user runs them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.commands import KVDEPOT, run_kvdepot
from support.terminal import Terminal, run_in_terminal


def run_json(*arguments: str) -> Any:
    result = run_kvdepot(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.promise(23, 29)
def test_the_demo_verifies_what_two_engines_share_and_survives_a_killed_depot() -> None:
    summary = run_json("demo")
    assert summary["wrong_bytes"] == summary["restart"]["wrong_bytes"] == 0
    assert summary["verified_bytes"] == summary["retrieved_bytes"] > 0
    assert summary["hit_rate_by_source"]["shared"] > 0
    assert summary["restart"]["entries_after"] == summary["restart"]["entries_before"] == summary["num_entries"]
    assert summary["restart"]["hit_rate"] > 0.9
    assert summary["num_leases"] == 0
    without = summary["without_depot"]
    assert without["prompt_tokens"] == summary["prompt_tokens"]
    assert without["retrieved_bytes"] == without["stored_bytes"] == 0
    assert without["hit_rate"] < summary["hit_rate"]
    assert without["compute_seconds"] > summary["compute_seconds"]


@pytest.mark.slow
def test_status_is_for_people_and_for_machines() -> None:
    with DepotProcess() as depot:
        fields = run_json("status", "--url", depot.url)
        assert {"num_entries", "pool_used_bytes", "num_leases", "epoch", "contexts"} <= set(fields)
        assert "entries  0 of" in run_kvdepot("status", "--url", depot.url).stdout
        assert run_kvdepot("clear", "--all", "--url", depot.url).stdout == "0 entries removed\n"


def test_without_a_depot_status_says_what_to_do(tmp_path: Path) -> None:
    result = run_kvdepot("status", "--url", str(tmp_path))
    assert result.returncode == 1
    assert "kvdepot serve" in result.stderr


@pytest.mark.slow
@pytest.mark.promise(3)
def test_a_hung_depot_is_unhealthy_within_its_deadline() -> None:
    import signal

    with DepotProcess() as depot:
        depot.signal(signal.SIGSTOP)
        result = run_kvdepot("status", "--url", depot.url)
        depot.signal(signal.SIGCONT)
    assert result.returncode == 1
    assert "does not answer" in result.stderr


def test_backends_are_listed_with_their_reasons() -> None:
    backends = {backend["name"]: backend for backend in run_json("backends")}
    assert backends["cpu"]["why_unavailable"] is None
    assert backends["cuda"]["why_unavailable"]


@pytest.mark.parametrize("flag", ["--tier=disk:///tmp/x", "--tier=nonsense://"])
def test_a_start_that_fails_leaves_no_file_behind(flag: str, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    result = run_kvdepot("serve", "--dir", str(tmp_path / "run"), "--pool-dir", str(pool), "--pool-size", "1MiB", flag)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert not pool.exists()


# A shell starts background processes with SIGINT ignored, and children inherit that.
_HEARING_INTERRUPTS = """
import os, signal, sys
for each in (signal.SIGINT, signal.SIGHUP):
    signal.signal(each, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "kvdepot", *sys.argv[1:]])
"""


@pytest.mark.parametrize("command", [["demo"], ["bench", "lookup"]])
def test_ctrl_c_ends_a_command_and_its_children_without_a_word(command: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HEARING_INTERRUPTS, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(children.read_text)
        os.killpg(process.pid, signal.SIGINT)  # like a terminal
        try:
            _, said = process.communicate(timeout=20)  # the output ends when no child is left
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, said) == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_in_close_succession_end_the_demo_with_its_depot_and_pool(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _HEARING_INTERRUPTS, "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"serving" in line:
                break
        pool = pool_of_a_depot_in(str(tmp_path))
        for _ in range(50):  # so that many arrive during the clean-up
            process.send_signal(number)
        assert b"their memory is free" in process.stdout.read()
        assert process.wait() == 130
    assert not pool.exists()
    with pytest.raises(AssertionError, match="no depot"):
        pool_of_a_depot_in(str(tmp_path))


@pytest.mark.slow
def test_a_killed_demo_leaves_neither_a_process_nor_a_pool(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*KVDEPOT, "demo"], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"serving" in line:
                break
        pool = pool_of_a_depot_in(str(tmp_path))
        assert pool.exists()
        process.kill()
        process.stdout.read()  # ends when no child is left
    assert not pool.exists()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_the_command_line_is_loaded_ends_without_a_word() -> None:
    """A module that the command line loads sends the signal, in the middle of the imports."""
    code = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "kvdepot.operate.commands":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("kvdepot", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


# As on a machine with less free memory: fewer conversations and a smaller pool.
_SMALL_DEMO = """
from kvdepot.lab import demo
from kvdepot.operate.cli import main
demo.available_memory_bytes = lambda: 1 << 30
main(["demo"])
"""


@pytest.mark.slow
def test_the_demo_fits_80_columns_and_says_what_the_depot_saved_and_what_is_next() -> None:
    command = [sys.executable, "-c", _SMALL_DEMO]
    shown = run_in_terminal(command)
    assert shown.status == 0, shown.text
    lines = shown.lines
    assert max(map(len, lines)) <= 80
    assert any("starting a depot" in line for line in lines)
    assert any(re.fullmatch(r"  prompt tokens computed +[\d,]+ -> +[\d,]+ +[\d.]+ times less", line) for line in lines)
    assert lines[-1].startswith("  kvdepot top")
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert max(map(len, plain.splitlines())) <= 80
    assert "  with a depot " in plain


def pool_of_a_depot_in(directory: str) -> Path:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            arguments = path.read_text().split("\0")
            if "--pool-dir" in arguments and arguments[arguments.index("--dir") + 1].startswith(directory):
                return Path(arguments[arguments.index("--pool-dir") + 1])
    raise AssertionError(f"no depot in {directory}")


@pytest.mark.slow
def test_ctrl_c_in_the_demo_is_one_line_and_frees_its_memory() -> None:
    pools: list[Path] = []
    with tempfile.TemporaryDirectory() as place:

        def interrupt(shown: Terminal, write: Callable[[str], object]) -> None:
            if not pools and "serving" in shown.text:
                pools.append(pool_of_a_depot_in(place))
                assert pools[0].exists()
                write("\x03")

        command = [sys.executable, "-c", _HEARING_INTERRUPTS, "demo"]
        shown = run_in_terminal(command, environment={"TMPDIR": place}, on_output=interrupt)
        assert not list(Path(place).iterdir())
    assert shown.status == 130
    assert shown.lines[-1] == "Stopped. The depot and the engines have ended, and their memory is free."
    assert "Traceback" not in shown.text
    assert pools
    assert not pools[0].exists()

"""Ordinary mistakes at the command line: one sentence that says what to do, no traceback, and nothing left behind."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.pool.room import MEMORY_FILE_SYSTEMS, file_system_of

_COMMAND = [sys.executable, "-m", "kvdepot"]
_SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]

small_shm = pytest.mark.skipif(
    subprocess.run([*_SMALL_SHM, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to mount a tmpfs, as root has",
)


def run(*arguments: str, prefix: list[str] | None = None) -> tuple[int, str]:
    """Run one command and return its exit status and what it said on standard error."""
    command = [*(prefix or []), *_COMMAND, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1]}\n')
    return str(path)


def test_a_number_of_things_is_at_least_one(trace: str) -> None:
    for arguments in (
        ["replay", trace, "--requests", "-4"],
        ["soak", "--engines", "0"],
        ["bench", "server", "--entries", "-1"],
    ):
        status, said = run(*arguments)
        assert status == 2
        assert "is not a whole number from 1 to" in said


def test_a_depot_that_cannot_start_ends_soak_in_its_own_words() -> None:
    status, said = run("soak", "--disk", "/proc/nothing", "--seconds", "1")
    assert (status, said.count("\n")) == (1, 2)
    assert said.startswith("kvdepot: --tier disk:///proc/nothing: No such file or directory\n")


@small_shm
@pytest.mark.parametrize("command", [["demo"], ["bench", "lookup"]])
def test_a_small_dev_shm_ends_a_demo_with_the_way_out(command: list[str]) -> None:
    status, said = run(*command, prefix=_SMALL_SHM)
    assert (status, said.count("\n")) == (1, 2)
    assert "--shm-size" in said


def first_words(*arguments: str, prefix: list[str] | None = None) -> str:
    """Start a depot, stop it once it serves, and return what it logged."""
    command = [*(prefix or []), *_COMMAND, "serve", "--ephemeral", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        logged = ""
        for line in process.stderr:
            logged += line
            if "serving" in line:
                process.terminate()
        assert process.wait(20) == 0, logged
    return logged


@small_shm
def test_a_depot_in_a_small_dev_shm_warns_of_it(tmp_path: Path) -> None:
    logged = first_words("--dir", str(tmp_path), prefix=_SMALL_SHM)
    assert "WARNING" in logged
    assert "the pool has only 50.0 MiB" in logged
    assert "--shm-size" in logged


@small_shm
def test_a_pool_as_large_as_a_small_dev_shm_says_how_to_enlarge_it(tmp_path: Path) -> None:
    status, said = run("serve", "--dir", str(tmp_path), "--pool-size", "64MiB", prefix=_SMALL_SHM)
    assert status == 1
    assert "--shm-size" in said.splitlines()[-1]


@pytest.mark.skipif(file_system_of(Path("/var/tmp")) in MEMORY_FILE_SYSTEMS, reason="/var/tmp is not on a disk here")
def test_a_pool_on_a_disk_is_warned_of() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        logged = first_words("--dir", folder, "--pool-dir", f"{folder}/pool", "--pool-size", "16MiB")
    assert "its pages go to disk" in logged


def test_a_wrong_argument_is_named_in_one_line() -> None:
    status, said = run("serve", "--pool-size", "foo")
    assert status == 2
    assert said == (
        "kvdepot serve: argument --pool-size: 'foo' is not a size: write for example 512MiB or 4GiB"
        " (see 'kvdepot serve --help')\n"
    )


def test_after_a_kill_status_says_at_once_that_there_is_no_depot(depot: DepotProcess) -> None:
    depot.kill()
    status, said = run("status", "--url", depot.url)
    assert (status, said) == (
        1, f"kvdepot: no depot in {depot.url}: start one with 'kvdepot serve', or name its directory by --url\n"
    )  # fmt: skip

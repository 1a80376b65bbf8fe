"""Common mistakes on the command line give one sentence that says what to do, no traceback, and no leftovers."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.ops.cli import make_parser
from kvdepot.ops.extensions import KNOWN_COMMANDS
from kvdepot.pool.size import MEMORY_FILE_SYSTEMS, file_system_of
from support.commands import KVDEPOT, run_kvdepot

_SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]

small_shm = pytest.mark.skipif(
    subprocess.run([*_SMALL_SHM, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to mount a tmpfs, as root has",
)


def run(*arguments: str, prefix: Sequence[str] = ()) -> tuple[int, str]:
    """Run one command. Return its exit status and its standard error."""
    done = run_kvdepot(*arguments, prefix=prefix)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "--demote-min-tokens", "-5"], "is not a whole number from 0 to"),
        (["serve", "--promote-min-tokens", "1e9"], "is not a whole number from 0 to"),
        (["serve", "--events", "tcp://127.0.0.1:9", "--events-topic", "a\nb"], "characters that cannot be printed"),
        (["serve", "--quota", "x" * 257 + "=1MiB"], "257 characters: a tenant's name has 1 to 256"),
        (["quota", "x" * 257, "1MiB"], "257 characters: a tenant's name has 1 to 256"),
        (["quota", "", "1MiB"], "0 characters: a tenant's name has 1 to 256"),
        (["clear", "--tenant", ""], "0 characters: a tenant's name has 1 to 256"),
        (["session", "forget", "s", "--tenant", "x" * 257], "257 characters: a tenant's name has 1 to 256"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_one_line(arguments: list[str], reason: str) -> None:
    status, said = run(*arguments)
    assert status > 0
    assert reason in said
    assert said.count("\n") == 1


@pytest.mark.slow
@small_shm
@pytest.mark.parametrize("command", [["demo"], ["bench", "lookup"]])
def test_a_small_dev_shm_ends_a_demo_with_the_way_out(command: list[str]) -> None:
    status, said = run(*command, prefix=_SMALL_SHM)
    assert (status, said.count("\n")) == (1, 2)
    assert "--shm-size" in said


@small_shm
def test_a_demo_that_does_not_fit_names_no_flag_that_it_lacks() -> None:
    tiny = [part.replace("size=64m", "size=32m") for part in _SMALL_SHM]
    status, said = run("demo", prefix=tiny)
    assert (status, "--pool-size" in said) == (1, False), said
    assert "the demo needs 64.0 MiB in /dev/shm, which has 32.0 MiB free" in said


def first_words(*arguments: str, prefix: list[str] | None = None) -> str:
    """Start a depot, stop it once it serves, and return its log."""
    command = [*(prefix or []), *KVDEPOT, "serve", "--ephemeral", *arguments]
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


@pytest.mark.slow
def test_after_a_kill_status_says_at_once_that_there_is_no_depot(depot: DepotProcess) -> None:
    depot.kill()
    status, said = run("status", "--url", depot.url)
    assert (status, said) == (
        1,
        f"kvdepot: no depot in {depot.url}: start one with 'kvdepot serve', or name its directory by --url\n",
    )


_COMMANDS = (
    "serve",
    "status",
    "top",
    "find FILE",
    "clear",
    "warm FILE",
    "session retain NAME 600",
    "session prefetch NAME",
    "session demote NAME",
    "session forget NAME",
    "quota acme 8GiB",
    "tier add URL",
    "tier remove NAME",
    "tier gc URL",
    "drain",
    "loglevel debug",
    "config",
    "pools",
    "backends",
    "demo",
    "doctor",
    "sizing MODEL",
    "bench transfer",
    "bench lookup",
)


def names_in_help(*group: str) -> list[str]:
    """Return the commands of the core in a help."""
    names = re.findall(r"^    (\w+) ", run_kvdepot(*group, "--help").stdout, re.MULTILINE)
    return [name for name in names if name not in KNOWN_COMMANDS]


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_accepts_the_directory_of_a_depot(command: str) -> None:
    words = command.split()
    for flag in ("--dir", "--url"):
        for given in ([flag, "/x", *words], [*words, flag, "/x"], [flag, "/other", *words, flag, "/x"]):
            assert make_parser().parse_args(given).directory == Path("/x")
    assert "directory" not in make_parser().parse_args(words), "it would hide the environment's"


@pytest.mark.parametrize("group", [(), ("session",), ("tier",), ("bench",)])
def test_the_list_of_commands_is_whole(group: tuple[str, ...]) -> None:
    listed = [command.split()[: len(group) + 1] for command in _COMMANDS]
    of_backends = ["cuda"] if group == ("bench",) else []
    assert {(*group, name) for name in names_in_help(*group) if name not in of_backends} == {
        tuple(words) for words in listed if tuple(words[:-1]) == group
    }


@pytest.mark.slow
def test_dir_and_url_name_a_depot_wherever_one_is_named(tmp_path: Path) -> None:
    with DepotProcess() as depot:
        for flag in ("--dir", "--url"):
            assert "entries" in run_kvdepot("status", flag, depot.url).stdout
            assert "pool_size" in run_kvdepot(flag, f"ipc://{depot.url}", "config").stdout
            assert str(depot.pool_directory) in run_kvdepot("pools", flag, depot.url).stdout
            assert "no pools" in run_kvdepot("pools", flag, str(tmp_path)).stdout
            assert (
                f"process {depot.pid}" in run_kvdepot("doctor", flag, depot.url).stdout
            )  # doctor fails if there is no backend
    for flag in ("--dir", "--url"):
        assert "serving" in first_words(flag, str(tmp_path / flag.strip("-")), "--pool-size", "4MiB")
    for arguments in (["serve", "--dir", ""], ["status", "--url", ""]):
        status, said = run(*arguments)
        assert status in (1, 2)
        assert "the depot's directory has no name" in said


@pytest.mark.slow
def test_no_file_and_no_error_is_named_twice(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for arguments in (
        ["serve", "--config", missing],
        ["find", missing],
        ["serve", "--http", "127.0.0.1:0", "--http-token", missing, "--dir", str(tmp_path / "d")],
    ):
        status, said = run(*arguments)
        assert (status, said.count(missing)) == (1, 1), said
        assert "Errno" not in said


def test_doctor_knows_that_proc_takes_no_files() -> None:
    done = run_kvdepot("doctor", "--dir", "/proc/kvdepot")
    assert done.returncode == 1
    assert "no files can be made in /proc/kvdepot" in done.stdout


def test_every_command_says_in_a_sentence_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    names = names_in_help()
    assert len(names) > 15
    for name in names:
        with pytest.raises(SystemExit):
            make_parser().parse_args([name, "--help"])
        sentence = capsys.readouterr().out.split("\n\n")[1]
        assert sentence.endswith("."), f"{name}: {sentence}"

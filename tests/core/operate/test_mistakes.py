"""Common mistakes on the command line give one sentence that says what to do, no traceback, and no leftovers."""

import contextlib
import io
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.cli import main, make_parser
from kvdepot.operate.extensions import KNOWN_COMMANDS
from kvdepot.pool.size import MEMORY_FILE_SYSTEMS, file_system_of
from support.commands import IN_SMALL_SHM, log_of_serve, needs_small_shm, run_kvdepot


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
        (["serve", "--events", "tcp://127.0.0.1:9", "--events-topic", "kv@{nod}"], "{nod} is neither {node} nor"),
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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve --pool-sise 1GiB", "kvdepot serve: there is no flag --pool-sise; did you mean --pool-size? (see"),
        ("quota --tennant acme", "kvdepot quota: there is no flag --tennant (see 'kvdepot quota --help')"),
        ("--verion", "kvdepot: there is no flag --verion; did you mean --version? (see 'kvdepot --help')"),
        ("sevre", "kvdepot: argument COMMAND: invalid choice: 'sevre'; did you mean serve? (see"),
        ("tier ad x", "kvdepot tier: argument COMMAND: invalid choice: 'ad'; did you mean add? (see"),
        ("loglevel x", "invalid choice: 'x' (choose from"),
        ("status x y", "kvdepot status: unrecognized arguments: x y (see 'kvdepot status --help')"),
        ("sizing . --pool-size 64", "64 B is too small for a pool: write for example 64GiB"),
    ],
)
def test_a_typo_names_what_was_probably_meant(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert said in error


def test_the_smallest_pool_that_serve_takes_can_be_sized() -> None:
    assert make_parser().parse_args(["sizing", "config.json", "--pool-size", "1MiB"]).pool_size == 1 << 20


def test_without_a_command_kvdepot_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert (ended.value.code, "run a depot" in capsys.readouterr().out) == (2, True)


_TRACE = str(Path(__file__).parents[3] / "examples" / "trace.jsonl")


@pytest.mark.slow
@needs_small_shm
@pytest.mark.parametrize("command", [["demo"], ["replay", "--requests", "20", _TRACE]])
def test_beside_a_small_dev_shm_a_demo_puts_its_pool_into_a_file_and_says_so(command: list[str]) -> None:
    pytest.importorskip("kvdepot_plan" if command[0] == "replay" else "kvdepot_cpu")
    done = run_kvdepot(*command, prefix=IN_SMALL_SHM)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"/dev/shm\s+has\s+no\s+room\s+for\s+a\s+pool", done.stdout)


@needs_small_shm
@pytest.mark.parametrize("command", ["demo", "bench lookup"])
def test_a_demo_without_any_room_names_the_way_out_and_no_flag_that_it_lacks(command: str) -> None:
    nowhere = [*IN_SMALL_SHM, "env", "TMPDIR=/dev/shm"]
    status, said = run(*command.split(), prefix=nowhere)
    assert (status, said.count("\n"), "--pool-size" in said) == (1, 1, False), said
    assert "/dev/shm has 64.0 MiB" in said
    assert "--shm-size" in said


def test_a_depot_whose_terminal_closes_stops_as_on_sigterm_and_says_so(tmp_path: Path) -> None:
    arguments = ("--ephemeral", "--dir", str(tmp_path), "--pool-size", "16MiB")
    heard = ["env", "--default-signal=HUP"]  # tests may run below nohup
    logged = log_of_serve(*arguments, prefix=heard, signals=[signal.SIGHUP])
    assert "stopping on SIGHUP\n" in logged
    assert logged.splitlines()[-1].endswith("stopped")


def test_below_nohup_a_depot_outlives_its_terminal(tmp_path: Path) -> None:
    both = [signal.SIGHUP, signal.SIGTERM]
    logged = log_of_serve("--ephemeral", "--dir", str(tmp_path), "--pool-size", "16MiB", prefix=["nohup"], signals=both)
    assert "stopping on SIGTERM\n" in logged


@needs_small_shm
def test_a_depot_in_a_small_dev_shm_warns_of_it(tmp_path: Path) -> None:
    logged = log_of_serve("--ephemeral", "--dir", str(tmp_path), prefix=IN_SMALL_SHM)
    assert "WARNING" in logged
    assert "the pool has only 50.0 MiB" in logged
    assert "--shm-size" in logged


@needs_small_shm
def test_a_pool_as_large_as_a_small_dev_shm_says_how_to_enlarge_it(tmp_path: Path) -> None:
    status, said = run("serve", "--dir", str(tmp_path), "--pool-size", "64MiB", prefix=IN_SMALL_SHM)
    assert status == 1
    assert "--shm-size" in said.splitlines()[-1]


@pytest.mark.skipif(file_system_of(Path("/var/tmp")) in MEMORY_FILE_SYSTEMS, reason="/var/tmp is not on a disk here")
def test_a_pool_on_a_disk_is_warned_of() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        logged = log_of_serve("--ephemeral", "--dir", folder, "--pool-dir", f"{folder}/pool", "--pool-size", "16MiB")
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
    expected = f"kvdepot: no depot in {depot.url}: start one with 'kvdepot serve', or name its directory by --dir"
    assert (status, said.startswith(expected)) == (1, True), said  # it also names depots of other tests


def help_of(*command: str) -> str:
    """Return the help of a command or of a group."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        make_parser().parse_args([*command, "--help"])
    return out.getvalue()


def names_in_help(*group: str) -> list[str]:
    """Return the commands of the core in a help; none if it is of a single command."""
    names = re.findall(r"^    (\w+) ", help_of(*group), re.MULTILINE)
    return [name for name in names if not any(name in known for known in KNOWN_COMMANDS.values())]


def commands(*group: str) -> Iterator[list[str]]:
    """Yield each command of a group, with a word for each of its arguments."""
    for name in names_in_help(*group):
        if names_in_help(*group, name):
            yield from commands(*group, name)
            continue
        arguments = re.search(r"^positional arguments:\n((?:  .*\n)+)", help_of(*group, name), re.MULTILINE)
        words = re.findall(r"^  (\S+)", arguments[1], re.MULTILINE) if arguments else []
        yield [*group, name, *(re.split("[{,}]", word)[1] if word.startswith("{") else "1" for word in words)]


COMMANDS = list(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_accepts_the_directory_of_a_depot(words: list[str]) -> None:
    for flag in ("--dir", "--url"):
        for given in ([flag, "/x", *words], [*words, flag, "/x"], [flag, "/other", *words, flag, "/x"]):
            assert make_parser().parse_args(given).directory == Path("/x")
    assert "directory" not in make_parser().parse_args(words), "it would hide the environment's"


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
        assert "serving" in log_of_serve("--ephemeral", flag, str(tmp_path / flag.strip("-")), "--pool-size", "4MiB")
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


def test_every_command_says_in_a_sentence_what_it_does() -> None:
    assert ["session", "retain", "1", "1"] in COMMANDS
    assert len(COMMANDS) > 20
    for words in COMMANDS:
        name: list[str] = []
        for word in words:
            if word not in names_in_help(*name):
                break
            name.append(word)
        sentence = help_of(*name).split("\n\n")[1]
        assert sentence.endswith("."), f"{name}: {sentence}"

"""`kvdepot pools` finds and frees the memory that stopped depots left behind."""

import json
import os
import time
from pathlib import Path

import pytest

from kvdepot import SchedulerClient
from kvdepot.config import ServerConfig
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import cleanup
from kvdepot.operate.cli import main
from kvdepot.operate.doctor import diagnose, read_facts
from kvdepot.pool.files import open_pool
from kvdepot.pool.inventory import find_pools, name_others
from support.peer import SPEC


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command. Return its exit status and its outputs."""
    with pytest.raises(SystemExit) as ended:
        main(["pools", *arguments])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def test_a_running_depot_keeps_its_pool_and_a_stopped_one_s_memory_is_freed(capsys: pytest.CaptureFixture[str]) -> None:
    with DepotProcess() as depot:
        path = str(depot.pool_directory)
        (listed,) = json.loads(run(capsys, path, "--json")[1])
        assert (listed["path"], listed["is_served"], listed["uid"]) == (path, True, os.getuid())
        assert listed["allocated_bytes"] >= 64 << 20
        assert str(depot.directory) in listed["server"]
        status, _, error = run(capsys, path, "--remove")
        assert (status, "in use by the depot" in error, "stop that first" in error) == (1, True, True)
        assert depot.status().pool_size_bytes == 64 << 20

        depot.kill()
        text = run(capsys, path)[1]
        assert "stopped, last used" in text
        assert str(depot.directory) in text
        assert run(capsys, path, "--remove", "--stopped")[1].startswith(f"removed {path}")
        assert not Path(path).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--remove"], "needs the PATH"), (["/nowhere"], "holds no pool"), (["/proc"], "holds no pool")],
)
def test_folders_that_are_not_pools_are_left_alone(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(capsys, *arguments)
    assert status == 1
    assert words in error


def test_pools_that_may_be_a_restarting_depot_s_stay_unless_they_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "find_pools", lambda: find_pools(tmp_path))
    for name, age in (("recent", 0), ("old", 3600)):
        files = open_pool(tmp_path / name, 1 << 20, 64, server="the depot of --dir /one")
        files.take_place()
        files.close(remove=False)
        used_at = time.time() - age
        for path in (tmp_path / name).iterdir():
            os.utime(path, (used_at, used_at))
    said = run(capsys, "--remove", "--stopped")[1]
    assert f"kept {tmp_path / 'recent'}: last used" in said
    assert [path.name for path in tmp_path.iterdir()] == ["recent"]
    assert run(capsys, str(tmp_path / "recent"), "--remove")[0] == 0
    assert not list(tmp_path.iterdir())


def test_running_depots_in_other_folders_are_named(tmp_path: Path) -> None:
    assert name_others(Path("/run/kvdepot"), tmp_path) == ""
    servers = [f"the depot of --dir /run/{n} (pid 7)" for n in range(5)]
    served = [open_pool(tmp_path / str(n), 1 << 20, 64, server=server) for n, server in enumerate(servers)]
    for files in served:
        files.take_place()
    served[4].close(remove=False)  # stopped
    assert name_others(Path("/run/2"), tmp_path) == f"; running: {servers[0]}, {servers[1]}, {servers[3]}"
    assert name_others(Path("/run"), tmp_path).endswith("/run/2 (pid 7) and 1 more")
    for files in served[:4]:
        files.close(remove=False)


def test_a_command_and_an_engine_that_look_in_the_wrong_folder_name_the_depot_that_runs(
    depot: DepotProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--dir", str(tmp_path)])
    named = "; running: the depot of --dir "  # this test's or another one's
    assert named in capsys.readouterr().err
    facts = read_facts(ServerConfig(directory=tmp_path))
    assert named in next(finding.text for finding in diagnose(facts) if finding.subject == "depot")
    client = SchedulerClient(SPEC, "lost", url=str(tmp_path))
    wait_until(lambda: caplog.records)
    client.close()
    assert "the engine runs without it until it is back" + named in caplog.text
    assert depot.url

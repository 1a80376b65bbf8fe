"""The directory of the sockets is swept while the depot runs, as a cleaner of /tmp does, and is made again."""

import os
import shutil
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.config import CONTROL_SOCKET, HTTP_TOKEN
from kvdepot.errors import DepotUnavailable
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from kvdepot.server.access import Access
from kvdepot.server.run_folder import RunFolder
from support.commands import KVDEPOT, run_kvdepot
from support.other_users import STRANGER, as_root
from support.peer import Peer, prompt

NAMES = {CONTROL_SOCKET, HTTP_TOKEN, "lock"}


@contextmanager
def serving(tmp_path: Path) -> Generator[DepotProcess]:
    """A depot with HTTP. It is no fixture: `capfd` captures only what starts in a test's body."""
    with DepotProcess("--http", "127.0.0.1:0", directory=tmp_path / "depot", pool_size="1MiB") as depot:
        wait_until(lambda: set(os.listdir(depot.directory)) >= NAMES)
        yield depot


def sweep_all(directory: Path) -> None:
    shutil.rmtree(directory)


def sweep_files(directory: Path) -> None:
    for name in NAMES:
        (directory / name).unlink()


def sweep_regular_files(directory: Path) -> None:
    """systemd-tmpfiles spares sockets that somebody listens on."""
    for name in NAMES - {CONTROL_SOCKET}:
        (directory / name).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [sweep_all, sweep_files, sweep_regular_files])
def test_a_depot_makes_its_swept_directory_again(
    tmp_path: Path, sweep: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path) as depot:
        attached = Peer(depot)
        attached.store(prompt(3))
        token = (depot.directory / HTTP_TOKEN).read_text()

        sweep(depot.directory)
        assert attached.find(prompt(3)).num_chunks == 3
        wait_until(lambda: depot.directory.exists() and set(os.listdir(depot.directory)) >= NAMES)
        new = Peer(depot)
        assert new.find(prompt(3)).num_chunks == 3
        assert attached.find(prompt(3)).num_chunks == 3
        assert (depot.directory / HTTP_TOKEN).read_text() == token
        assert [path.stat().st_mode & 0o777 for path in (depot.directory, depot.directory / CONTROL_SOCKET)] == [
            0o700,
            0o600,
        ]
        attached.close()
        new.close()
        assert f"in {depot.directory} again, as someone removed it" in capfd.readouterr().err

        second = run_kvdepot("serve", "--dir", depot.url, "--pool-size", "1MiB")
        assert f"process {depot.pid} already serves {depot.directory}" in second.stderr
        assert depot.terminate() == 0
        assert not (depot.directory / CONTROL_SOCKET).exists()


@as_root
@pytest.mark.slow
def test_a_stranger_who_makes_a_swept_directory_keeps_engines_away_and_the_log_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path) as depot:
        attached = Peer(depot)
        attached.store(prompt(3))
        depot.directory.rename(depot.directory.with_name("swept"))
        depot.directory.mkdir(mode=0o755)
        os.chown(depot.directory, STRANGER, STRANGER)
        said: list[str] = []
        wait_until(lambda: said.append(capfd.readouterr().err) or "cannot be made again" in "".join(said))
        assert f"no other engine can attach: {depot.directory} belongs to user {STRANGER}" in "".join(said)
        assert not os.listdir(depot.directory)
        with pytest.raises(DepotUnavailable):
            ask_depot(o.Status(), depot.url)
        assert attached.find(prompt(3)).num_chunks == 3

        depot.directory.rmdir()
        wait_until(depot.directory.exists)
        Peer(depot).close()
        attached.close()
        assert "cannot be made again" not in capfd.readouterr().err, "once is enough"


def test_another_depot_that_took_a_swept_directory_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, made = RunFolder(tmp_path / "depot", Access()), list[str]()
    (tmp_path / "depot" / CONTROL_SOCKET).touch()
    folder.keep(folder.control, lambda: made.append("control") or folder.control.touch())
    folder.restore()
    assert (made, caplog.messages) == ([], [])

    shutil.rmtree(tmp_path / "depot")
    second = RunFolder(tmp_path / "depot", Access())
    for _ in range(3):
        folder.restore()
    assert made == []
    (line,) = caplog.messages
    assert f"process {os.getpid()} already serves {tmp_path / 'depot'}" in line

    second.close()
    folder.restore()
    folder.restore()
    assert made == ["control"]
    assert "made lock, control.sock" in caplog.messages[1]
    folder.close()
    RunFolder(tmp_path / "depot", Access()).close()


@pytest.mark.slow
def test_a_depot_of_a_group_opens_its_swept_directory_to_the_group_again(tmp_path: Path) -> None:
    group = os.getgid()
    with DepotProcess("--socket-group", str(group), directory=tmp_path / "depot", pool_size="1MiB") as depot:
        shutil.rmtree(depot.directory)
        wait_until((depot.directory / CONTROL_SOCKET).exists)
        wait_until(lambda: (depot.directory / CONTROL_SOCKET).stat().st_mode & 0o777 == 0o660)
        assert depot.directory.stat().st_mode & 0o777 == 0o710


@pytest.mark.slow
def test_a_depot_whose_directory_is_gone_stops_as_usual(tmp_path: Path) -> None:
    """The last look at the directory may come before it was swept."""
    command = [*KVDEPOT, "serve", "--dir", str(tmp_path / "depot"), "--pool-size", "1MiB", "--ephemeral"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("serving" in line for line in process.stderr)
        (tmp_path / "depot").rename(tmp_path / "away")
        (tmp_path / "depot").write_text("a file in its place")
        process.terminate()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(30) == 0

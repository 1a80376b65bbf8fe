"""A depot that cannot start says why in one line and ends without changing anything."""

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.pool.files import open_pool
from support.commands import KVDEPOT, run_kvdepot

OCCUPY: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("somebody's"),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
}


def serve(directory: Path, *arguments: str) -> tuple[int, str]:
    pool = Path(f"/dev/shm/kvdepot-start-{os.getpid()}")
    flags = ("--pool-size", "1MiB", "--pool-dir", str(pool), "--log-level", "warning", *arguments)
    done = run_kvdepot("serve", "--dir", str(directory), *flags)
    assert not pool.exists(), "no pool is made for a depot that cannot be"
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("what", "where", "directory", "why"),
    [
        ("a file", "depot", "depot", "depot: it is there and no directory"),
        ("a file", "file", "file/depot", "depot: Not a directory"),
        ("a file", "other", "d" * 300, "File name too long"),
        ("a file", "other", "d" * 110, "bytes, a socket's path at most 107"),
        ("a file", "depot/control.sock", "depot", "control.sock exists and is not a socket"),
        ("a folder", "depot/control.sock", "depot", "control.sock exists and is not a socket"),
        ("a pipe", "depot/control.sock", "depot", "control.sock exists and is not a socket"),
        ("a folder", "depot/lock", "depot", "lock: Is a directory"),
        ("a pipe", "depot/lock", "depot", "lock is not a file"),
    ],
)
def test_a_directory_that_cannot_be_one_ends_the_start_in_one_line(
    what: str, where: str, directory: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / where).parent.mkdir(exist_ok=True)
    OCCUPY[what](tmp_path / where)
    mode = (tmp_path / where).stat().st_mode
    code, text = serve(tmp_path / directory)
    assert (code, text.count("\n")) == (1, 1)
    assert text.startswith("kvdepot: ")
    assert why in text
    assert (tmp_path / where).stat().st_mode == mode


def test_a_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "depot").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "depot" / "control.sock"))
    command = [*KVDEPOT, "serve", "--dir", str(tmp_path / "depot"), "--pool-size", "1MiB", "--ephemeral"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        if any("serving" in line for line in process.stderr):
            process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize("what", ["--http", "--events", "control.sock"])
def test_a_start_that_fails_leaves_the_cache_that_its_pool_was_to_replace(what: str, tmp_path: Path) -> None:
    folder, depot = tmp_path / "pool", tmp_path / "depot"
    files = open_pool(folder, 1 << 20, 64, server="the depot of --dir /one")
    files.take_place()
    files.close(remove=False)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    command = ["serve", "--dir", str(depot), "--pool-dir", str(folder)]
    command += ["--pool-size", "2MiB", "--log-level", "error"]  # hides the warning that tmp_path may be on a disk
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if what == "control.sock":
            (depot / what).mkdir(parents=True)
        else:
            command += [what, f"127.0.0.1:{port}" if what == "--http" else f"tcp://127.0.0.1:{port}"]
        done = run_kvdepot(*command)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before

"""Only the server's user, root and members of `--socket-group` may connect."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvdepot.config import CONTROL_SOCKET
from kvdepot.errors import ConfigError
from kvdepot.lab.processes import DepotProcess
from kvdepot.server.access import Access
from support.peer import Peer, prompt

pytestmark = pytest.mark.slow

GROUP, STRANGER = 54_321, 54_322

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users")

# Becomes another user after its imports, as that user may be unable to read this Python. Then does one of three things.
CHILD = f"""
import os, sys
from pathlib import Path
from kvdepot import KVDepotError
from kvdepot.client.connection import Connection
from kvdepot.client.operator import ask_depot
from kvdepot.server.access import Access
from kvdepot.operate import operations as o
from kvdepot.wire import messages as m
from support.peer import Peer, prompt, registration

what, directory, gid, *groups = sys.argv[1:]
os.setgroups([int(group) for group in groups])
os.setgid(int(gid))
os.setuid({STRANGER})
try:
    if what == "status":
        print(ask_depot(o.Status(), directory).status.num_entries)
    elif what == "engine":
        connection = Connection(directory, "child", registration(instance="child"), maps_pool=True)
        session = connection.wait_until_open(1.0)
        session.mapping.pool[:4] = b"mine"
        reply = connection.channel(session).call(m.Lookup(session.context, "r", prompt(3).digests), 2.0)
        print(reply.num_chunks)
        connection.close()
    else:
        Access({GROUP}).prepare_directory(Path(directory))
except KVDepotError as error:
    print(error)
"""


def as_stranger(what: str, directory: Path, gid: int = STRANGER, groups: Sequence[int] = ()) -> str:
    """Return the output of a process of another user with the primary group `gid` and the further `groups`."""
    arguments = [sys.executable, "-c", CHILD, what, str(directory), str(gid), *map(str, groups)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory inside one that every user may traverse."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-") as outer:
        Path(outer).chmod(0o711)
        (Path(outer) / "depot").mkdir(mode=0o700)
        yield Path(outer) / "depot"


def modes(directory: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in (directory, directory / CONTROL_SOCKET)]


def store(depot: DepotProcess) -> None:
    peer = Peer(depot)
    peer.store(prompt(3))
    peer.close()


@as_root
def test_members_of_the_group_are_served_and_others_are_not(directory: Path) -> None:
    with DepotProcess("--socket-group", str(GROUP), directory=directory) as depot:
        store(depot)
        assert modes(directory) == [0o710, 0o660]
        assert {path.stat().st_gid for path in (directory, *directory.glob("*.sock"))} == {GROUP}
        assert depot.pool_directory.stat().st_mode & 0o077 == 0
        for gid, groups in ((GROUP, ()), (STRANGER, (GROUP,)), (STRANGER, (*range(70_000, 70_400), GROUP))):
            assert as_stranger("engine", directory, gid, groups) == "3"
        assert as_stranger("status", directory, STRANGER, (GROUP,)) == "3"
        assert "Permission denied" in as_stranger("engine", directory)
        assert "--socket-group" in as_stranger("status", directory)


@as_root
def test_without_a_group_the_depot_is_for_its_user_and_root(directory: Path) -> None:
    with DepotProcess(directory=directory):
        assert modes(directory) == [0o700, 0o600]
        assert "Permission denied" in as_stranger("engine", directory, GROUP)
        assert "this user may not connect" in as_stranger("status", directory, GROUP)


@as_root
@pytest.mark.parametrize("flags", [(), ("--socket-group", str(GROUP))])
def test_the_kernel_is_asked_even_when_the_modes_let_everybody_in(directory: Path, flags: tuple[str, ...]) -> None:
    with DepotProcess(*flags, directory=directory):
        directory.chmod(0o755)
        (directory / CONTROL_SOCKET).chmod(0o666)
        answer = as_stranger("engine", directory, STRANGER, (STRANGER,))
        assert "closed the connection during the handshake" in answer or "reset" in answer or "Broken pipe" in answer
        if flags:
            assert as_stranger("engine", directory, STRANGER, (GROUP,)) == "0"


@as_root
def test_a_group_that_the_server_does_not_belong_to_is_refused(directory: Path) -> None:
    os.chown(directory, STRANGER, STRANGER)
    assert "be a member of that group" in as_stranger("prepare", directory)
    assert as_stranger("prepare", directory, STRANGER, (GROUP,)) == ""
    assert (directory.stat().st_mode & 0o777, directory.stat().st_gid) == (0o710, GROUP)


def test_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--socket-group no-such-group: .*groupadd no-such-group"):
        Access.of_group("no-such-group")
    assert Access.of_group("root") == Access(0)
    assert Access.of_group("54321") == Access(GROUP)


@pytest.mark.parametrize("mode", [0o711, 0o755])
def test_a_directory_that_everybody_may_pass_is_left_as_it_is(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    Access(os.getgid()).prepare_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == mode


def test_a_directory_that_is_shared_otherwise_is_refused_and_unchanged(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match=r"mode 0750.*choose another --dir"):
        Access(os.getgid() + 1).prepare_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_this_process_is_let_in_with_and_without_a_group() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert Access().why_not(ours) is None
        assert Access(GROUP).why_not(ours) is None

"""Another user plants folders, pools, links and sockets where a depot will look. Depot and clients refuse them.

The depots and engines of these tests run as root, and as a user who is neither root nor the stranger.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.config import CONTROL_SOCKET, HTTP_TOKEN, default_pool_directory
from kvdepot.errors import DepotForeign
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from kvdepot.pool.inventory import find_pools
from kvdepot.wire import messages as m
from support.commands import run_kvdepot
from support.other_users import (
    STRANGER,
    USER,
    as_root,
    end,
    log_until,
    open_place,
    run_as,
    serve_as,
    start_as,
)
from support.peer import Peer, prompt

pytestmark = [pytest.mark.slow, as_root]

# A valid, empty pool that everybody may read and write, as an earlier server's would be if it had been so careless.
POOL = """
folder = Path(sys.argv[1])
os.umask(0)
files = open_pool(folder, 1 << 20, 64, server=f"the depot of --dir {sys.argv[2]} (pid 1)")
files.take_place()
files.close(remove=False)
for path in (folder, *folder.iterdir()):
    path.chmod(0o777)
"""
FOLDER = "os.umask(0); os.mkdir(sys.argv[1], 0o777)"
PRIVATE_FOLDER = "os.mkdir(sys.argv[1], 0o755)"
LINK = "os.mkdir(sys.argv[1] + '-his'); os.symlink(sys.argv[1] + '-his', sys.argv[1])"

# A depot that serves everybody.
FAKE_DEPOT = """
Access.why_not = lambda self, connection: None
kvdepot.operate.cli.main(["serve", "--dir", sys.argv[1], "--pool-size", "1MiB", "--pool-dir", sys.argv[1] + "/p"])
"""
# A worker that writes to the pool that it is handed, or prints why it cannot attach.
ATTACH = """
connection = Connection(sys.argv[1], "engine", registration(), maps_pool=True)
try:
    session = connection.wait_until_open(float(sys.argv[2]))
    session.mapping.pool[:6] = b"SECRET"
    print("attached")
except KVDepotError as error:
    print(error)
connection.close()
"""
STATUS = """
try:
    print(ask_depot(o.Status(), sys.argv[1]).status.num_entries)
except KVDepotError as error:
    print(error)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder where everybody may make folders, like /tmp."""
    with open_place() as outer:
        outer.chmod(0o1777)
        yield outer


@pytest.fixture
def safe_place() -> Iterator[Path]:
    """A folder that only root can change, as are those above it."""
    with open_place(Path("/run")) as outer:
        yield outer


def all_below(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, mode and modification time of everything in a folder."""
    found = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {name: (status.st_ino, status.st_mode, status.st_mtime_ns) for name, status in found.items()}


def refusal(user: int, *flags: object) -> str:
    """Return the only line of a depot that refuses to start."""
    process = serve_as(user, *flags, "--pool-size", "1MiB", "--log-level", "info")
    lines = log_until(process, "serving")
    assert end(process) == 1, lines
    lines = [line for line in lines if "its pages go to disk" not in line]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.promise(87)
@pytest.mark.parametrize("user", [0, USER])
@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (POOL, f"belongs to user {STRANGER}"),
        (FOLDER, f"belongs to user {STRANGER}"),
        (PRIVATE_FOLDER, f"belongs to user {STRANGER}"),
        (LINK, f"a link that user {STRANGER} made"),
    ],
)
def test_a_depot_uses_no_pool_folder_that_a_stranger_made(place: Path, user: int, plant: str, why: str) -> None:
    """In /dev/shm, its name can be computed from the depot's user and --dir."""
    directory = place / "depot"
    pool = Path(str(default_pool_directory(directory)).replace("kvdepot-0-", f"kvdepot-{user}-"))
    his = pool.with_name(f"{pool.name}-his")
    try:
        run_as(STRANGER, plant, pool, directory)
        before = all_below(pool)
        line = refusal(user, "--dir", directory)
        assert str(pool) in line
        assert why in line
        assert "--pool-dir" in line
        assert all_below(pool) == before
    finally:
        for path in (his, pool):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


@pytest.mark.promise(87)
def test_a_depot_uses_no_file_of_a_stranger_in_its_own_pool_folder(place: Path) -> None:
    """An operator may have closed a folder that was open to all before."""
    run_as(STRANGER, POOL, place / "pool", place / "depot")
    os.chown(place / "pool", 0, 0)
    (place / "pool").chmod(0o755)
    line = refusal(0, "--dir", place / "depot", "--pool-dir", place / "pool")
    assert f"{place / 'pool' / 'pool'} belongs to user {STRANGER}" in line


@pytest.mark.promise(87)
@pytest.mark.parametrize("flag", ["--dir", "--pool-dir", "--tier"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_depot_uses_no_folder_that_others_may_write_to(place: Path, flag: str, mode: int) -> None:
    folder = place / "folder"
    folder.mkdir()
    folder.chmod(mode)
    value = f"disk://{folder}?capacity=1GiB" if flag == "--tier" else folder
    line = refusal(0, "--dir", place / "depot", "--pool-dir", place / "pool", flag, value)
    assert f"{folder} has mode {mode:04o}" in line
    assert f"choose another {flag}" in line


@pytest.mark.promise(87)
@pytest.mark.parametrize("user", [0, USER])
@pytest.mark.parametrize("flag", ["--dir", "--tier"])
@pytest.mark.parametrize(
    ("plant", "why"), [(FOLDER, f"belongs to user {STRANGER}"), (LINK, f"a link that user {STRANGER} made")]
)
def test_a_depot_uses_no_other_folder_that_a_stranger_made(
    place: Path, user: int, flag: str, plant: str, why: str
) -> None:
    folder = place / "folder"
    run_as(STRANGER, plant, folder)
    before = all_below(place)
    value = f"disk://{folder}?capacity=1GiB" if flag == "--tier" else folder
    line = refusal(user, "--dir", place / "depot", "--pool-dir", place / "pool", flag, value)
    assert str(folder) in line
    assert why in line
    assert flag in line
    assert {name: before[name] for name in before if "folder" in name} == {
        name: found for name, found in all_below(place).items() if "folder" in name
    }


def make_link(lock: Path, victim: Path) -> None:
    lock.symlink_to(victim)


def make_file(lock: Path, _victim: Path) -> None:
    lock.touch()
    os.chown(lock, STRANGER, STRANGER)


@pytest.mark.parametrize("user", [0, USER])
def test_a_link_that_the_operator_made_is_followed(place: Path, user: int) -> None:
    run_as(user, "os.mkdir(sys.argv[1] + '-real', 0o700); os.symlink('pool-real', sys.argv[1])", place / "pool")
    depot = serve_as(user, "--dir", place / "depot", "--pool-dir", place / "pool", "--pool-size", "1MiB")
    assert "serving" in log_until(depot, "serving")[-1]
    end(depot)
    assert (place / "pool-real" / "index").exists()


@pytest.mark.parametrize(
    ("plant", "why"),
    [(make_link, "lock: Too many levels of symbolic links"), (make_file, f"lock belongs to user {STRANGER}")],
)
def test_a_lock_that_a_stranger_left_is_neither_written_nor_used(
    place: Path, plant: Callable[[Path, Path], None], why: str
) -> None:
    (place / "victim").write_text("precious")
    (place / "depot").mkdir(mode=0o700)
    plant(place / "depot" / "lock", place / "victim")
    assert why in refusal(0, "--dir", place / "depot", "--pool-dir", place / "pool")
    assert (place / "victim").read_text() == "precious"


# --- the clients' side ----------------------------------------------------------------------------------------------


@pytest.mark.promise(87)
@pytest.mark.parametrize("user", [0, USER])
def test_neither_an_engine_nor_an_operator_talks_to_a_depot_of_a_stranger(place: Path, user: int) -> None:
    """He made the folder that /tmp would have for this user, and hands every engine memory that he can read."""
    directory = place / f"kvdepot-{user}"
    fake = start_as(STRANGER, FAKE_DEPOT, directory)
    try:
        assert "serving" in log_until(fake, "serving")[-1]
        directory.chmod(0o755)
        (directory / CONTROL_SOCKET).chmod(0o666)
        for said in (run_as(user, ATTACH, directory, 1.0), run_as(user, STATUS, directory)):
            assert f"user {STRANGER} answers at {directory / CONTROL_SOCKET}" in said
            assert f"as they can write to {place}" in said
        assert run_as(STRANGER, STATUS, directory) == "0", "it is a depot"
    finally:
        end(fake)


@pytest.mark.promise(87)
def test_a_stranger_who_takes_the_socket_s_name_gets_no_request_and_the_depot_takes_it_back(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with DepotProcess(directory=place / "depot") as depot:
        peer = Peer(depot)
        peer.store(prompt(1))
        depot.directory.chmod(0o777)  # by a careless operator, as no depot starts in such a folder
        thief = start_as(
            STRANGER,
            "path = sys.argv[1]; os.rename(path, path + '-away')\n"
            "taken = socket.socket(socket.AF_UNIX); taken.bind(path); taken.listen(); os.chmod(path, 0o777)\n"
            "print('bound', flush=True); sys.stdin.read()",
            depot.directory / CONTROL_SOCKET,
        )
        assert log_until(thief, "bound") == ["bound"]
        # He keeps the name until its folder is closed: the depot makes nothing in a folder of everybody's.
        said = f"user {STRANGER} answers at {depot.directory / CONTROL_SOCKET}, and the folder belongs to user 0"
        for ask in (
            lambda: ask_depot(o.Status(), depot.url),
            lambda: peer.connection.channel(peer.session).call(m.Lookup(peer.context, "r", prompt(1).digests), 2.0),
        ):
            with pytest.raises(DepotForeign, match=said):
                ask()
        wait_until(lambda: "cannot be made again" in "".join(capfd.readouterr()))
        assert peer.find(prompt(1)).num_chunks == 1, "an attached engine is served"

        depot.directory.chmod(0o700)
        wait_until(lambda: (depot.directory / CONTROL_SOCKET).stat().st_uid == 0)
        Peer(depot).close()
        peer.close()
        end(thief)


@pytest.mark.promise(87)
def test_the_owner_of_the_sockets_folder_counts_where_nobody_else_could_have_made_it(safe_place: Path) -> None:
    """A root shell, or a member of --socket-group, talks to a depot of another user in /run, not in /tmp."""
    os.chown(safe_place, USER, USER)
    depot = serve_as(USER, "--dir", safe_place / "depot", "--pool-dir", safe_place / "pool", "--pool-size", "1MiB")
    try:
        assert "serving" in log_until(depot, "serving")[-1]
        assert run_as(0, STATUS, safe_place / "depot") == "0"
        assert run_as(0, ATTACH, safe_place / "depot", 10.0) == "attached"

        (safe_place / "link").symlink_to("depot")
        said = run_as(0, STATUS, safe_place / "link")
        assert f"contains links: name the folder {safe_place / 'depot'}" in said

        os.chown(safe_place, STRANGER, STRANGER)
        assert f"as they can write to {safe_place}" in run_as(0, STATUS, safe_place / "depot")
        os.chown(safe_place, 0, 0)
        safe_place.chmod(0o775)
        assert f"as they can write to {safe_place}" in run_as(0, STATUS, safe_place / "depot")
        safe_place.chmod(0o755)
        assert run_as(0, STATUS, safe_place / "depot") == "0"
    finally:
        end(depot)


# --- what another user can reach ------------------------------------------------------------------------------------

# Tries to read, write and list each path, and prints those where it could.
TRY = """
for path in sys.stdin.read().splitlines():
    for how, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            print(how, path)
        except OSError:
            pass
    try:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        print("connect", path)
    except OSError:
        pass
"""


@pytest.mark.promise(87)
def test_another_user_opens_nothing_that_a_depot_makes(place: Path) -> None:
    tier = place / "tier"
    with DepotProcess(
        "--tier",
        f"disk://{tier}?capacity=1GiB",
        "--http",
        "127.0.0.1:0",
        "--events",
        f"ipc://{place}/depot/events",
        directory=place / "depot",
        pool_size="1MiB",
    ) as depot:
        peer = Peer(depot)
        peer.store(prompt(3))
        peer.close()
        wait_until(lambda: sum(path.is_file() for path in tier.rglob("*")) == 3)
        made = [path for top in (depot.directory, depot.pool_directory, tier) for path in (top, *top.rglob("*"))]
        names = {path.name for path in made}
        assert names >= {CONTROL_SOCKET, HTTP_TOKEN, "lock", "pool", "index", "names", "tokens", "sessions"}
        assert run_as(STRANGER, TRY, given="\n".join(map(str, made))) == ""


@pytest.mark.promise(87)
def test_the_command_pools_takes_no_stranger_s_pool_for_the_user_s(place: Path) -> None:
    planted = Path("/dev/shm") / f"kvdepot-{place.name}"
    try:
        run_as(STRANGER, POOL, planted, place / "depot")
        (place / "depot").mkdir()
        old = time.time() - 3600
        for path in planted.iterdir():
            os.utime(path, (old, old))
        (found,) = (pool for pool in find_pools() if pool.directory == planted)
        assert (found.is_own, found.uid) == (False, STRANGER)

        assert "no pools" in run_kvdepot("pools", "--dir", str(place / "depot")).stdout
        listed = run_kvdepot("pools", str(planted)).stdout
        assert ", not yours" in listed
        assert "says: stopped" in listed
        said = run_kvdepot("pools", "--dir", str(planted), "--remove", "--stopped").stdout
        assert "0 B freed" in said
        assert len(list(planted.iterdir())) == 3

        os.chown(planted, 0, 0)  # as an operator does who takes a folder over and forgets the files in it
        planted.chmod(0o700)
        (found,) = (pool for pool in find_pools() if pool.directory == planted)
        assert not found.is_own
        said = run_kvdepot("pools", "--dir", str(place / "depot"), "--remove", "--stopped").stdout
        assert f"kept {planted}: it is another user's" in said
        assert run_kvdepot("pools", str(planted), "--remove").returncode == 0
        assert not planted.exists()
    finally:
        shutil.rmtree(planted, ignore_errors=True)

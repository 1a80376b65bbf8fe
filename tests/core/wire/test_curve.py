"""Key files: made once, never overwritten, and errors that say what to do."""

from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from kvdepot.config import ServerConfig
from kvdepot.errors import ConfigError
from kvdepot.wire.curve import KeyPair, generate_keys, load_allowed, load_pair, load_public


def test_a_pair_is_a_public_file_and_a_secret_one_that_only_its_user_reads(tmp_path: Path) -> None:
    public, secret = generate_keys(tmp_path / "keys", "node-7")
    assert (public.name, secret.name) == ("node-7.key", "node-7.key_secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    pair = load_pair(secret, "--flag")
    assert load_public(public, "--flag") == pair.public == zmq.curve_public(pair.secret)
    assert pair.secret not in public.read_bytes()
    assert pair.secret.decode() not in repr(pair)


def test_keys_are_read_by_other_tools_and_theirs_by_us(tmp_path: Path) -> None:
    from zmq.auth import create_certificates, load_certificate  # pyright: ignore[reportUnknownVariableType]

    _, secret = generate_keys(tmp_path, "ours")
    pair = load_pair(secret, "--flag")
    assert load_certificate(secret) == (pair.public, pair.secret)
    theirs = Path(create_certificates(tmp_path, "theirs")[1])
    theirs.chmod(0o600)
    assert load_pair(theirs, "--flag") == KeyPair(*load_certificate(theirs))  # type: ignore[arg-type]


@pytest.mark.parametrize("there", ["a.key", "a.key_secret"])
def test_keys_are_never_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(ConfigError, match="is not overwritten: choose another --name"):
        generate_keys(tmp_path, "a")
    assert (tmp_path / there).read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize("name", ["", "../a", ".hidden", "a/b", "a b", "ä"])
def test_a_name_that_could_be_another_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a key's name"):
        generate_keys(tmp_path, name)


def test_a_key_that_cannot_work_is_an_error_that_names_flag_file_and_way_out(tmp_path: Path) -> None:
    public, secret = generate_keys(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"--flag .*a\.key holds a public key only: .*key_secret"):
        load_pair(public, "--flag")
    with pytest.raises(ConfigError, match=r"is not there: .*kvdepot keys generate"):
        load_pair(tmp_path / "b", "--flag")
    with pytest.raises(ConfigError, match="is a folder"):
        load_public(tmp_path, "--flag")
    other = load_pair(generate_keys(tmp_path, "b")[1], "--flag").public.decode()
    secret.write_text(secret.read_text().replace(load_public(public, "--flag").decode(), other))
    with pytest.raises(ConfigError, match="does not belong"):
        load_pair(secret, "--flag")


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    _, secret = generate_keys(tmp_path, "a")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 0644.*chmod 600"):
        load_pair(secret, "--flag")


@pytest.mark.parametrize("text", ["", "no key", 'public-key = "short"', f'public-key = "{"~" * 40}"', "\0" * 100])
def test_a_damaged_list_of_clients_is_refused(tmp_path: Path, text: str) -> None:
    generate_keys(tmp_path, "good")
    (tmp_path / "bad.key").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.key holds no CURVE key"):
        load_allowed(tmp_path, "--curve-clients")


def test_clients_are_listed_by_a_folder_or_a_file_and_an_empty_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nobody could be served"):
        load_allowed(tmp_path, "--curve-clients")
    public, _ = generate_keys(tmp_path, "a")
    generate_keys(tmp_path, "b")
    assert set(load_allowed(tmp_path, "--curve-clients").values()) == {"a", "b"}
    assert load_allowed(public, "--curve-clients") == {z85.decode(load_public(public, "--flag")): "a"}


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://0.0.0.0:7000", "off loopback"),
        ("tcp://*:7000", "off loopback"),
        ("tcp://[::]:7000", "off loopback"),
        ("tcp://192.0.2.1:7000", "off loopback"),
        ("tcp://127.0.0.1:7000", "any user of this machine"),
        ("tcp://[::1]:7000", "any user of this machine"),
    ],
)
def test_tcp_without_keys_is_refused_whatever_the_address(endpoint: str, reason: str) -> None:
    for secret, clients in ((None, None), (Path("a"), None), (None, Path("a"))):
        with pytest.raises(ConfigError, match=rf"--curve-secret and --curve-clients.*{reason}.*keys generate"):
            ServerConfig(listen=(endpoint,), curve_secret=secret, curve_clients=clients)


@pytest.mark.parametrize("endpoint", ["udp://127.0.0.1:1", "127.0.0.1:1", "ipc://@abstract", "ipc://*", "ipc://"])
def test_endpoints_that_nothing_guards_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        ServerConfig(listen=(endpoint,), curve_secret=Path("a"), curve_clients=Path("a"))


def test_keys_that_would_not_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="add --listen tcp://HOST:PORT"):
        ServerConfig(curve_secret=Path("a"), curve_clients=Path("a"))

"""Settings, and errors that name the flag."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.config import (
    ServerConfig,
    default_directory,
    default_pool_directory,
    directory_of_url,
    format_size,
    is_hinted,
    parse_hint,
    parse_number,
    parse_size,
)
from kvdepot.errors import ConfigError
from kvdepot.index.eviction import POLICIES
from kvdepot.pool.size import resolve_pool_size
from kvdepot.wire.messages import Verify


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512M", 512 << 20),
        ("1.5g", 3 << 29),
        ("4096", 4096),
        ("1 KiB", 1024),
        ("2TB", 2 << 40),
        ("0", 0),
        ("9007199254740993", 9007199254740993),
        ("0.7K", 716),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "4 apples", "4GiBi", "1e9", "0x10", "9" * 400, "9" * 5000, "1." + "0" * 5000]
)
def test_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@pytest.mark.parametrize(("text", "number"), [("0.5", 0.5), ("-3", -3.0), ("1e9", 1e9)])
def test_numbers_are_read(text: str, number: float) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["inf", "-inf", "Infinity", "nan", "1e300", "9" * 400, "2e9", "", "five"])
def test_text_that_is_not_a_finite_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of at most 1,000,000,000"):
        parse_number(text)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, 0.0, -1.0])
@pytest.mark.parametrize(
    ("field", "flag", "most"),
    [
        ("lease_seconds", "--lease-seconds", "1,000,000,000"),
        ("promotion_seconds", "--promote-seconds", "60"),
        ("mover_start_seconds", "--mover-start-seconds", "1,000,000,000"),
        ("move_seconds", "--move-seconds", "1,000,000,000"),
    ],
)
def test_seconds_that_no_clock_can_count_are_refused(field: str, flag: str, most: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"{flag} .*: give a number above 0, at most {most}"):
        replace(ServerConfig(), **{field: seconds})


def test_choices_are_those_of_the_code_that_is_chosen() -> None:
    hints = get_type_hints(ServerConfig)
    assert sorted(get_args(hints["policy"])) == sorted(POLICIES)
    assert [*get_args(hints["verify"])] == [*Verify]


def test_a_part_of_a_byte_is_no_size() -> None:
    assert parse_size("5.5KiB") == 5632
    with pytest.raises(ConfigError, match=r"'5\.5' is not a whole number of bytes: write for example 5\.5GiB"):
        parse_size("5.5")


@given(st.integers(0, 1 << 50))
def test_a_size_is_written_so_that_it_can_be_read(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 0.06


def test_the_default_directory_is_below_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kvdepot-tests-" in str(default_directory()), "tests must not reach a depot of their user"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_directory() == Path("/run/user/7/kvdepot")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(default_directory()).startswith("/tmp/kvdepot-")


@pytest.mark.parametrize("url", ["/some/where", "ipc:///some/where", "ipc:///some/where/control.sock"])
def test_a_depot_is_named_by_its_directory(url: str) -> None:
    assert directory_of_url(url) == Path("/some/where")


def test_a_depot_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared memory"):
        directory_of_url("tcp://somewhere:1")


def test_the_pool_of_a_directory_is_always_in_the_same_place() -> None:
    assert default_pool_directory(Path("/a")) == default_pool_directory(Path("/a"))
    assert default_pool_directory(Path("/a")) != default_pool_directory(Path("/b"))


def test_a_pool_that_does_not_fit_is_an_error_that_names_size_flag_and_way_out(tmp_path: Path) -> None:
    config = ServerConfig(tmp_path, pool_directory=tmp_path / "pool", pool_size_bytes=1 << 60)
    with pytest.raises(ConfigError, match=r"--pool-size 1048576\.0 TiB .* lower --pool-size"):
        resolve_pool_size(config)
    with pytest.raises(ConfigError, match="at least 1 MiB"):
        resolve_pool_size(replace(config, pool_size_bytes=1000))
    assert not (tmp_path / "pool").exists()


@pytest.mark.parametrize(("page_bytes", "rest"), [(4096, 3 * 4096), (65536, 0)])
def test_a_pool_is_whole_pages_of_the_machine(
    page_bytes: int, rest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmap.PAGESIZE", page_bytes)
    config = ServerConfig(tmp_path, pool_directory=tmp_path / "pool", pool_size_bytes=(4 << 20) + 3 * 4096 + 5)
    assert resolve_pool_size(config) == (4 << 20) + rest


def test_an_earlier_pool_in_the_same_place_counts_as_room(tmp_path: Path) -> None:
    config = ServerConfig(tmp_path, pool_directory=tmp_path, pool_size_bytes=(4 << 20) + 5)
    assert resolve_pool_size(config) == 4 << 20


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        (
            "10.0.*.*:9461",
            ["10.0.3.17:9461", "tcp://10.0.3.17:9461"],
            ["10.1.3.17:9461", "10.0.3.17:22", "10.0.3:9461"],
        ),
        ("depot-*:9461", ["depot-7:9461"], ["depot-:9461", "depot-x.stranger.net:9461", "a.depot-7:9461"]),
        ("*.depots:*", ["a.depots:1"], ["a.b.depots:1", "a.depots:", "axdepots:1", ".depots:1"]),
        ("tcp://[fd00::*]:9461", ["[fd00::7]:9461"], ["[fd00::7:1]:9461", "[fe80::7]:9461"]),
    ],
)
def test_a_pattern_of_peers_matches_parts_of_a_name_and_never_another_domain(
    pattern: str, names: list[str], others: list[str]
) -> None:
    patterns = ["127.0.0.1:1", parse_hint(pattern)]
    assert [name for name in names + others if is_hinted(name, patterns)] == names


@pytest.mark.parametrize("text", ["*", "10.0.*.*", ":9461", "node:http", ""])
def test_a_pattern_that_is_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        parse_hint(text)


def test_hints_need_the_token_of_the_peers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--peer-hints need --peer-token"):
        ServerConfig(tmp_path, peer_hints=("node-*:9461",))

"""Settings by flag, environment and file: their order, and the texts of errors."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.errors import ConfigError, DepotUnavailable
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.logs import JsonFormatter
from kvdepot.operate import operations as o
from kvdepot.operate.cli import main, make_parser
from kvdepot.operate.serve import read_configs
from support.commands import KVDEPOT


def parsed(flags: list[str], environment: dict[str, str], file: Path | None = None) -> dict[str, object]:
    flags = [*flags, *(["--config", str(file)] if file else [])]
    process, config = read_configs(vars(make_parser().parse_args(["serve", *flags])), environment)
    return asdict(process) | asdict(config)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvdepot.toml"
    path.write_text(
        'pool_size = "8GiB"\nlease_seconds = 20\nephemeral = true\nverify = "all"\n'
        'tier = ["disk:///a", "s3://b"]\nlog-format = "json"\n[quota]\nacme = "1GiB"\nresearch = "2GiB"\n'
    )
    return path


def test_a_file_says_what_flags_would(file: Path) -> None:
    options = parsed([], {}, file)
    assert (options["pool_size_bytes"], options["lease_seconds"], options["ephemeral"]) == (8 << 30, 20.0, True)
    assert options["tiers"] == ("disk:///a", "s3://b")
    assert options["quotas"] == {"acme": 1 << 30, "research": 2 << 30}
    assert (options["verify"], options["log_format"]) == ("all", "json")


@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvdepot.toml"
    path.write_text(f"lease_seconds = {value}\n")
    with pytest.raises(ConfigError, match=r"lease_seconds: '(inf|nan)' is not a number"):
        parsed([], {}, path)
    with pytest.raises(ConfigError, match=r"KVDEPOT_MOVE_SECONDS: .* is not a number"):
        parsed([], {"KVDEPOT_MOVE_SECONDS": value})
    for command in (
        ["serve", "--lease-seconds"],
        ["serve", "--promote-seconds"],
        ["serve", "--mover-start-seconds"],
        ["serve", "--move-seconds"],
        ["session", "retain", "agent"],
        ["drain", "--wait"],
        ["top", "--interval"],
    ):
        with pytest.raises(SystemExit):
            make_parser().parse_args([*command, value])
        assert "is not a number of at most" in capsys.readouterr().err


def test_flags_come_before_the_environment_before_the_file(file: Path) -> None:
    environment = {"KVDEPOT_POOL_SIZE": "4GiB", "KVDEPOT_TIER": "disk:///c disk:///d", "KVDEPOT_EPHEMERAL": "no"}
    options = parsed([], environment, file)
    assert (options["pool_size_bytes"], options["tiers"], options["ephemeral"]) == (
        4 << 30,
        ("disk:///c", "disk:///d"),
        False,
    )
    options = parsed(["--pool-size", "2GiB", "--tier=disk:///e"], environment, file)
    assert (options["pool_size_bytes"], options["tiers"]) == (2 << 30, ("disk:///e",))
    assert options["lease_seconds"] == 20.0, "what nobody above it says stays"


def test_the_environment_may_name_the_file(file: Path) -> None:
    assert parsed([], {"KVDEPOT_CONFIG": str(file)})["pool_size_bytes"] == 8 << 30
    assert parsed([], {"PATH": "/bin"})["pool_size_bytes"] is None


def test_a_variable_that_is_none_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    parsed([], {"KVDEPOT_POOLSIZE": "4GiB"})
    assert "ignoring the unknown variable KVDEPOT_POOLSIZE (did you mean KVDEPOT_POOL_SIZE?)" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('pool_sise = "1GiB"', "no setting 'pool_sise'; 'pool_size' is one"),
        ('pool_size = "big"', r"kvdepot.toml: pool_size: .*is not a size"),
        ("pool_size = true", "neither a text nor a number"),
        ('ephemeral = "maybe"', "neither true nor false"),
        ("ephemeral = 3", "neither true nor false"),
        ('verify = "twice"', "give one of off, sample, all"),
        ('tier = "disk:///a"', "is not a list"),
        ("tier = [[]]", "neither a text nor a number"),
        ('quota = ["acme"]', "TENANT=SIZE"),
        ('lease_seconds = "long"', "lease_seconds"),
        ("pool_size = ", "Invalid value"),
        ('config = "other.toml"', "no setting 'config'"),
    ],
)
def test_values_that_a_flag_would_not_take_are_refused_with_their_place(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "kvdepot.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        parsed([], {}, tmp_path / "kvdepot.toml")


def test_a_file_that_is_not_there_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(tmp_path / "nowhere.toml")])
    assert ended.value.code == 1
    assert "nowhere.toml" in capsys.readouterr().err


def test_a_depot_runs_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "kvdepot.toml").write_text('lease_seconds = 7\npolicy = "arc"\nquota = {acme = "1MiB"}\n')
    with DepotProcess("--config", str(tmp_path / "kvdepot.toml")) as depot:
        reply = ask_depot(o.Configuration(), depot.url)
    assert isinstance(reply, o.ConfigurationReply)
    assert reply.settings["lease_seconds"] == 7
    assert reply.settings["policy"] == "arc"
    assert reply.settings["quota"] == {"acme": 1 << 20}


def test_logs_as_json_are_one_object_a_line(tmp_path: Path) -> None:
    flags = ("--dir", str(tmp_path), "--pool-dir", str(tmp_path / "pool"), "--pool-size", "1MiB", "--ephemeral")
    with subprocess.Popen(
        [*KVDEPOT, "serve", *flags, "--log-format", "json"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines: list[dict[str, str]] = []
        for text in process.stderr:
            lines.append(json.loads(text))
            if lines[-1]["message"].startswith("serving"):
                process.terminate()
        assert process.wait(30) == 0
    assert all(set(line) == {"time", "level", "logger", "message"} for line in lines)
    assert lines[-1]["level"] == "info"
    assert any("stopped" in line["message"] for line in lines)


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("kvdepot", logging.ERROR, "", 1, "it %s", ("failed",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed"
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_the_file_in_the_docs_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/operating.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "kvdepot.toml").write_text(block)
    options = parsed([], {}, tmp_path / "kvdepot.toml")
    assert options["http"] == "127.0.0.1:9460"
    assert options["quotas"] == {"acme": 16 << 30}


@pytest.mark.slow
def test_the_output_of_config_starts_a_depot_with_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn", reason="pip install 'kvdepot[http]'")

    def printed(depot: DepotProcess) -> str:
        with pytest.raises(SystemExit):
            main(["config", "--url", depot.url])
        return capsys.readouterr().out

    arguments = ["--quota", "acme=3MiB", "--tier", "memory://one?capacity=8MiB", "--demote-min-tokens", "128"]
    with DepotProcess(*arguments, "--http", "127.0.0.1:0", "--promote-seconds", "0.5") as depot:
        before = printed(depot)
        settings = tmp_path / "kvdepot.toml"
        settings.write_text(before)
        assert depot.terminate() == 0
        with subprocess.Popen([*KVDEPOT, "serve", "--config", str(settings)], stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: is_answering(depot))
            after = printed(depot)
            process.terminate()
            assert process.wait(20) == 0
    assert after == before
    for line in ('pool_size = "64MiB"', 'quota = {"acme" = "3MiB"}', 'http = "127.0.0.1:0"', "promote_seconds = 0.5"):
        assert line in before.splitlines()


def is_answering(depot: DepotProcess) -> bool:
    try:
        return bool(ask_depot(o.Status(), depot.url))
    except DepotUnavailable:
        return False

"""Commands of other distributions, beside those of the core."""

import argparse
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.installing import install_line
from kvdepot.operate import extensions
from kvdepot.operate.cli import main, make_parser

Add = Callable[[Any, argparse.ArgumentParser, argparse.ArgumentParser], None]


def install(monkeypatch: pytest.MonkeyPatch, of_group: str = extensions.ENTRY_POINT_GROUP, **commands: Add) -> None:
    """Install these commands, and no others."""

    def entry_points(*, group: str) -> list[SimpleNamespace]:
        if group != of_group:
            return []
        return [SimpleNamespace(name=name, value="it", load=partial(commands.get, name)) for name in commands]

    monkeypatch.setattr(extensions, "entry_points", entry_points)


def say_hello(_options: argparse.Namespace) -> int:
    return 7


def add_hello(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    hello = commands.add_parser("hello", parents=[common, json_output])
    hello.set_defaults(run=say_hello)


def test_a_command_of_another_distribution_runs_beside_those_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, hello=add_hello)
    with pytest.raises(SystemExit) as ended:
        main(["hello", "--json"])
    assert ended.value.code == 7
    assert make_parser().parse_args(["backends"]).json is False


def test_a_command_of_another_distribution_may_be_below_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "kvdepot.commands.tier", hello=add_hello)
    assert make_parser().parse_args(["tier", "hello"]).run(None) == 7
    with pytest.raises(SystemExit):
        make_parser().parse_args(["hello"])


def test_a_distribution_that_is_broken_costs_its_own_command_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("no module 'abc'")

    def add_status_again(commands: Any, *_: argparse.ArgumentParser) -> None:
        commands.add_parser("status")

    install(monkeypatch, broken=broken, status=add_status_again, hello=add_hello)
    parser = make_parser()
    assert parser.parse_args(["hello"]).run(None) == 7
    assert parser.parse_args(["status"]).log_level == "warning"
    assert "leaving out the command broken (it): ImportError(\"no module 'abc'\")" in caplog.text
    assert "leaving out the command status (it): " in caplog.text


@pytest.mark.parametrize("command", ["replay", "tier cost"])
@pytest.mark.parametrize("arguments", [["TRACE", "--simulate"], ["--requests", "3", "TRACE"], ["--help"], []])
def test_a_known_command_that_is_not_installed_names_the_command_that_adds_it(
    command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *arguments])
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", f"kvdepot: kvdepot {command} needs a package: {install_line('plan')}\n")

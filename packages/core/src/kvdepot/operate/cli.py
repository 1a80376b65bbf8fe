"""The `kvdepot` command: parses its arguments and runs one subcommand."""

import argparse
import difflib
import logging
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from kvdepot.backends import list_backends
from kvdepot.config import ServerConfig, format_size, parse_size
from kvdepot.errors import ConfigError, KVDepotError, RemoteError, describe_os_error, printable
from kvdepot.logs import set_up_logs
from kvdepot.operate.cleanup import add_pools
from kvdepot.operate.commandline import ASKS_NO_DEPOT, add_settings, as_argument, show
from kvdepot.operate.commands import add_commands
from kvdepot.operate.extensions import add_extensions
from kvdepot.operate.serve import add_serve, run_serve
from kvdepot.operate.sizing import VALUE_BYTES, size_model
from kvdepot.operate.status import add_status

logger = logging.getLogger(__name__)

_SETTINGS_OF_DOCTOR: Final = ("directory", "pool_size_bytes", "pool_directory")


class _Parser(argparse.ArgumentParser):
    """Report wrong arguments in one line, with the command or flag that was probably meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse. Refuse unknown arguments here: argparse leaves them to the parser above, which has other flags."""
        self._given = args or ()
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        flags = re.findall(r"--[a-z][\w-]*", self.format_help())
        for given in self._given:  # first, as a mistyped flag can also leave a required argument out
            flag = given.partition("=")[0]
            if flag.startswith("--") and not any(each.startswith(flag) for each in flags):
                message = f"there is no flag {flag}" + _meant(flag, flags)
                break
        else:
            wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
            if wrong and (meant := _meant(wrong[1], re.findall(r"[\w.-]+", wrong[2]))):
                message = f"{message[: wrong.start(2) - len(' (choose from ')]}{meant}"
        self.exit(2, f"{self.prog}: {message} (see '{self.prog} --help')\n")


def _meant(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Exit with 0, 1 (failed, with one line that says why) or 2 (wrong arguments)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not arguments:
            make_parser().print_help()
            sys.exit(2)
        options = make_parser().parse_args(arguments)
        if options.run is not run_serve:
            set_up_logs(options.log_level)
        status = options.run(options)
    except RemoteError as error:
        print(f"kvdepot: {error.reason}", file=sys.stderr)
        status = 1
    except KVDepotError as error:
        print(f"kvdepot: {printable(str(error))}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 0
    except OSError as error:  # wrong path or address from the user
        logger.debug("%s", error, exc_info=True)
        print(f"kvdepot: {printable(describe_os_error(error))}", file=sys.stderr)
        status = 1
    sys.exit(status)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    place = _Parser(add_help=False)
    add_settings(place, ServerConfig, ("directory",))
    parser = _Parser(
        prog="kvdepot",
        parents=[place],
        description="Run one server per node that keeps the KV caches of all inference engines there.",
    )
    parser.add_argument("--version", action="version", version=f"kvdepot {version('kvdepot')}")
    common = _Parser(add_help=False, parents=[place])
    common.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="lowest level to log to standard error (default %(default)s)",
    )
    json_output = _Parser(add_help=False)
    json_output.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_serve(commands)
    add_status(commands, common, json_output)
    add_commands(commands, common, json_output)
    add_pools(commands, common, json_output)

    backends = commands.add_parser(
        "backends",
        parents=[common, json_output],
        help="list accelerator backends",
        description="List the installed accelerator backends, and say whether each is usable here.",
        epilog=ASKS_NO_DEPOT,
    )
    backends.set_defaults(run=_backends)

    doctor = commands.add_parser(
        "doctor",
        parents=[common, json_output],
        help="check this machine for problems",
        description="Check the kernel, memory, limits and packages of this machine, and say what to change. Exits with"
        " 1 if something keeps a depot from working.",
    )
    doctor.set_defaults(run=_doctor)
    add_settings(doctor, ServerConfig, _SETTINGS_OF_DOCTOR[1:])

    sizing = commands.add_parser(
        "sizing",
        parents=[common, json_output],
        help="bound the size of a model's tokens",
        description="Compute from a model's config.json how much a token takes at most, and how many tokens a pool"
        " holds at least. 'kvdepot status' is exact while an engine is attached.",
        epilog=ASKS_NO_DEPOT,
    )
    sizing.set_defaults(run=_sizing)
    sizing.add_argument("model", type=Path, metavar="MODEL_CONFIG.json", help="the model's config.json, or its folder")
    sizing.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *VALUE_BYTES),
        default="auto",
        help="dtype of the cache (default auto: as vLLM and SGLang choose it)",
    )
    sizing.add_argument(
        "--pool-size", type=as_argument(_pool_size), metavar="SIZE", default=64 << 30, help="size (default 64GiB)"
    )

    add_extensions(commands, common, json_output)
    return parser


def _backends(options: argparse.Namespace) -> int:
    found = list_backends()
    lines = [
        f"{each.name:6} {each.distribution or '-':20}"
        f" {each.why_unavailable or 'usable (' + ', '.join(each.capabilities) + ')'}"
        for each in found
    ]
    show(options, msgspec.to_builtins(found), lambda: "\n".join(lines))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from kvdepot.operate.doctor import Verdict, diagnose, read_facts

    config = ServerConfig(**{name: getattr(options, name) for name in _SETTINGS_OF_DOCTOR if name in options})
    findings = diagnose(read_facts(config))
    lines: list[str] = []
    for finding in findings:
        mark = "" if finding.verdict is Verdict.FINE else f"{finding.verdict.upper()}: "
        lines.append(printable(f"{finding.subject:13} {mark}{finding.text}"))
        if finding.way_out:
            lines.append(printable(f"{'':13} -> {finding.way_out}"))
    show(options, msgspec.to_builtins(findings), lambda: "\n".join(lines))
    return any(finding.verdict is Verdict.BROKEN for finding in findings)


def _pool_size(text: str) -> int:
    size = parse_size(text)
    if size < 1 << 20:  # 64 for 64GiB, for example
        raise ConfigError(f"{format_size(size)} is too small for a pool: write for example 64GiB")
    return size


def _sizing(options: argparse.Namespace) -> int:
    sizing = size_model(options.model, options.kv_cache_dtype)
    show(options, sizing.as_dict(options.pool_size), lambda: sizing.describe(options.pool_size))
    return 0

"""Settings of `kvdepot serve` from a file and from the environment, as if they were flags.

One precedence: a flag, the environment (`KVDEPOT_POOL_SIZE`), the file (`pool_size = "8GiB"`), the default. A higher
place replaces what a lower one says, lists included. Every value goes through the same checks as its flag, and an error
names where it came from.
"""

import argparse
import difflib
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvdepot.errors import ConfigError, KVDepotError

logger = logging.getLogger(__name__)

PREFIX: Final = "KVDEPOT_"
CONFIG_FLAG: Final = "--config"

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


def with_settings(
    arguments: Sequence[str], actions: Sequence[argparse.Action], environment: Mapping[str, str]
) -> list[str]:
    """Return the flags of `kvdepot serve` with those that the environment and the file add before them.

    Args:
        arguments: what was given as flags.
        actions: of the parser, without abbreviations.
        environment: of the process.

    Raises:
        ConfigError: the file cannot be read, has a key that is none, or a value that its flag does not take.
    """
    by_name = {action.option_strings[0].removeprefix("--").replace("-", "_"): action for action in actions}
    given = {name for name, action in by_name.items() if _is_given(arguments, action)}
    known = {PREFIX + name.upper() for name in by_name}
    added: list[str] = []
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX).lower()
        if variable in known and name not in given:
            added += _flags_of(by_name[name], _split(by_name[name], environment[variable]), variable)
            given.add(name)
        elif variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, 1)
            logger.warning("%s is no setting%s", variable, f", {close[0]} is" if close else "")
    path = _file_of(arguments) or environment.get(PREFIX + "CONFIG")
    for name, value in _read(path).items() if path else ():
        name = name.replace("-", "_")
        if name not in by_name or name == "config":
            close = difflib.get_close_matches(name, by_name, 1)
            raise ConfigError(f"{path}: no setting {name!r}" + (f"; {close[0]!r} is one" if close else ""))
        if name not in given:
            added += _flags_of(by_name[name], value, f"{path}: {name}")
    return [*added, *arguments]


def _is_given(arguments: Sequence[str], action: argparse.Action) -> bool:
    flags = action.option_strings
    return any(argument == flag or argument.startswith(flag + "=") for argument in arguments for flag in flags)


def _file_of(arguments: Sequence[str]) -> str | None:
    for place, argument in enumerate(arguments):
        if argument.startswith(CONFIG_FLAG + "="):
            return argument.partition("=")[2]
        if argument == CONFIG_FLAG and place + 1 < len(arguments):
            return arguments[place + 1]
    return None


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _split(action: argparse.Action, text: str) -> object:
    return text.split() if _is_list(action) else text


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action.default, list)


def _flags_of(action: argparse.Action, value: object, source: str) -> Iterator[str]:
    """Yield the flags that say what a value of the environment or the file says."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        text = str(value).lower()
        if not isinstance(value, bool | str) or text not in _TRUE | _FALSE:
            raise ConfigError(f"{source}: {value!r} is neither true nor false")
        if text in _TRUE:
            yield flag
        return
    items: Any = value if _is_list(action) else [value]
    if isinstance(items, dict):
        named: dict[str, object] = msgspec.convert(items, dict[str, object])
        items = [f"{name}={item}" for name, item in named.items()]
    if not isinstance(items, list):
        raise ConfigError(f"{source}: {value!r} is no list")
    for item in msgspec.convert(items, list[object]):
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ConfigError(f"{source}: {item!r} is neither a text nor a number")
        _check(action, str(item), source)
        yield f"{flag}={item}"


def _check(action: argparse.Action, text: str, source: str) -> None:
    convert: Any = action.type or str
    try:
        converted = convert(text)
    except (argparse.ArgumentTypeError, ValueError, KVDepotError) as error:
        raise ConfigError(f"{source}: {error}") from error
    if action.choices is not None and converted not in action.choices:
        raise ConfigError(f"{source}: {text!r}; there are {', '.join(map(str, action.choices))}")

"""Reads the settings of `kvdepot serve` from flags, the environment and a file.

A flag overrides the environment (`KVDEPOT_POOL_SIZE`), which overrides the file (`pool_size = "8GiB"`), which overrides
the default. Lists are replaced as a whole. Each place is checked by the setting's one declaration
(`kvdepot.config.setting`), and an error names the place of the wrong value.
"""

import argparse
import difflib
import logging
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from kvdepot.config import Setting, parse_count, parse_number, parse_size, settings_in
from kvdepot.errors import ConfigError, KVDepotError, reason_of

logger = logging.getLogger(__name__)

PREFIX: Final = "KVDEPOT_"
ASKS_NO_DEPOT: Final = "Asks no depot: --dir has no effect here."  # at the end of a command's help

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})

_T = TypeVar("_T")


def add_settings(parser: argparse.ArgumentParser, kind: type[Any], only: Collection[str] | None = None) -> None:
    """Add the flags of a dataclass of settings to a parser.

    The parser's result has an attribute for each flag that was given, named and typed like the field.

    Args:
        parser: receives the flags.
        kind: the dataclass.
        only: names of fields; None adds all.
    """
    for name, setting in settings_in(kind).items():
        if only is not None and name not in only:
            continue
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": setting.help}
        if setting.is_switch:
            parser.add_argument(setting.flag, action="store_true", **options)
        else:
            action = "store" if setting.collect is None else "append"
            read = as_argument(setting.parse)
            flags = [setting.flag, "--url"] if setting.flag == "--dir" else [setting.flag]
            parser.add_argument(*flags, action=action, type=read, metavar=setting.metavar, **options)


def named_depot(options: argparse.Namespace) -> str | None:
    """Return the directory that `--dir` names; None for the default one."""
    return str(options.directory) if "directory" in options else None


def as_argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse` as a `type` for argparse, which then reports its `KVDepotError` as a wrong argument."""

    def read(text: str) -> _T:
        try:
            return parse(text)
        except KVDepotError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


count_argument: Final = as_argument(parse_count)
number_argument: Final = as_argument(parse_number)
size_argument: Final = as_argument(parse_size)


def read_settings(
    flags: Mapping[str, Any], kinds: Sequence[type[Any]], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings that flags, environment and file give, by field.

    Args:
        flags: values of flags by field, and the file's path as "config".
        kinds: the dataclasses of settings.
        environment: the environment of the process.

    Raises:
        ConfigError: the file cannot be read or names an unknown setting, or a value is wrong.
    """
    declared = {name: each for kind in kinds for name, each in settings_in(kind).items()}
    path = flags.get("config") or environment.get(PREFIX + "CONFIG")
    given = _from_environment(declared, environment, flags)
    given = (_from_file(path, declared, {*flags, *given}) if path else {}) | given
    for name, setting in declared.items():
        if name in flags:
            given[name] = flags[name] if setting.collect is None else setting.collect(flags[name])
    return given


def _from_environment(
    declared: Mapping[str, Setting], environment: Mapping[str, str], hidden: Collection[str]
) -> dict[str, Any]:
    """Read all settings except those in `hidden`. Split lists at spaces. Warn of variables that look like settings."""
    variables = {PREFIX + setting.name.upper(): name for name, setting in declared.items()}
    given: dict[str, Any] = {}
    for variable in sorted(environment):
        name = variables.get(variable)
        if name is not None and name not in hidden:
            text = environment[variable]
            value = text if declared[name].collect is None else text.split()
            given[name] = _read(declared[name], value, variable)
        elif variable.startswith(PREFIX) and name is None and variable != PREFIX + "CONFIG":
            close = difflib.get_close_matches(variable, variables, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            logger.warning("ignoring the unknown variable %s%s", variable, meant)
    return given


def _from_file(path: Path | str, declared: Mapping[str, Setting], hidden: Collection[str]) -> dict[str, Any]:
    """Read all settings except those in `hidden`."""
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {reason_of(error)}") from error
    fields = {setting.name: name for name, setting in declared.items()}
    given: dict[str, Any] = {}
    for key, value in values.items():
        key = key.replace("-", "_")
        if key not in fields:
            close = difflib.get_close_matches(key, fields, 1)
            raise ConfigError(f"{path}: no setting {key!r}" + (f"; {close[0]!r} is one" if close else ""))
        if fields[key] not in hidden:
            given[fields[key]] = _read(declared[fields[key]], value, f"{path}: {key}")
    return given


def _read(setting: Setting, value: object, source: str) -> Any:
    """Convert a value from the environment or the file to the field's type."""
    if setting.is_switch:
        text = str(value).lower()
        if not isinstance(value, bool | str) or text not in _TRUE | _FALSE:
            raise ConfigError(f"{source}: {value!r} is neither true nor false")
        return text in _TRUE
    if setting.collect is None:
        return _read_one(setting, value, source)
    if isinstance(value, dict):
        value = [f"{name}={item}" for name, item in cast("dict[str, object]", value).items()]
    if not isinstance(value, list):
        raise ConfigError(f"{source}: {value!r} is not a list")
    return setting.collect([_read_one(setting, item, source) for item in cast("list[object]", value)])


def _read_one(setting: Setting, value: object, source: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{source}: {value!r} is neither a text nor a number")
    try:
        return setting.parse(str(value))
    except KVDepotError as error:
        raise ConfigError(f"{source}: {error}") from error

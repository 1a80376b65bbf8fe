"""The settings that users of every engine have, and the parser of an engine's free-form configuration."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Self, get_args

from kvdepot.backends import Backend
from kvdepot.config import DEADLINE_SECONDS, directory_of_url, parse_tenant
from kvdepot.errors import ConfigError

logger = logging.getLogger(__name__)

_BACKEND_OPTIONS: Final = ("copy_threads", "mode", "batch_runs", "gather_kernel")
"""Settings that are options of some backends: see `kvdepot.backends.Backend.settings`."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings that connectors share. Each connector extends this class by its own settings."""

    SOURCE: ClassVar[str]  # the option of the engine that holds the settings
    PREFIX: ClassVar[str] = ""  # begins their keys in that option; keys of others are ignored

    url: str | None = None  # None: the depot in the default directory
    namespace: str = ""  # engines share only within a namespace, for differences that the identity does not contain
    tenant: str = "default"
    tenant_salt: str = ""
    weights: str = ""  # names the weights instead of a fingerprint of their files
    deadline_seconds: float = DEADLINE_SECONDS
    copy_threads: int | None = None
    mode: str | None = None  # on CUDA: "direct" or "ipc"; None: the backend's default
    batch_runs: int | None = None
    gather_kernel: bool | None = None  # on CUDA: a kernel copies small pages; None: if Triton is there
    keep_after_reset: bool = False  # True: a reset of the engine's cache does not begin a new generation of keys

    def __post_init__(self) -> None:
        if self.mode not in (None, "direct", "ipc"):
            raise ConfigError(f'{self.PREFIX}mode is "direct" or "ipc", not {self.mode!r}')
        for name, check in (
            ("tenant", lambda: parse_tenant(self.tenant)),
            ("url", lambda: directory_of_url(self.url)),
        ):
            try:
                check()
            except ConfigError as error:
                raise ConfigError(f"{self.PREFIX}{name}: {error}") from error
        self.check_seconds("deadline_seconds")
        self.check_at_least_one("copy_threads", "batch_runs")

    def check_seconds(self, name: str) -> None:
        """Check a setting in seconds.

        Raises:
            ConfigError: the value is not above 0 and finite.
        """
        value = getattr(self, name)
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{self.PREFIX}{name} is {value}: give seconds above 0")

    def check_at_least_one(self, *names: str) -> None:
        """Check settings that are whole numbers or None.

        Raises:
            ConfigError: a number is below 1.
        """
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{self.PREFIX}{name} is {value}: at least 1")

    def backend_options(self, backend: Backend) -> dict[str, int | str]:
        """Return the options that are set and that this backend has. Log options without an effect on it."""
        given = {name: getattr(self, name) for name in _BACKEND_OPTIONS if getattr(self, name) is not None}
        for name in given.keys() - backend.settings:
            logger.warning("%s has no effect on %s and is ignored", self.PREFIX + name, backend.name)
        return {name: value for name, value in given.items() if name in backend.settings}

    @classmethod
    def read(cls, extra: Mapping[str, Any], **defaults: Any) -> Self:
        """Return the settings in an engine's configuration. Keys without our prefix are ignored if they are not ours.

        Raises:
            ConfigError: an unknown key of ours, one without the prefix, or a wrong value.
        """
        types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        values = defaults
        for key, value in extra.items():
            if not key.startswith(cls.PREFIX):
                # Ignoring it would, for example, leave a tenant with a salt unseparated.
                if key in types or key.lower().startswith(cls.PREFIX.rstrip(".")):
                    right = cls.PREFIX + (key if key in types else "url")
                    raise ConfigError(
                        f"{cls.SOURCE} has {key!r}, which has no effect: names of settings begin with {cls.PREFIX!r},"
                        f" for example {right!r}"
                    )
                continue
            name = key.removeprefix(cls.PREFIX)
            if name not in types:
                known = ", ".join(cls.PREFIX + field for field in types)
                raise ConfigError(f"{cls.SOURCE} has {key!r}; known are {known}")
            expected = get_args(types[name]) or (types[name],)
            if float in expected and type(value) is int:
                try:
                    value = float(value)
                except OverflowError:
                    raise ConfigError(f"{key} has {len(str(abs(value)))} digits: give a smaller number") from None
            if type(value) not in expected:
                names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in expected)
                raise ConfigError(f"{key} is {value!r}: give {names}")
            values[name] = value
        return cls(**values)

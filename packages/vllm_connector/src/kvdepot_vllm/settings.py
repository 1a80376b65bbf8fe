"""What the user may set: `kv_connector_extra_config`, parsed once at start."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, get_args

from kvdepot.errors import ConfigError

PREFIX: Final = "kvdepot."


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting is `kvdepot.NAME` in `kv_connector_extra_config`, and optional.

    `store` says which tokens are stored: "all" (prompt and output), "prompt" or "none"; `load` whether anything is
    retrieved. `max_pinned_share` bounds the share of the engine's blocks that stores under way may keep from it.
    """

    url: str | None = None  # None: the depot in the default directory
    namespace: str = ""  # engines share within one only; for operators who know better than the model's identity
    tenant: str = "default"
    tenant_salt: str = ""
    weights: str = ""  # names the weights instead of a fingerprint of their files
    chunk_tokens: int | None = None  # None: the engine's own granularity
    deadline_seconds: float = 2.0
    store: str = "all"
    load: bool = True
    max_pinned_share: float = 0.5
    copy_threads: int | None = None
    keep_load_failure_policy: bool = False  # True: a failed load does what vLLM's kv_load_failure_policy says
    keep_after_reset: bool = False  # True: a reset of the prefix cache does not begin a new generation of keys

    def __post_init__(self) -> None:
        if self.store not in ("all", "prompt", "none"):
            raise ConfigError(f'kvdepot.store is "all", "prompt" or "none", not {self.store!r}')
        if not (self.deadline_seconds > 0 and math.isfinite(self.deadline_seconds)):
            raise ConfigError(f"kvdepot.deadline_seconds is {self.deadline_seconds}: give seconds above 0")
        if not 0 < self.max_pinned_share <= 1:
            raise ConfigError(f"kvdepot.max_pinned_share is {self.max_pinned_share}: give a share above 0, at most 1")
        for name in ("chunk_tokens", "copy_threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"kvdepot.{name} is {value}: at least 1")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Return the settings in `kv_connector_extra_config`; keys of other connectors are left alone.

        Raises:
            ConfigError: an unknown `kvdepot.` key, or a value of the wrong type.
        """
        types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in extra.items():
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            if name not in types:
                known = ", ".join(PREFIX + field for field in types)
                raise ConfigError(f"kv_connector_extra_config has {key!r}; known are {known}")
            expected = get_args(types[name]) or (types[name],)
            if float in expected and type(value) is int:
                value = float(value)
            if type(value) not in expected:
                names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in expected)
                raise ConfigError(f"{key} is {value!r}: give {names}")
            values[name] = value
        return cls(**values)

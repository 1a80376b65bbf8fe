"""The user's settings: `linker_extra_config`, parsed once at start."""

from dataclasses import dataclass
from typing import ClassVar

from kvdepot.engines.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Settings(EngineSettings):
    """Each setting is an optional field of `linker_extra_config`.

    SGLang's scheduler does nothing else while it waits for the depot.
    """

    SOURCE: ClassVar[str] = "linker_extra_config"

    lookup_seconds: float = 0.25  # the longest wait for the answer to a lookup
    tier_seconds: float = 0.05  # the part of that wait for tiers; chunks that arrive later help the next request

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)  # `super()` refers to the class that `slots` has replaced
        self.check_seconds("lookup_seconds")
        self.check_seconds("tier_seconds")

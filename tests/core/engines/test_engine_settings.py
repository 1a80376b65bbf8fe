"""The settings that every connector reads from its engine's configuration."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvdepot.engines.settings import EngineSettings
from kvdepot.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prefixed(EngineSettings):
    SOURCE: ClassVar[str] = "shared_config"
    PREFIX: ClassVar[str] = "kvdepot."


@dataclass(frozen=True, slots=True)
class Plain(EngineSettings):
    SOURCE: ClassVar[str] = "own_config"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"kvdepot.ulr": "x"}, r"shared_config has 'kvdepot\.ulr'; known are kvdepot\.url, "),
        ({"kvdepot.url": 3}, "kvdepot.url is 3: give str or null"),
        ({"kvdepot.keep_after_reset": "yes"}, "give bool"),
        ({"kvdepot.deadline_seconds": 0}, "above 0"),
        ({"kvdepot.deadline_seconds": 10**400}, "401 digits"),
        ({"kvdepot.copy_threads": 0}, "at least 1"),
        ({"kvdepot.mode": "copy"}, "direct"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Prefixed.read(extra)


def test_keys_without_the_prefix_are_left_alone_where_others_have_theirs() -> None:
    assert Prefixed.read({"other.thing": 1, "kvdepot.tenant": "a"}) == Prefixed(tenant="a")


def test_every_key_is_ours_where_the_engine_gives_us_an_object_of_our_own() -> None:
    assert Plain.read({"tenant": "a", "deadline_seconds": 1}) == Plain(tenant="a", deadline_seconds=1.0)
    with pytest.raises(ConfigError, match="own_config has 'other'"):
        Plain.read({"other": 1})

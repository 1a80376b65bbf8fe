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
        ({"kvdepot.tenant": "x" * 257}, "kvdepot.tenant: 257 characters: a tenant's name has 1 to 256"),
        ({"kvdepot.tenant": ""}, "kvdepot.tenant: 0 characters: a tenant's name has 1 to 256"),
        ({"kvdepot.url": "http://x"}, "kvdepot.url: 'http://x': name a depot of this machine by its directory"),
        ({"kvdepot.url": ""}, "kvdepot.url: the depot's directory has no name"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Prefixed.read(extra)


def test_keys_without_the_prefix_are_left_alone_where_others_have_theirs() -> None:
    assert Prefixed.read({"other.thing": 1, "kvdepot.tenant": "a"}) == Prefixed(tenant="a")


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("tenant_salt", "kvdepot.tenant_salt"),
        ("url", "kvdepot.url"),
        ("kvdepot", "kvdepot.url"),
        ("kvdepot_url", "kvdepot.url"),
        ("KVDepot.url", "kvdepot.url"),
    ],
)
def test_a_setting_without_its_prefix_is_named_with_the_right_spelling(key: str, right: str) -> None:
    """Regression: it was ignored, so that a tenant with a salt was not separated."""
    with pytest.raises(ConfigError, match=f"shared_config has {key!r}, .* with 'kvdepot.', for example '{right}'"):
        Prefixed.read({key: {"url": "/x", "tenant_salt": "s"}})


def test_the_longest_tenant_is_accepted() -> None:
    assert Plain.read({"tenant": "x" * 256, "url": "ipc:///x/control.sock"}).tenant == "x" * 256


@pytest.mark.parametrize("extra", [{"tenant": "x" * 257}, {"tenant": ""}, {"url": "http://x"}])
def test_what_no_depot_takes_is_refused_where_keys_have_no_prefix_too(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(extra))}: "):
        Plain.read(extra)


def test_every_key_is_ours_where_the_engine_gives_us_an_object_of_our_own() -> None:
    assert Plain.read({"tenant": "a", "deadline_seconds": 1}) == Plain(tenant="a", deadline_seconds=1.0)
    with pytest.raises(ConfigError, match="own_config has 'other'"):
        Plain.read({"other": 1})

"""Parses a request's parameters for kvdepot, in its `kv_transfer_params` or in a router's `kv_hints`.

A wrong value is ignored and logged. No request fails because of it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from kvdepot.wire import operations as o
from kvdepot.wire.messages import MAXIMUM_PRIORITY, MAXIMUM_RETAIN_SECONDS, MAXIMUM_TTL_SECONDS
from kvdepot_vllm.engine import EngineRequest
from kvdepot_vllm.settings import BLEND_POLICIES, Settings

logger = logging.getLogger(__name__)

_OURS: Final = "kvdepot"  # the key of our parameters
_LONGEST_SESSION: Final = 256
_MOST_SESSIONS: Final = 64  # sessions that one request may name
_A_SESSION: Final = f"a name of 1 to {_LONGEST_SESSION} characters"
_A_TIME_TO_RETAIN: Final = f"a number from 0 to {MAXIMUM_RETAIN_SECONDS:g}"
EVERYTHING: Final = "all"  # recomputes all tokens: slower than no reuse, for tests


def request_params(request: EngineRequest) -> Mapping[str, Any]:
    """Return what a request asks for, for example `kv_transfer_params={"kvdepot": {"load": false, "store": false}}`.

    Actions of type `kvdepot` in the request's `kv_hints`, which routers send, give the same settings. Those of
    `kv_transfer_params` have precedence.
    """
    routed: dict[str, Any] = {}
    for action in getattr(request.kv_hints, "actions", None) or ():
        if action.action_type == _OURS:
            routed |= own_params({_OURS: action.payload})
    return routed | own_params(request.kv_transfer_params)


def own_params(params: Any) -> dict[str, Any]:
    """Return the part of `kv_transfer_params` that is meant for us; empty if there is none."""
    own: Any = cast("dict[str, Any]", params).get(_OURS) if isinstance(params, dict) else None
    return cast("dict[str, Any]", own) if isinstance(own, dict) else {}


def checked(params: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
    """Return a parameter, None if it is missing or wrong. For a wrong one, log what is `expected`."""
    value = params.get(name.rpartition(".")[2])
    if value is None or is_valid(value):
        return value
    logger.warning("ignoring kvdepot.%s of a request, which is %.64r: give %s", name, value, expected)
    return None


def is_number(value: Any) -> bool:
    """Return whether a parameter is a number. A boolean is not."""
    return type(value) in (int, float)


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints about the future of a prefix, which `kvdepot.wire.messages.Hint` carries when its request has ended."""

    session_ended: bool = False
    priority: int = 0
    ttl_seconds: float = 0.0
    session: str = ""
    retain_seconds: float = 0.0

    @classmethod
    def parse(cls, params: Mapping[str, Any], session_id: str | None = None) -> "Hints | None":
        """Return the hints of a request, None if it gives none. vLLM's `session_id` names its session, too."""
        session = checked(params, "session", _is_session, _A_SESSION)
        if session is None and session_id:
            session = checked({"session_id": session_id}, "session_id", _is_session, _A_SESSION)
        retain = checked(params, "retain_seconds", _is_time_to_retain, _A_TIME_TO_RETAIN)
        end = checked(params, "session_end", lambda value: type(value) is bool, "true or false")
        priority = checked(
            params,
            "priority",
            lambda value: type(value) is int and 0 <= value <= MAXIMUM_PRIORITY,
            f"a whole number from 0 to {MAXIMUM_PRIORITY}",
        )
        ttl = checked(
            params,
            "ttl_seconds",
            lambda value: is_number(value) and 0 < value <= MAXIMUM_TTL_SECONDS,
            f"a number above 0, at most {MAXIMUM_TTL_SECONDS:g}",
        )
        if end is priority is ttl is session is None:
            return None
        return cls(bool(end), priority or 0, float(ttl or 0), session or "", float(retain or 0))


def session_operations(params: Mapping[str, Any], tenant: str) -> list[o.OperatorRequest]:
    """Return the operations on its tenant's agent sessions that a request asks for, to be sent when it arrives."""
    operations = list[o.OperatorRequest]()
    expected = f"{{session: seconds}}, at most {_MOST_SESSIONS}"
    retained: dict[str, float] = checked(params, "retain", _are_times_to_retain, expected) or {}
    operations += [o.RetainSession(name, float(seconds), tenant) for name, seconds in retained.items()]
    expected = f"a list of at most {_MOST_SESSIONS} names of sessions"
    for key, kind in (("prefetch", o.PrefetchSession), ("demote", o.DemoteSession), ("forget", o.ForgetSession)):
        names: list[str] = checked(params, key, _are_sessions, expected) or []
        operations += [kind(name, tenant) for name in names]
    return operations


def _is_session(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_SESSION


def _are_sessions(value: Any) -> bool:
    names = cast("list[Any]", value) if isinstance(value, list) else [None]
    return len(names) <= _MOST_SESSIONS and all(map(_is_session, names))


def _are_times_to_retain(value: Any) -> bool:
    times = cast("dict[Any, Any]", value) if isinstance(value, dict) else {None: 0}
    return _are_sessions(list(times)) and all(map(_is_time_to_retain, times.values()))


def _is_time_to_retain(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MAXIMUM_RETAIN_SECONDS


@dataclass(frozen=True, slots=True)
class SharedHead:
    """The beginning of a prompt that its `cache_salt` does not cover.

    Attributes:
        num_tokens: the length of the beginning. A chunk that reaches beyond it is private.
        salt: covers the beginning instead, so only requests with this salt share it; "" for all of the tenant.
    """

    num_tokens: int
    salt: str = ""

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> "SharedHead | None":
        """Return the shared beginning of a request's prompt, None if it has none: a wrong value shares nothing."""
        num_tokens = checked(
            params, "shared_tokens", lambda value: type(value) is int and value > 0, "a whole number above 0"
        )
        salt = checked(params, "shared_salt", lambda value: isinstance(value, str), "a text")
        if num_tokens is None or (salt is None and params.get("shared_salt") is not None):
            return None
        return cls(num_tokens, salt or "")


@dataclass(frozen=True, slots=True)
class BlendParams:
    """How to blend one request.

    Attributes:
        policy: selects the reused tokens to recompute.
        ratio: share of the reused tokens to recompute, 0 to 1.
        borders: token positions where documents begin or end, ascending.
    """

    policy: str
    ratio: float
    borders: tuple[int, ...] = ()

    @classmethod
    def parse(cls, settings: Settings, params: Mapping[str, Any]) -> "BlendParams | None":
        """Return how to blend a request, None if not at all."""
        given = params.get("blend")
        if settings.blend == "off" or given is False or (given is None and settings.blend != "always"):
            return None
        if given is None or given is True:
            return cls(settings.blend_policy, settings.blend_ratio)
        if checked(params, "blend", lambda value: isinstance(value, dict), "true, false or an object") is None:
            return None
        policies = "one of " + ", ".join(BLEND_POLICIES)
        policy = checked(given, "blend.policy", lambda value: value in (*BLEND_POLICIES, EVERYTHING), policies)
        ratio = checked(given, "blend.ratio", lambda value: is_number(value) and 0 <= value <= 1, "a share from 0 to 1")
        segments = checked(
            given, "blend.segments", lambda value: _borders(value) is not None, "a list of [first token, end] pairs"
        )
        return cls(
            policy or settings.blend_policy,
            settings.blend_ratio if ratio is None else float(ratio),
            _borders(segments) or (),
        )


def _borders(segments: Any) -> tuple[int, ...] | None:
    if not isinstance(segments, list | tuple):
        return None
    found: set[int] = set()
    for pair in cast("Sequence[Any]", segments):
        if not isinstance(pair, list | tuple) or [type(item) for item in cast("Sequence[Any]", pair)] != [int, int]:
            return None
        first, end = cast("Sequence[int]", pair)
        if not 0 <= first < end:
            return None
        found |= {first, end}
    return tuple(sorted(found))

"""Parses a request's parameters for kvdepot, in its `kv_transfer_params` or in a router's `kv_hints`.

A wrong value is ignored and logged. No request fails because of it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from kvdepot.features.sessions import operations as o
from kvdepot.features.sessions.messages import MAXIMUM_RETAIN_SECONDS
from kvdepot.keys import DIGEST_BYTES, KeyRun, digest_at
from kvdepot.wire.operation import OperatorRequest
from kvdepot_vllm.engine import EngineRequest
from kvdepot_vllm.settings import BLEND_POLICIES, Settings

logger = logging.getLogger(__name__)

_OURS: Final = "kvdepot"  # the key of our parameters
_LONGEST_SESSION: Final = 256  # characters; the depot keeps the names
_MOST_SESSIONS: Final = 64  # sessions that one request may name
_LONGEST_PEER: Final = 256  # as `kvdepot.wire.messages.Name`
_A_SESSION: Final = f"a name of 1 to {_LONGEST_SESSION} characters"
_A_TIME_TO_RETAIN: Final = f"a number from 0 to {MAXIMUM_RETAIN_SECONDS:g}"
_WAIT_SECONDS: Final = 1.0  # for the prefill engine to begin, unless the request says `wait_ms`
EVERYTHING: Final = "all"  # recomputes all tokens: slower than no reuse, for tests


def request_params(request: EngineRequest) -> Mapping[str, Any]:
    """Return a request's own settings, for example `kv_transfer_params={"kvdepot": {"load": false, "store": false}}`.

    Actions of type `kvdepot` in the request's `kv_hints`, which routers send, give the same settings, but
    `kv_transfer_params` have precedence.
    """
    routed: dict[str, Any] = {}
    for action in getattr(request.kv_hints, "actions", None) or ():
        if action.action_type == _OURS:
            routed |= _own_params({_OURS: action.payload})
    return routed | _own_params(request.kv_transfer_params)


def _own_params(params: Any) -> dict[str, Any]:
    """Return the part of `kv_transfer_params` that is meant for us; empty if there is none."""
    own: Any = cast("dict[str, Any]", params).get(_OURS) if isinstance(params, dict) else None
    return cast("dict[str, Any]", own) if isinstance(own, dict) else {}


def _checked(params: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
    """Return a parameter, None if it is missing or wrong. For a wrong one, log the `expected` value."""
    value = params.get(name.rpartition(".")[2])
    if value is None or is_valid(value):
        return value
    logger.warning("ignoring kvdepot.%s of a request, which is %.64r: give %s", name, value, expected)
    return None


def _is_number(value: Any) -> bool:
    """Return whether a parameter is a number. A boolean is not."""
    return type(value) in (int, float)


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints about the future of a prefix, which `Hint` carries when its request has ended."""

    session_ended: bool = False
    session: str = ""
    retain_seconds: float = 0.0

    @classmethod
    def parse(cls, params: Mapping[str, Any], session_id: str | None = None) -> "Hints | None":
        """Return the hints of a request, None if it gives none.

        Its session is named by `session` or, as vLLM calls it, `session_id`, here or in the request itself.
        """
        named = {"session": params.get("session_id") or session_id or None, **params}
        session = _checked(named, "session", _is_session, _A_SESSION)
        retain = _checked(params, "retain_seconds", _is_time_to_retain, _A_TIME_TO_RETAIN)
        end = _checked(params, "session_end", lambda value: type(value) is bool, "true or false")
        if end is session is None:
            return None
        return cls(bool(end), session or "", float(retain or 0))


def session_operations(params: Mapping[str, Any], tenant: str) -> list[OperatorRequest]:
    """Return the operations on its tenant's agent sessions that a request asks for, to be sent when it arrives."""
    operations = list[OperatorRequest]()
    timed = f"{{session: seconds}}, at most {_MOST_SESSIONS}"
    listed = f"a list of at most {_MOST_SESSIONS} names of sessions"
    names: list[str]
    times: dict[str, float] = _checked(params, "retain", _are_times_to_retain, timed) or {}
    operations += [o.RetainSession(name, float(seconds), tenant) for name, seconds in times.items()]
    if isinstance(params.get("prefetch"), dict):
        times = _checked(params, "prefetch", _are_times_to_retain, timed) or {}
        operations += [o.PrefetchSession(name, tenant, float(seconds)) for name, seconds in times.items()]
    else:
        names = _checked(params, "prefetch", _are_sessions, f"{timed}, or {listed}") or []
        operations += [o.PrefetchSession(name, tenant) for name in names]
    names = _checked(params, "demote", _are_sessions, listed) or []
    operations += [o.DemoteSession(name, tenant) for name in names]
    for key, at_once in (("forget", False), ("forget_at_once", True)):
        names = _checked(params, key, _are_sessions, listed) or []
        operations += [o.ForgetSession(name, tenant, at_once) for name in names]
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
    return _is_number(value) and 0 <= value <= MAXIMUM_RETAIN_SECONDS


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
        num_tokens = _checked(
            params, "shared_tokens", lambda value: type(value) is int and value > 0, "a whole number above 0"
        )
        salt = _checked(params, "shared_salt", lambda value: isinstance(value, str), "a text")
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
        if _checked(params, "blend", lambda value: isinstance(value, dict), "true, false or an object") is None:
            return None
        policies = "one of " + ", ".join(BLEND_POLICIES)
        policy = _checked(given, "blend.policy", lambda value: value in (*BLEND_POLICIES, EVERYTHING), policies)
        ratio = _checked(
            given, "blend.ratio", lambda value: _is_number(value) and 0 <= value <= 1, "a share from 0 to 1"
        )
        segments = _checked(
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


# --- hand-overs from a prefill engine to a decode engine --------------------------------------------------------------

# vLLM's proxies send and relay these parameters: `do_remote_decode` asks a prefill engine to report the chunks that it
# computed, and its answer contains `do_remote_prefill` for the decode engine. No address is needed: both engines share
# a depot, which finds the chunks by their keys.


@dataclass(frozen=True, slots=True)
class HandOver:
    """A prompt that another engine computes.

    Attributes:
        num_tokens: leading tokens that will soon be in the depot; None: all whole chunks.
        prefix: the key of the last chunk of these tokens, None if unknown.
        wait_seconds: how long the other engine may take to begin.
    """

    num_tokens: int | None = None
    prefix: bytes | None = None
    wait_seconds: float = _WAIT_SECONDS

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> "HandOver | None":
        """Return the hand-over that `kv_transfer_params` announce; None if no other engine computes the prompt.

        A wrong value is ignored with a log line.
        """
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return None
        own = _own_params(params)
        num_tokens = _checked(own, "num_tokens", lambda value: type(value) is int and value >= 0, "a whole number")
        wait_ms = _checked(
            own, "wait_ms", lambda value: _is_number(value) and 0 <= value <= 60_000, "milliseconds up to 60000"
        )
        prefix = _checked(own, "prefix", lambda value: _digest(value) is not None, f"{DIGEST_BYTES} bytes in hex")
        return cls(num_tokens, _digest(prefix), _WAIT_SECONDS if wait_ms is None else wait_ms / 1000)

    def num_chunks(self, key: KeyRun, end_tokens: int, chunk_tokens: int) -> int:
        """Return how many leading chunks of a request's key the other engine brings; 0 if it computes another prompt.

        Args:
            key: the request's wanted chunks, from chunk 0 on. The last one may be incomplete.
            end_tokens: leading tokens of the request's prompt that can be handed over.
            chunk_tokens: tokens of one chunk.
        """
        if self.num_tokens is None:
            return min(key.num_chunks, end_tokens // chunk_tokens)
        is_whole = self.num_tokens == end_tokens
        count = key.num_chunks if is_whole else min(key.num_chunks, self.num_tokens // chunk_tokens)
        last = digest_at(key.digests, count - 1)
        if self.prefix is not None and count * chunk_tokens >= self.num_tokens and last != self.prefix:
            logger.warning(
                "the prefill engine computed another prompt, or differs in model, format, tenant or salt:"
                " nothing is handed over"
            )
            return 0
        return count


def asks_for_hand_over(params: Mapping[str, Any] | None) -> bool:
    """Return whether the prefill engine must report its chunks to the decode engine."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def peer_of(params: Mapping[str, Any] | None) -> str:
    """Return the depot that has the prompt as the router says, empty for none. A wrong value is ignored and logged."""
    if not isinstance(params, dict):
        return ""
    expected = f"the name of a depot's peer, or HOST:PORT, of 1 to {_LONGEST_PEER} characters"
    return _checked(params, "remote_kv_source", _is_peer, expected) or ""


def _is_peer(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _LONGEST_PEER


def handed_over(key: KeyRun, num_tokens: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` for the decode engine.

    Args:
        key: chunks of the prompt, from chunk 0 on, that will soon be in the depot.
        num_tokens: the number of tokens in these chunks.
    """
    told = {"num_tokens": num_tokens, "prefix": digest_at(key.digests, key.num_chunks - 1).hex()}
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvdepot": told}


def _digest(text: Any) -> bytes | None:
    try:
        digest = bytes.fromhex(text)
    except (TypeError, ValueError):
        return None
    return digest if len(digest) == DIGEST_BYTES else None

"""Users' input for vLLM as a target: the connector's settings, and `kv_transfer_params` of requests."""

import json
from contextlib import suppress
from dataclasses import astuple
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from kvdepot.errors import ConfigError
from kvdepot.features.blend.segments import SegmentNamer
from kvdepot.features.sessions.messages import Hint
from kvdepot.keys import DIGEST_BYTES, Namespace, hash_prefix
from kvdepot.wire import frames
from kvdepot_vllm.params import (
    BlendParams,
    HandOver,
    Hints,
    SharedHead,
    asks_for_hand_over,
    handed_over,
    request_params,
    session_operations,
)
from kvdepot_vllm.settings import Settings

if TYPE_CHECKING:
    from kvdepot.backends import Backend

_CHUNK_TOKENS: Final = 4
_TOKENS: Final = list(range(40))
_KEY: Final = hash_prefix(Namespace("model"), _CHUNK_TOKENS, _TOKENS)
_NAMER: Final = SegmentNamer(Namespace("model"))


def parse(data: bytes) -> None:
    """Two objects in JSON: `kv_connector_extra_config`, which raises only `ConfigError`, and `kv_transfer_params`.

    No request fails because of its parameters: a wrong value counts as missing.
    """
    config, _, params = data.partition(b"\0")
    with suppress(ConfigError):
        _configure(config)
    settings = Settings(blend="request")
    try:
        value: Any = json.loads(params)
    except (ValueError, RecursionError):
        return
    hand_over = HandOver.parse(value)
    if hand_over is not None:
        assert 0 <= hand_over.wait_seconds <= 60
        assert 0 <= hand_over.num_chunks(_KEY, len(_TOKENS), _CHUNK_TOKENS) <= _KEY.num_chunks
    assert isinstance(asks_for_hand_over(value), bool)
    request: Any = _Request(value)
    wishes = request_params(request)
    hints = Hints.parse(wishes)
    if hints is not None:
        hint = Hint(1, "tenant", _KEY.digests, *astuple(hints))
        assert frames.decode_request(bytes(frames.encode_frame(0, hint))) == hint
    for operation in session_operations(wishes, "tenant"):
        assert frames.decode_request(bytes(frames.encode_frame(0, operation))) == operation
    head = SharedHead.parse(wishes)
    assert head is None or head.num_tokens > 0
    blend = BlendParams.parse(settings, wishes)
    if blend is not None:
        assert 0 <= blend.ratio <= 1
        assert len(_NAMER.name(_TOKENS, blend.borders)) < len(_TOKENS)


class _Request:
    """The part of vLLM's request that has its wishes."""

    kv_hints = None
    session_id = None

    def __init__(self, params: Any) -> None:
        self.kv_transfer_params = params


def _configure(config: bytes) -> None:
    try:
        extra: Any = json.loads(config)
    except (ValueError, RecursionError):
        return
    if isinstance(extra, dict):
        settings = Settings.parse(cast("dict[str, Any]", extra))
        for options in ({"copy_threads"}, {"mode", "batch_runs", "gather_kernel"}, set[str]()):
            backend = cast("Backend", SimpleNamespace(name="any", settings=frozenset(options)))
            settings.backend_options(backend)


def seeds() -> list[bytes]:
    """Return right and wrong settings and parameters."""
    told = handed_over(_KEY, len(_TOKENS))
    ours: list[Any] = [
        {"load": False, "store": False},
        {"session_end": True, "session": "agent", "retain_seconds": 60},
        {"retain_seconds": 10**400, "session_id": 1, "session_end": 0},
        {"blend": True},
        {"blend": [1]},
        {"blend": {}},
        3,
        {"blend": {"policy": "heads", "ratio": 0.5, "segments": [[0, 10], [10, 40]]}},
        {"blend": {"ratio": float("nan")}},
        {"blend": {"policy": [], "segments": [[0, 10**30], [5, 2]]}},
        {"wait_ms": 50, "num_tokens": 8, "prefix": "00"},
        {"num_tokens": -1, "prefix": 5, "wait_ms": 1e99},
        {"prefix": "ab" * DIGEST_BYTES, "num_tokens": 0},
    ]
    params: list[Any] = [None, [], told, {"do_remote_decode": 1}, {"do_remote_prefill": True, "kvdepot": 5}]
    params += [{"do_remote_prefill": remote, "kvdepot": each} for each in ours for remote in (False, True)]
    configs: list[Any] = [
        {"kvdepot.deadline_seconds": 2},
        {"kvdepot.deadline_seconds": 10**400},
        {"kvdepot.blend_ratio": float("nan")},
        {"kvdepot.mode": "ipc", "kvdepot.copy_threads": 4},
        {"kvdepot.store": []},
        {"kvdepot.x": 1, "other": {}},
        [1],
        {"kvdepot.kernel_run_bytes": -1},
        {"kvdepot.chunk_tokens": 0, "kvdepot.url": None},
        {"kvdepot.load": "yes"},
    ]
    return [
        *(json.dumps(config).encode() + b"\0{}" for config in configs),
        *(b"{}\0" + json.dumps(each).encode() for each in params),
    ]

"""This release and others of the same protocol understand each other's messages.

`frames/protocol-N.json` has a frame of every message as a release of protocol N sent it. It is written once and only
added to: `python tests/core/wire/test_compatibility.py` adds messages that are new.
"""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvdepot.errors import ErrorCode
from kvdepot.layout import GroupKind
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o

FRAMES = Path(__file__).with_name("frames")
SEQUENCE = 7
_SPEC = m.CacheSpec(
    64, (m.GroupShape(GroupKind.FULL_ATTENTION, 16), m.GroupShape(GroupKind.SLIDING_WINDOW, 16, 128)), "x"
)
_DIGESTS = bytes(range(64))
_REQUIRED: dict[str, Any] = {  # of each field's type, where it is not what the name says
    "spec": _SPEC, "details": (m.GroupDetail((4096,), 8),) * 2, "digests": _DIGESTS, "parent": _DIGESTS[:32],
    "covered": (2, 1), "leases": (5, 6), "entries": ((3, 0x102),), "extents": bytes(40), "code": ErrorCode.DRAINING,
    "rank": 0, "world_size": 1, "level": "debug", "prefixes": [], "settings": {"policy": "lru"},
    "outcome": m.MoveOutcome.DONE, "segments": m.SEGMENT.pack(bytes(range(16)), 5, 20),
    "runs": m.BLEND_RUN.pack(9, 20, 5, 0, 1, 0),
}  # fmt: skip


def example(kind: Any) -> Any:
    """Return a message with a value in every field that has to be given."""
    values = {}
    for field in msgspec.structs.fields(kind):
        if not field.required:
            continue
        if field.name in _REQUIRED:
            values[field.name] = _REQUIRED[field.name]
        elif field.type is float:
            values[field.name] = 1.5
        elif issubclass_of(field.type, int):
            values[field.name] = 9
        else:
            values[field.name] = field.name
    return kind(**values)


def issubclass_of(annotated: Any, kind: type) -> bool:
    """Whether a type, or what an `Annotated` is of, is a kind."""
    plain = getattr(annotated, "__origin__", annotated)
    return isinstance(plain, type) and issubclass(plain, kind)


REQUESTS = list(get_args(frames.Request))
REPLIES = [
    kind for kind in get_args(frames.Reply) if kind is not o.StatusReply
]  # by names, not by places: shown to people


def load(version: int) -> dict[str, str]:
    path = FRAMES / f"protocol-{version}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def tag_of(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


@pytest.mark.parametrize("version", range(m.MINIMUM_PROTOCOL_VERSION, m.PROTOCOL_VERSION + 1))
@pytest.mark.parametrize("kind", [*REQUESTS, *REPLIES], ids=tag_of)
@pytest.mark.promise(59)
def test_what_a_release_of_this_protocol_sent_is_understood(kind: Any, version: int) -> None:
    frame = bytes.fromhex(load(version)[tag_of(kind)])
    decode = frames.decode_request if kind in REQUESTS else frames.decode_reply
    assert decode(frame) == example(kind)
    assert frames.sequence_of(frame) == SEQUENCE


@pytest.mark.parametrize("kind", [*REQUESTS, *REPLIES], ids=tag_of)
@pytest.mark.promise(59)
def test_what_a_later_release_adds_at_the_end_is_ignored(kind: Any) -> None:
    full = example(kind)
    fields = [*msgspec.msgpack.decode(msgspec.msgpack.encode(full)), "a field of a later release", 1]
    frame = bytes(frames.encode_frame(SEQUENCE, full)[:8]) + msgspec.msgpack.encode(fields)
    assert (frames.decode_request if kind in REQUESTS else frames.decode_reply)(frame) == full


@pytest.mark.parametrize("version", range(m.MINIMUM_PROTOCOL_VERSION, m.PROTOCOL_VERSION + 1))
def test_every_version_that_is_served_has_its_frames(version: int) -> None:
    assert set(load(version)) == {tag_of(kind) for kind in (*REQUESTS, *REPLIES)}


if __name__ == "__main__":
    kept = load(m.PROTOCOL_VERSION)
    for kind in (*REQUESTS, *REPLIES):
        kept.setdefault(tag_of(kind), bytes(frames.encode_frame(SEQUENCE, example(kind))).hex())
    FRAMES.mkdir(exist_ok=True)
    (FRAMES / f"protocol-{m.PROTOCOL_VERSION}.json").write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")

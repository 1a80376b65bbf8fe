# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Mutations of msgpack that stay msgpack, as randomly flipped bytes hardly ever get past the first field."""

import random
from typing import Any

import msgspec

_INTERESTING: list[Any] = [
    0,
    1,
    -1,
    31,
    32,
    33,
    255,
    4095,
    4096,
    65_535,
    1 << 20,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
    None,
    True,
    0.0,
    -1.5,
    float("inf"),
    float("nan"),
    "",
    "x" * 257,
    b"",
    bytes(32),
    bytes(33),
    [],
    [[]],
    {},
    {"a": 1},
    msgspec.msgpack.Ext(5, b"x"),
    msgspec.msgpack.Ext(-1, bytes(4)),
]


def mutate_message(body: bytes, rng: random.Random) -> bytes | None:
    """Return a message with one value or the length of one array changed, None if `body` is not a message."""
    try:
        value = msgspec.msgpack.decode(body)
        return msgspec.msgpack.encode(_mutated(value, rng))
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError):
        return None


def _mutated(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.9:
        items: list[Any] = list(value)
        place = rng.randrange(len(items))
        match rng.randrange(8):
            case 0:
                del items[place]
            case 1:
                items.insert(place, rng.choice(items))
            case 2:
                items.append(rng.choice(_INTERESTING))
            case _:
                items[place] = _mutated(items[place], rng)
        return items
    if isinstance(value, dict) and value and rng.random() < 0.9:
        fields: dict[Any, Any] = dict(value)
        name = rng.choice(list(fields))
        if rng.random() < 0.1:
            del fields[name]
        else:
            fields[name] = _mutated(fields[name], rng)
        return fields
    if rng.random() < 0.5:
        return rng.choice(_INTERESTING)
    match value:
        case int():
            return value + rng.choice([-1, 1, value, -2 * value])
        case str():
            return value[: rng.randrange(len(value) + 1)] + rng.choice(["", "\0", "x", "\U0001f600", value])
        case bytes():
            return value[: rng.randrange(len(value) + 1)] + rng.randbytes(rng.choice([0, 1, 32]))
        case _:
            return rng.choice(_INTERESTING)

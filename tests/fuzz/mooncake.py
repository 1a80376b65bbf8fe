"""Messages of Mooncake's process as a target. The tier may always miss, and it raises only what its queue expects."""

import contextlib
from typing import Any, cast

import msgspec

from fuzz.tiers import KEYS, SIZES, shared_pool
from kvdepot.testing.tier_traffic import EXTENT_BYTES, extents_of
from kvdepot.tiers.trailer import TRAILER_BYTES, checksum_of, make_trailer
from kvdepot_mooncake import messages as m
from kvdepot_mooncake.options import MooncakeUnavailable
from kvdepot_mooncake.process import ChildProcess
from kvdepot_mooncake.tier import MooncakeTier
from support.tiers.direct import read_from


class _Child:
    """Stands for Mooncake's process. It answers every request with the same packet."""

    pid = 0

    def __init__(self, packet: bytes) -> None:
        self._packet = packet

    def ask(self, request: object, expected: type[Any], *, is_probe: bool = False) -> Any:
        del request, is_probe
        try:
            reply = m.decode_reply(self._packet)
        except OSError as error:
            raise MooncakeUnavailable(str(error)) from error
        if isinstance(reply, expected):
            return reply
        raise MooncakeUnavailable("an unexpected reply")


class _Answered(MooncakeTier):
    """A tier with a `_Child` as its process."""

    def __init__(self, packet: bytes) -> None:
        self._packet = packet
        super().__init__(cast("Any", None), shared_pool())

    def _new_child(self) -> ChildProcess:
        return cast("ChildProcess", _Child(self._packet))


def replies(data: bytes) -> None:
    """Replies of Mooncake's process: as many outcomes as keys, or `MooncakeUnavailable`."""
    tier, pool, keys, extents = _Answered(data), shared_pool(), KEYS[:2], extents_of(0, SIZES[:2])
    pool.view[: 2 * EXTENT_BYTES] = bytes(2 * EXTENT_BYTES)
    for ask in (
        lambda: tier.contains(keys),
        lambda: tier.write(keys, [bytes(TRAILER_BYTES)] * 2, extents),
        lambda: tier.read(keys, extents),
    ):
        with contextlib.suppress(MooncakeUnavailable):
            assert len(ask()) == len(keys)
    with contextlib.suppress(MooncakeUnavailable):
        for key, is_here in zip(keys, read_from(tier, pool, keys, extents), strict=True):
            assert not is_here, f"{key.hex()} was never written"


def seeds() -> list[bytes]:
    """Return a reply of each kind, including too few and too many outcomes."""
    here, miss = m.KeyOutcome.HERE, m.KeyOutcome.MISS
    trailer = make_trailer(KEYS[0], SIZES[0], checksum_of(b"something else"))
    replies = [
        m.Joined(),
        m.Cleared(3),
        m.NodeFailed("no"),
        m.Outcomes([here, miss], [trailer, b""]),
        m.Outcomes([here, here], [trailer]),
        m.Outcomes([here], [trailer]),
        m.Outcomes([here, miss]),
        m.Outcomes([m.KeyOutcome.NO_SPACE, m.KeyOutcome.TRANSFER_FAILED], [b"", b"x"]),
    ]
    return [*(msgspec.msgpack.encode(reply) for reply in replies), b"\x92\xa6failed\xa1\xff", b"\x91" * 3000]

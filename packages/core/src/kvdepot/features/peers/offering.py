"""The hand-over of a depot that goes to a peer, by `kvdepot drain --to`.

The command offers prefixes to the peer's listener, the one used last first. The peer reads them from the pool of the
depot that goes, as it reads after a lookup. If a side dies, the rest is not handed over, and nothing else happens.
"""

import socket
import time
from collections.abc import Sequence
from typing import Final

from kvdepot.config import parse_address
from kvdepot.features.peers import protocol as p
from kvdepot.features.peers.hottest import HotPrefix

_SHARE: Final = 4  # one in so many bytes of the peer's pool is filled: the rest keeps the chunks of its own engines
_SECONDS: Final = 5.0  # of an exchange
_PAUSE_SECONDS: Final = 0.02


class Offering:
    """A connection of `kvdepot drain --to` to the peer that takes over.

    Args:
        address: HOST:PORT of its listener.
        token: the secret of all peers.
        own_address: of the listener of the depot that goes.

    Raises:
        OSError: nothing listens there.
        PeerError: it is no depot of this version, or has another token.
    """

    def __init__(self, address: str, token: bytes, own_address: str) -> None:
        host, port = parse_address(own_address, "--peers")
        self._own = f":{port}" if host in ("0.0.0.0", "::") else own_address
        self._peer = p.Stream(socket.create_connection(parse_address(address, "--to"), _SECONDS))
        self._peer.until = time.monotonic() + _SECONDS
        try:
            self._peer.greet_as_reader(token)
        except BaseException:
            self.close()
            raise

    @property
    def most_bytes(self) -> int:
        """The bytes that the peer should take."""
        return self._offer().pool_bytes // _SHARE

    def _offer(self, tenant: str = "", digests: bytes = b"") -> p.Taking:
        self._peer.until = time.monotonic() + _SECONDS
        self._peer.send_frame(p.Take(self._own, tenant, digests))
        reply = p.decode_from_peer(self._peer.receive_frame())
        if not isinstance(reply, p.Taking):
            raise p.PeerError("the peer did not answer the offer")
        return reply

    def hand_over(self, prefixes: Sequence[HotPrefix], until: float) -> int:
        """Offer prefixes, and wait until the peer has read them, or until a monotonic time. Return how many it took.

        Raises:
            OSError: the peer has gone.
            PeerError: it does not answer as agreed.
        """
        num_taken = 0
        while num_taken < len(prefixes) and time.monotonic() < until:
            offered = prefixes[num_taken]
            if self._offer(offered.tenant, offered.digests).is_taken:
                num_taken += 1
            else:
                time.sleep(_PAUSE_SECONDS)
        while self._offer().num_prefixes and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
        return num_taken

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._peer.close()

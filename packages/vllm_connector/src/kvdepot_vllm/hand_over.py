"""Hand-over of a prompt from a prefill engine to a decode engine, by the `kv_transfer_params` of a request.

The parameters are those that vLLM's proxies send and relay: `do_remote_decode` asks a prefill engine to say what it
computed, and its answer carries `do_remote_prefill` for the decode engine. No address is needed: both engines share a
depot, which finds the chunks by their keys.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from kvdepot.keys import DIGEST_BYTES, KeyRun

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 1.0  # for the prefill engine to begin, unless the request says `wait_ms`


@dataclass(frozen=True, slots=True)
class HandOver:
    """A prompt that another engine computes.

    Attributes:
        num_tokens: leading tokens that are in the depot soon; None: all whole chunks.
        prefix: key of the last chunk of these, None if unknown.
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
        told: Any = params.get("kvdepot")
        fields = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        num_tokens, prefix, wait_ms = (fields.get(name) for name in ("num_tokens", "prefix", "wait_ms"))
        if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 0):
            logger.warning("kvdepot.num_tokens of a request is %.64r and ignored: give a whole number", num_tokens)
            num_tokens = None
        if wait_ms is not None and (type(wait_ms) not in (int, float) or not 0 <= wait_ms <= 60_000):
            logger.warning("kvdepot.wait_ms of a request is %.64r and ignored: give milliseconds up to 60000", wait_ms)
            wait_ms = None
        seconds = _WAIT_SECONDS if wait_ms is None else wait_ms / 1000
        return cls(num_tokens, _digest(prefix), seconds)

    def num_chunks(self, key: KeyRun, end_tokens: int, chunk_tokens: int) -> int:
        """Return how many leading chunks of a request's key the other engine brings; 0 if it computes another prompt.

        Args:
            key: the request's wanted chunks, from chunk 0 on. The last one may be incomplete.
            end_tokens: leading tokens of the request's prompt that can be handed over.
            chunk_tokens: of one chunk.
        """
        if self.num_tokens is None:
            return min(key.num_chunks, end_tokens // chunk_tokens)
        is_whole = self.num_tokens == end_tokens
        count = key.num_chunks if is_whole else min(key.num_chunks, self.num_tokens // chunk_tokens)
        last = key.digests[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]
        if self.prefix is not None and count * chunk_tokens >= self.num_tokens and last != self.prefix:
            logger.warning(
                "the prefill engine computed another prompt, or differs in model, format, tenant or salt:"
                " nothing is handed over"
            )
            return 0
        return count


def asks_for_hand_over(params: Mapping[str, Any] | None) -> bool:
    """Return whether the prefill engine must report what it computed."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def handed_over(key: KeyRun, num_tokens: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` for the decode engine.

    Args:
        key: chunks of the prompt, from chunk 0 on, that are in the depot soon.
        num_tokens: the tokens in these chunks.
    """
    told = {"num_tokens": num_tokens, "prefix": key.digests[-DIGEST_BYTES:].hex()}
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvdepot": told}


def _digest(text: Any) -> bytes | None:
    if text is None:
        return None
    try:
        digest = bytes.fromhex(text)
    except (TypeError, ValueError):
        digest = b""
    if len(digest) == DIGEST_BYTES:
        return digest
    logger.warning("kvdepot.prefix of a request is %.64r and ignored: give %d bytes in hex", text, DIGEST_BYTES)
    return None

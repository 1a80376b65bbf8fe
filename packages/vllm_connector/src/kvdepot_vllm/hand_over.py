"""Hands a prompt over from a prefill engine to a decode engine, by the `kv_transfer_params` of a request.

vLLM's proxies send and relay these parameters: `do_remote_decode` asks a prefill engine to report the chunks that it
computed, and its answer contains `do_remote_prefill` for the decode engine. No address is needed: both engines share a
depot, which finds the chunks by their keys.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.keys import DIGEST_BYTES, KeyRun
from kvdepot_vllm.params import checked, is_number, own_params

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 1.0  # for the prefill engine to begin, unless the request says `wait_ms`


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
        own = own_params(params)
        num_tokens = checked(own, "num_tokens", lambda value: type(value) is int and value >= 0, "a whole number")
        wait_ms = checked(
            own, "wait_ms", lambda value: is_number(value) and 0 <= value <= 60_000, "milliseconds up to 60000"
        )
        prefix = checked(own, "prefix", lambda value: _digest(value) is not None, f"{DIGEST_BYTES} bytes in hex")
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
        key: chunks of the prompt, from chunk 0 on, that will soon be in the depot.
        num_tokens: the number of tokens in these chunks.
    """
    told = {"num_tokens": num_tokens, "prefix": key.digests[-DIGEST_BYTES:].hex()}
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvdepot": told}


def _digest(text: Any) -> bytes | None:
    try:
        digest = bytes.fromhex(text)
    except (TypeError, ValueError):
        return None
    return digest if len(digest) == DIGEST_BYTES else None

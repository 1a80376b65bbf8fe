# pyright: basic, reportMissingImports=false
"""KV cache events: describes the engine's chunks to the depot, and publishes the depot's chunks through vLLM.

A depot that publishes events (`--events`) learns tokens and block hashes from its engines. It tells each engine which
chunks of the engine's namespace the pool holds, whichever engine stored them. So a router that knows nothing of depots
sees chunks that neighbours stored, that tiers brought, or that were evicted. A separate thread receives the news and
passes it to vLLM's publisher at once, because an idle engine takes no events. Another one watches for subscribers. Each
that arrives causes an empty batch, by whose number it notices what it missed and asks the replay socket. The chunks are
then announced again, because vLLM replays only its last 10,000 batches; each is retracted in the same batch before.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, resolve_block_hashes, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from zmq.utils.monitor import recv_monitor_message

from kvdepot.features.routers.feed import Description
from kvdepot.features.routers.messages import DescribedGroup, ExtraKey, News
from kvdepot.keys import KeyRun
from kvdepot.layout import GroupKind
from kvdepot_vllm.groups import EngineCache

_Place = tuple[int | None, str | None]  # group and medium

_ZMQ: Final = "zmq"  # the only publisher of vLLM that sends events
_ID_BITS: Final = (1 << 64) - 1
# The first announcement waits until the subscribers of an earlier engine are back. If its numbers followed those of the
# earlier engine, they would take it for the same.
_RETURN_SECONDS: Final = 1.0  # for the first; there may be none
_GATHER_MILLISECONDS: Final = 200  # for the next; ZeroMQ tries again after 0.1 to 0.2 seconds
_MOST_BLOCKS: Final = 1024  # in one event that retracts announced blocks


class Describer:
    """Describes chunks like vLLM's own events: by vLLM's block hashes, as integers of 64 bits.

    It describes the blocks of the groups with full attention that have the same block size as the first of them. These
    groups decide together about a hit.

    Args:
        cache: the engine's cache.
        kv_cache_config: vLLM's `KVCacheConfig`.
    """

    def __init__(self, cache: EngineCache, kv_cache_config: Any) -> None:
        self._chunk_tokens = cache.chunk_tokens
        self._hash_block_size = kv_cache_config.hash_block_size
        full = [group for group in cache.groups if group.kind is GroupKind.FULL_ATTENTION] or list(cache.groups[:1])
        self._block_tokens = full[0].block_tokens
        self._groups = tuple(
            _described_group(group.number, kv_cache_config.kv_cache_groups[group.number].kv_cache_spec)
            for group in full
            if group.block_tokens == self._block_tokens
        )

    def describe(self, request: Any, namespace: bytes, key: KeyRun) -> tuple[KeyRun, Description]:
        """Return the part of a run whose chunks have block hashes, and its description."""
        size, per_chunk = self._block_tokens, self._chunk_tokens // self._block_tokens
        hashes = resolve_block_hashes(request.block_hashes, self._hash_block_size, size)
        first = key.first_chunk * per_chunk
        num_chunks = max(0, min(key.num_chunks, len(hashes) // per_chunk - key.first_chunk))
        last = first + num_chunks * per_chunk
        item, extra_keys = 0, []
        if request.lora_request or request.cache_salt or request.mm_features or request.prompt_embeds is not None:
            for begin in range(first * size, last * size, size):
                keys, item = generate_block_hash_extra_keys(request, begin, begin + size, item)
                extra_keys.append(keys)
        return key.slice(0, num_chunks), Description(
            namespace,
            request.all_token_ids[first * size : last * size],
            [_id_of(hashes[block]) for block in range(first, last)],
            _id_of(hashes[first - 1]) if first else None,
            self._groups,
            request.lora_request.name if request.lora_request else "",
            tuple(map(_plain, to_event_extra_keys(extra_keys) or ())),
        )


def _described_group(number: int, spec: Any) -> DescribedGroup:
    return DescribedGroup(number, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec) or 0)


def _id_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "big") & _ID_BITS


def _plain(keys: Iterable[Any] | None) -> tuple[ExtraKey, ...] | None:
    """Return one block's extra keys as a message carries them: bytes as hexadecimal digits."""
    if keys is None:
        return None
    return tuple(tuple(map(_plain_one, key)) if isinstance(key, tuple | list) else _plain_one(key) for key in keys)


def _plain_one(value: Any) -> str | int:
    return value.hex() if isinstance(value, bytes) else value if isinstance(value, int) else str(value)


class Announcer:
    """Announces the depot's chunks, and retracts chunks that are no longer there.

    Attributes:
        publish: called with each list of events. None until vLLM has made its publisher; meanwhile, `take` returns the
            events.
    """

    def __init__(self) -> None:
        self.publish: Callable[[list[Any]], None] | None = None
        self._must_repeat = False  # whether a router lacks announced chunks
        self._is_repeating = False  # whether the list announces them again
        self._kept: list[Any] = []  # events that `take` returns
        self._is_heard = threading.Event()  # once subscribers are there
        self._lock = threading.Lock()
        self._announced: dict[_Place, set[int]] = {}  # ids
        self._fresh: dict[_Place, set[int]] | None = None  # ids listed anew so far; None after the list has ended
        self._decoder = msgspec.msgpack.Decoder(list[BlockStored | BlockRemoved | AllBlocksCleared])

    def on_news(self, news: News) -> None:
        """Announce the changes in a piece of news."""
        events: list[Any] = []
        if news.is_start:
            self._fresh = {}
            self._is_repeating |= self._must_repeat
            self._must_repeat = False
        for event in self._decoder.decode(news.events) if news.events else ():
            if isinstance(event, AllBlocksCleared):
                continue  # it would retract the blocks in the device's memory, too
            place = event.group_idx, event.medium
            ids, announced = event.block_hashes, self._announced.setdefault(place, set())
            if isinstance(event, BlockRemoved):
                announced.difference_update(ids)
            else:
                if self._fresh is not None:
                    self._fresh.setdefault(place, set()).update(ids)
                known = announced.intersection(ids)
                if len(known) == len(set(ids)) and not self._is_repeating:
                    continue
                # Routers that count announcements would never forget a block that was announced twice.
                events += _removals(place, sorted(known))
                announced.update(ids)
            events.append(event)
        if self._fresh is not None and not news.has_more:
            fresh, self._fresh, self._is_repeating = self._fresh, None, False
            for place, announced in self._announced.items():
                gone = announced - fresh.get(place, set())
                announced -= gone
                events += _removals(place, sorted(gone))
        self._give(events)

    def wants_all(self) -> bool:
        """Return whether the depot must list everything anew."""
        return self._must_repeat

    def on_lost(self) -> None:
        """Retract everything, because the depot is away."""
        announced, self._announced = self._announced, {}
        self._give([event for place, ids in announced.items() for event in _removals(place, sorted(ids))])

    def _give(self, events: list[Any]) -> None:
        if events and self.publish is not None:
            self._is_heard.wait(_RETURN_SECONDS)
            self._is_heard.set()
            self.publish(events)
        elif events:
            with self._lock:
                self._kept += events

    def take(self) -> list[Any]:
        """Return the events that could not be published."""
        if not self._kept:
            return []
        with self._lock:
            events, self._kept = self._kept, []
        return events

    def watch_publisher(self) -> None:
        """Publish through the publisher that vLLM makes after the connector, in the same process."""
        registry: dict[str, Any] = getattr(EventPublisherFactory, "_registry", {})
        make = registry.get(_ZMQ)
        if make is None:
            return

        def make_and_keep(**options: Any) -> Any:
            registry[_ZMQ] = make
            publisher = make(**options)
            publish = publisher.publish
            self.publish = lambda events: publish(KVEventBatch(ts=time.time(), events=events))

            def publish_and_watch(batch: Any) -> None:
                publish(batch)
                if any(isinstance(event, AllBlocksCleared) for event in batch.events):
                    self._must_repeat = True  # vLLM means its own blocks, but routers forget the depot's, too

            publisher.publish = publish_and_watch
            socket = getattr(publisher, "_pub", None)
            if socket is not None:
                arrivals = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED)
                threading.Thread(target=self._greet, args=(arrivals,), name="kvdepot-greeter", daemon=True).start()
            return publisher

        registry[_ZMQ] = make_and_keep

    def _greet(self, arrivals: "zmq.Socket[bytes]") -> None:
        """Send each subscriber that arrives the events that it missed, until the publisher closes."""
        assert self.publish is not None
        with arrivals, contextlib.suppress(RuntimeError, zmq.ContextTerminated):  # it is closing
            while recv_monitor_message(arrivals)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if not arrivals.poll(_GATHER_MILLISECONDS):
                    self._must_repeat |= self._is_heard.is_set()
                    self._is_heard.set()
                    self.publish([])


def _removals(place: _Place, ids: Sequence[int]) -> list[BlockRemoved]:
    group, medium = place
    return [
        BlockRemoved(list(ids[start : start + _MOST_BLOCKS]), medium=medium, group_idx=group, locality="LOCAL")
        for start in range(0, len(ids), _MOST_BLOCKS)
    ]

"""A stand-in for llm-d's router: subscribes, decodes and indexes by the rules of its adapter for vLLM.

The rules are those of llm-d-kv-cache, `pkg/kvevents` (read 2026-11): it subscribes to `kv@`, takes pod and model from
a topic of three parts, cuts tokens into blocks of its own size, and hashes each with its parent's key. It drops blocks
with an unknown parent, and removals of unknown blocks. It has no replay.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from blake3 import blake3

from support.events import Context, kept

Place = tuple[str, str, int | None]  # pod, tier, group


class Index:
    """Maps blocks to the pods that have them."""

    def __init__(self, endpoint: str, context: Context, block_tokens: int) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"kv@")
        self.socket.connect(endpoint)
        kept.append(self.socket)
        self.num_skipped = 0
        self._block_tokens = block_tokens
        self._keys: dict[int, list[bytes]] = {}  # the index's own keys, by the engine's id
        self._places: defaultdict[bytes, set[Place]] = defaultdict(set)

    def take_all(self) -> None:
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            assert len(frames) == 3
            topic, number, payload = frames
            assert len(number) == 8
            prefix, pod, model = topic.decode().split("@")
            assert prefix == "kv"
            for event in msgspec.msgpack.decode(payload)[1]:
                self._take(event, pod, model)

    def _take(self, event: dict[str, Any], pod: str, model: str) -> None:
        place = pod, (event.get("medium") or "gpu").lower(), event.get("group_idx")
        match event["type"]:
            case "AllBlocksCleared":
                for places in self._places.values():
                    places.difference_update({each for each in places if each[0] == pod})
            case "BlockRemoved":
                for each in event["block_hashes"]:
                    for key in self._keys.get(each, ()):
                        self._places[key].discard(place)
            case "BlockStored":
                self._store(event, place, event.get("lora_name") or model)
            case other:
                raise AssertionError(other)

    def _store(self, event: dict[str, Any], place: Place, model: str) -> None:
        ids, before = event["block_hashes"], b""
        assert all(0 <= each < 1 << 64 for each in ids)
        if event["parent_block_hash"]:
            keys = self._keys.get(event["parent_block_hash"])
            if keys is None:
                self.num_skipped += 1
                return
            before = keys[-1]
        keys = self.keys(event["token_ids"], model, before)
        if not keys:
            self.num_skipped += 1
            return
        for number, key in enumerate(keys):
            self._places[key].add(place)
            engine_id = ids[number * len(ids) // len(keys)]
            if number * len(ids) % len(keys) < len(ids):
                self._keys[engine_id] = []
            self._keys[engine_id].append(key)

    def keys(self, tokens: Sequence[int], model: str, before: bytes = b"") -> list[bytes]:
        found: list[bytes] = []
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            before = blake3(repr((before, tokens[start : start + self._block_tokens], model)).encode()).digest()
            found.append(before)
        return found

    def scores(self, tokens: Sequence[int], model: str) -> dict[str, int]:
        """Return how many leading blocks of a prompt each pod has."""
        self.take_all()
        scores: dict[str, int] = {}
        for number, key in enumerate(self.keys(tokens, model)):
            for pod in {place[0] for place in self._places[key]}:
                if scores.get(pod, 0) == number:
                    scores[pod] = number + 1
        return scores

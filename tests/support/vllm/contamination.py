# pyright: basic, reportMissingImports=false
"""Random traffic on vLLM's own scheduler with a pretend model: `contamination.py MODEL SEED STEPS TAINT`.

vLLM's scheduler and block pool, the connector's scheduler and worker sides and the depot's index are real. The model is
not: the KV of a token is the digest of all tokens up to it, or "blended" if it was computed from any KV that is not
exact. So each step shows whether a request got blended KV without asking for it. There are two workers, and one of them
may fail. Prints its counts as JSON.
"""

import json
import logging
import random
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from kvdepot.client.answers import MISS, Lease
from kvdepot.engines.generation import Generation
from kvdepot.keys import KeyRun, Namespace
from kvdepot.layout import GroupKind
from kvdepot.wire import messages as m
from support.index import FULL, Bench

BLOCK = 16
NUM_BLOCKS = 200
DOCUMENTS = 6
BLENDED = -1


def chains(tokens: Any) -> list[int]:
    """Return the exact KV of each token."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


class Future:
    """A retrieve that ends after some polls."""

    num_bytes, seconds = 0, 0.0

    def __init__(self, polls: int, do: Any) -> None:
        self.num_chunks = 0
        self._polls, self._do, self._result = polls, do, None

    def query(self) -> bool:
        self._polls -= 1
        if self._polls < 0 and self._result is None:
            self.num_chunks, self._result = self._do()
        return self._result is not None

    def result(self, timeout: float | None = None) -> bool:
        while not self.query():
            pass
        return bool(self._result)


class Rank:
    """The memory of one worker, with its context and its blender."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.slots: list[Any] = [None] * (NUM_BLOCKS * BLOCK)
        self.block_tokens = BLOCK

    # the context

    def submit_retrieve(self, request_id: str, key: KeyRun, block_ids: Any, skip_tokens: int) -> Future:
        rng = self.world.rng

        def do() -> tuple[int, bool]:
            for chunk in range(key.num_chunks):
                values = self.world.stored.get(key.slice(chunk, chunk + 1).digests)
                if values is None or rng.random() < 0.002:
                    return chunk, False
                for place, value in enumerate(values):
                    if chunk * BLOCK + place >= skip_tokens:
                        self.slots[block_ids[0][chunk] * BLOCK + place] = value
            return key.num_chunks, True

        return Future(rng.randrange(6), do)

    def submit_store(self, request_id: str, key: KeyRun, block_ids: Any, ready: Any = None) -> Future:
        def do() -> tuple[int, bool]:
            for chunk in range(key.num_chunks):
                at = block_ids[0][chunk] * BLOCK
                values = self.slots[at : at + BLOCK]
                digest = key.slice(chunk, chunk + 1).digests
                if digest not in self.world.exact:
                    raise AssertionError("a chunk of a prompt that nobody has")
                if values != self.world.exact[digest]:
                    self.world.counts["stored_blended"] += 1
                self.world.stored[digest] = values
            for first in range(0, key.num_chunks, m.MAXIMUM_STORE_ENTRIES):
                self.world.worker.store(key.slice(first, first + m.MAXIMUM_STORE_ENTRIES))
            return key.num_chunks, True

        return Future(0, do)

    # the blender

    def move(self, from_slots: Any, to_slots: Any, old: Any, new: Any) -> None:
        values = [self.slots[slot] for slot in from_slots.tolist()]
        assert None not in values
        for slot in to_slots.tolist():
            self.slots[slot] = BLENDED

    def recompute(self, tokens: Any, positions: Any, table: Any) -> None:
        if self.world.rng.random() < 0.003:
            raise RuntimeError("the pretend model fails")
        self.compute(tokens.tolist(), positions.tolist(), table.tolist())

    def choose(self, policy: str, tokens: Any, runs: Any, table: Any, question: Any, budget: Any) -> Any:
        if question is not None:  # this writes the question's KV
            self.compute(tokens.tolist(), list(range(*question)), table.tolist())
        chosen = torch.cat([torch.arange(begin, end) for begin, end in runs])
        return chosen[: int(len(chosen) * budget.ratio)]

    # the model

    def compute(self, tokens: Any, positions: list[int], table: Any) -> int:
        """Compute tokens in ascending order. Return how many were computed from KV that is not exact."""
        wanted, exact, is_exact, num_wrong = set(positions), chains(tokens[: positions[-1] + 1]), True, 0
        for position, value in enumerate(exact):
            slot = table[position // BLOCK] * BLOCK + position % BLOCK
            if position in wanted:
                num_wrong += not is_exact
                self.slots[slot] = value if is_exact else BLENDED
            is_exact &= self.slots[slot] == value
        return num_wrong


class Client:
    """A scheduler's client without a socket."""

    token_seconds = 0.0

    def __init__(self, world: "World") -> None:
        self._worker = world.worker

    def submit_lookup(self, request_id: str, key: KeyRun, **_: Any) -> Any:
        reply = self._worker.ask(m.Lookup(self._worker.context, request_id, key.digests))
        return Answered(Lease(reply.num_chunks, reply.lease) if reply.lease else MISS)

    def submit(self, make: Any, missing: Any, read: Any) -> Any:
        return Answered(read(self._worker.ask(make(self._worker.context)), None) or missing)

    def post(self, make: Any) -> None:
        for request in make(self._worker.context):
            self._worker.ask(request)

    def release(self, lease: Lease) -> None:
        self._worker.ask(m.Release(self._worker.context, (lease.number,)))

    def end_request(self, request_id: str) -> None:
        self._worker.ask(m.EndRequest(self._worker.context, request_id))


class Answered:
    """A lookup that already has its answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def query(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True

    def result(self) -> Any:
        return self._answer

    def cancel(self) -> None:
        pass


class World:
    def __init__(self, model: str, seed: int) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from kvdepot_vllm.blend import planning
        from kvdepot_vllm.blend.worker import BlendWorker
        from kvdepot_vllm.groups import EngineCache, EngineGroup
        from kvdepot_vllm.scheduler import SchedulerSide
        from kvdepot_vllm.settings import Settings
        from kvdepot_vllm.worker import WorkerSide

        planning.LEAST_RUN_TOKENS, planning.RECOMPUTE_COST = 16, 0.1  # so that nearly all tokens are blended
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.stored: dict[bytes, Any] = {}
        self.exact: dict[bytes, Any] = {}
        self.worker = Bench((m.GroupShape(FULL, BLOCK),), chunk_tokens=BLOCK, pages=800, num_records=1024).worker()
        transfer = KVTransferConfig(
            kv_connector="KVDepotConnector",
            kv_role="kv_both",
            kv_connector_module_path="kvdepot_vllm.connector",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"kvdepot.blend": "request"},
        )
        config = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=1024,
            block_size=BLOCK,
            max_num_seqs=16,
            max_num_batched_tokens=160,
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
        groups = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(config, groups, StructuredOutputManager(config), BLOCK, log_stats=False)
        init_none_hash(_hash())
        settings = Settings(blend="request", blend_min_tokens=32, blend_step_tokens=40)
        group = EngineGroup(0, GroupKind.FULL_ATTENTION, BLOCK, 0, ("layer",), False, False)
        cache = EngineCache((group,), 1, BLOCK, 1, "float32", "format")
        client: Any = Client(self)
        self.namespace = Namespace("model")
        self.side = SchedulerSide(
            cache, Generation(self.namespace, 2), settings, client, 2, can_blend=True, clock=lambda: 0.0
        )
        self.side.bind_block_pool(self.scheduler.kv_cache_manager.block_pool)
        self.scheduler.connector.scheduler_side = self.side
        self.scheduler.connector.get_kv_connector_stats = lambda: None  # this call would take the counters
        self.ranks = [Rank(self) for _ in range(2)]
        self.workers: list[WorkerSide] = []
        for rank in self.ranks:
            fake: Any = rank
            worker = BlendWorker(fake, fake, BLOCK, settings.blend_step_tokens)
            self.workers.append(WorkerSide(fake, BLOCK, BLOCK, worker))
        self.documents = [self.text(self.rng.randrange(80, 160)) for _ in range(DOCUMENTS)]
        self.prompts: list[list[int]] = []
        self.finished: dict[str, int] = {}
        self.table: dict[str, list[int]] = {}
        self.asked_blend: set[str] = set()

    def text(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(5, 2000) for _ in range(num_tokens)]

    def add(self, number: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        rng = self.rng
        if self.prompts and rng.random() < 0.4:
            prompt = rng.choice(self.prompts[-6:])
        else:
            prompt = [token for _ in range(rng.randrange(1, 4)) for token in rng.choice(self.documents)]
            prompt = prompt + self.text(rng.randrange(4, 40))
            self.prompts.append(prompt)
        blend = rng.random() < 0.7
        wish = {"policy": rng.choice(["none", "heads", "mixkq"]), "ratio": rng.choice([0, 0.1, 0.3])} if blend else None
        name = f"r{number}"
        if blend:
            self.asked_blend.add(name)
        params = SamplingParams(
            max_tokens=rng.randrange(1, 150),
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvdepot": {"blend": wish}}} if wish else None,
        )
        hasher = get_request_block_hasher(BLOCK, _hash())
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))

    def step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduler, rng = self.scheduler, self.rng
        for request in scheduler.requests.values():
            self.learn(list(request.all_token_ids))
        output = scheduler.schedule()
        for name in output.preempted_req_ids or ():
            self.counts["preempted"] += 1
            self.table.pop(name, None)
        plan = output.kv_connector_metadata.plan
        for worker in self.workers:
            worker.start_loads(plan)
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            start, tokens = request.num_computed_tokens - count, list(request.all_token_ids)
            table = scheduler.kv_cache_manager.get_block_ids(name)[0]
            has_blended = self.side.requests[name].exact_tokens is not None
            for rank in self.ranks:
                num_wrong = rank.compute(tokens, list(range(start, start + count)), table)
                self.counts["contaminated"] += 0 if has_blended else num_wrong
            self.counts["computed"] += count
            if start + count >= request.num_tokens:
                sampled[name] = [rng.randrange(5, 2000)]
        results = []
        for worker in self.workers:
            worker.start_stores(plan)
            results.append((worker.poll_loads(), worker.take_report()))
        for found, _ in results:
            for name in found.finished:
                self.finished[name] = self.finished.get(name, 0) + 1
        done = {name for name, count in self.finished.items() if count == len(self.workers)}
        for name in done:
            del self.finished[name]
        reports = [report for _, report in results if report is not None]
        meta = None
        if reports:
            from kvdepot_vllm.connector import ReportMetadata

            meta = ReportMetadata(reports[0] if len(reports) == 1 else reports[0].merge(reports[1]))
        names = list(output.num_scheduled_tokens)
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=[sampled.get(name, []) for name in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=KVConnectorOutput(
                    finished_recving=done or None,
                    invalid_block_ids=set().union(*(found.invalid_blocks for found, _ in results)),
                    kv_connector_worker_meta=meta,
                ),
            ),
        )

    def learn(self, tokens: list[int]) -> None:
        """Note the exact KV of each chunk of a prompt."""
        from kvdepot.keys import hash_prefix

        key = hash_prefix(self.namespace, BLOCK, tokens)
        values = chains(tokens)
        for chunk in range(key.num_chunks):
            self.exact[key.slice(chunk, chunk + 1).digests] = values[chunk * BLOCK : (chunk + 1) * BLOCK]

    def abort(self) -> None:
        from vllm.v1.request import RequestStatus

        running = [name for name, request in self.scheduler.requests.items() if not request.is_finished()]
        if running:
            self.scheduler.finish_requests(self.rng.choice(running), RequestStatus.FINISHED_ABORTED)
            self.counts["aborted"] += 1


def _hash() -> Any:
    from vllm.utils.hashing import sha256

    return sha256


def main(model: str, seed: int, num_steps: int) -> None:
    logging.disable(logging.ERROR)
    world = World(model, seed)
    for number in range(num_steps):
        burst = (
            world.rng.choice([1, 1, 1, 1, 2, 2, 12]) if world.rng.random() < 0.2 else 0
        )  # with too many, vLLM preempts
        for place in range(burst if len(world.scheduler.requests) < 6 else 0):
            world.add(20 * number + place)
        if world.rng.random() < 0.02:
            world.abort()
        if world.rng.random() < 0.003:
            world.scheduler.reset_prefix_cache()
        world.step()
    for _ in range(2000):
        if not world.scheduler.requests:
            break
        world.step()
    for _ in range(20):
        world.step()
    pool = world.scheduler.kv_cache_manager.block_pool
    world.worker.bench.index.check_integrity()
    print(
        json.dumps(
            {
                **world.counts,
                **world.side.counters,
                "left": len(world.scheduler.requests),
                "held_blocks": NUM_BLOCKS - 1 - pool.get_num_free_blocks(),
                "jobs": world.side.audit()["blends"],
            }
        )
    )


if __name__ == "__main__":
    path, seed_text, steps_text = sys.argv[1:]
    assert Path(path).exists()
    main(path, int(seed_text), int(steps_text))

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""An engine in its own process. It takes one JSON command a line and answers each with one JSON line.

The engine core runs in this process, so that a test can step it. `start` first serves the reference, the same model
without a connector, and then makes the connector's engine.
"""

import gc
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from support.leftovers import take_own_names

take_own_names()
if "vllm" in sys.modules:  # imported before the fork; else vLLM's own processes on CPU would import it again
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: fork
    os.sched_yield = lambda: time.sleep(1e-4)  # noqa: TID251  # see serve.py
    # The nursery froze the imported objects. vLLM unfreezes them at an engine's end, and then each of three collections
    # goes through all of them, for 0.6 s.
    gc.freeze = gc.unfreeze = lambda: None


def dtype_of(model: str) -> str:
    """Return float32, in which results differ least, unless vLLM refuses it: on devices, and AMX_MLA on a CPU."""
    import torch
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if not current_platform.is_cpu():
        return "bfloat16"
    config = json.loads(Path(model, "config.json").read_text())
    attention = AttentionSelectorConfig(0, torch.float32, None, None, use_mla="kv_lora_rank" in config)
    backend = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, attention))
    return "float32" if backend.supports_dtype(torch.float32) else "bfloat16"


class Child:
    def __init__(self) -> None:
        self.llm: Any = None
        self.watched: dict[str, int] = {}
        self._seen: dict[str, bytes] = {}
        self.num_requests = 0
        self.released = False

    def start(
        self,
        connector: dict[str, Any] | None,
        reference: list[list[int]],
        max_tokens: int,
        *,
        expects_depot: bool = True,
        kv_events: dict[str, Any] | None = None,
        first: str = "",
        **options: Any,
    ) -> Any:
        """Start an engine. `first` is test code that runs before the start."""
        exec(first, {})  # noqa: S102
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = {
            "dtype": dtype_of(options["model"]),
            "max_model_len": 4096,
            "enforce_eager": True,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
            **options,
        }
        outputs = []
        if reference:
            self.llm = LLM(**options)
            outputs = self.generate(reference, max_tokens)["outputs"]
            del self.llm
            gc.collect()
        if connector is not None:
            options["kv_transfer_config"] = KVTransferConfig(**connector)
        if kv_events is not None:
            from vllm.config import KVEventsConfig

            options["kv_events_config"] = KVEventsConfig(**kv_events)
        self.llm = LLM(**options)
        if expects_depot and connector is not None and connector["kv_connector"] == "KVDepotConnector":
            self.wait_for_the_depot()
        return {"outputs": outputs}

    def wait_for_the_depot(self) -> None:
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        connector = core.scheduler.connector if core is not None else None
        if connector is not None and connector.scheduler_side is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            connector.scheduler_side.wait_until_connected(20)
            get_kv_transfer_group().worker_side.context.wait_until_connected(20)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        *,
        together: bool = True,
        salt: str | None = None,
        adapter: list[Any] | None = None,
        params: dict[str, Any] | None = None,
        logprobs: int | None = None,
        images: list[list[int]] | None = None,
        embeddings: list[int] | None = None,
        mixed: list[list[int]] | None = None,
        alphabet: list[int] | None = None,
    ) -> Any:
        """Serve prompts.

        Args:
            adapter: arguments of a `LoRARequest`, see `lora_request`.
            images: seeds of the random images in each prompt.
            embeddings: seeds of random prompts of embeddings, which are also served.
            mixed: the places of token 0 in a prompt of embeddings, of which each list gives one, with equal embeddings.
            alphabet: the only tokens allowed in answers, so that answers repeat themselves.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            allowed_token_ids=alphabet,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        lora = lora_request(*adapter) if adapter else None
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": tokens} for tokens in prompts]
        for prompt, seeds in zip(inputs, images or (), strict=bool(images)):
            prompt["multi_modal_data"] = {"image": [_random_image(seed) for seed in seeds]}
        inputs += [{"prompt_embeds": _random_embeddings(seed, self._hidden_size())} for seed in embeddings or ()]
        inputs += [_mixed_prompt(places, self._hidden_size()) for places in mixed or ()]
        inputs = [{**prompt, **({"cache_salt": salt} if salt else {})} for prompt in inputs]
        batches = [inputs] if together else [[one] for one in inputs]
        started = time.perf_counter()
        outputs = []
        for batch in batches:
            for output in self.llm.generate(batch, sampling, use_tqdm=False, lora_request=lora):
                best = output.outputs[0]
                outputs.append(
                    {
                        "tokens": list(best.token_ids),
                        "cached": output.num_cached_tokens,
                        "reason": best.finish_reason,
                        "params": output.kv_transfer_params,
                        "logprobs": [max(p.logprob for p in places.values()) for places in best.logprobs or []],
                    }
                )
        seconds = time.perf_counter() - started
        self.drain()
        return {"outputs": outputs, "seconds": seconds}

    def first_token(self, prompt: list[int], max_tokens: int) -> Any:
        """Serve one request. Answer with the times of its first token and its end, in seconds since its submission."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.num_requests += 1
        first = 0.0
        last: Any = None
        started = time.perf_counter()
        engine.add_request(f"request-{self.num_requests}", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first = first or (time.perf_counter() - started if output.outputs[0].token_ids else 0.0)
                last = output
        finished = time.perf_counter() - started
        self.drain()
        settled = time.perf_counter() - started
        return {
            "first_token_seconds": first,
            "finished_seconds": finished,
            "settled_seconds": settled,
            "cached": last.num_cached_tokens,
            "tokens": list(last.outputs[0].token_ids),
        }

    def drain(self, seconds: float = 60.0) -> Any:
        """Step until no blocks are held for stores any more."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        end = time.monotonic() + seconds
        while core is not None and core.scheduler.has_requests():
            assert time.monotonic() < end, "the engine does not come to rest"
            self.llm.llm_engine.step()
        return {}

    def _hidden_size(self) -> int:
        return self.llm.llm_engine.vllm_config.model_config.get_hidden_size()

    def reset(self, *, connector: bool = False) -> Any:
        return {"done": self.llm.reset_prefix_cache(reset_connector=connector)}

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def update_weights(self, seed: int) -> Any:
        """Overwrite the engine's weights, as a trainer does."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        model = self.core.model_executor.driver_worker.worker.model_runner.get_model()
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2 and "norm" not in name:
                parameter.data.normal_(0, 0.06, generator=generator)
        return {}

    def sleep(self, level: int, mode: str) -> Any:
        """Sleep as vLLM 0.33 does on a device. Until `wake_up`, touching the cache ends this process."""
        from vllm.v1.worker.cpu_worker import CPUWorker

        from support.vllm import sleeping

        CPUWorker.sleep, CPUWorker.wake_up = sleeping.sleep, sleeping.wake_up
        if mode == "abort":  # a core in this process neither reports its aborts nor waits for their transfers
            self.llm.llm_engine.abort_request([*self.llm.llm_engine.output_processor.request_states], internal=True)
            self.drain()
        self.core.sleep(level, mode)
        return {}

    def wake_up(self, tags: list[str] | None = None) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.core.wake_up(tags)
        if tags is None or "kv_cache" in tags:  # then 0.33 collects the workers' metadata once more
            told = get_kv_transfer_group().get_handshake_metadata()
            self.core.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told} if told else {})
            self.wait_for_the_depot()
        return {}

    def metrics(self) -> Any:
        return {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}

    def watch(self, stored: dict[str, str] | None = None) -> Any:
        """From now on, keep a digest of every stored chunk by its key, and compare it at each load.

        `stored` are digests of another engine, as its `stored_digests` returned them. A chunk's bytes are taken layer
        by layer and block by block, so that engines whose blocks have other sizes compare where tokens lie outermost.
        """
        from blake3 import blake3
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvdepot.layout import GroupKind
        from kvdepot_vllm.worker import WorkerSide

        connector = get_kv_transfer_group()
        cache, context = connector.cache, connector.worker_side.context
        seen = self._seen = {} if stored is None else {key: bytes.fromhex(digest) for key, digest in stored.items()}
        self.watched = {"stored": 0, "loaded": 0, "wrong": 0, "unknown": 0}

        def entries(job: Any, num_chunks: int) -> Any:
            for number, (group, ids) in enumerate(zip(cache.groups, job.block_ids, strict=True)):
                step = 1 if group.kind is GroupKind.RECURRENT else cache.chunk_tokens // group.block_tokens
                covered = len(ids) // step
                for place in range(covered):
                    chunk = job.key.num_chunks - covered + place
                    blocks = ids[place * step : (place + 1) * step]
                    if chunk < num_chunks and -1 not in blocks:
                        key = job.key.digests[32 * chunk : 32 * chunk + 32]
                        yield f"{key.hex()}/{number}", self._bytes_of(number, blocks)

        def start_stores(side: Any, plan: Any) -> None:
            for job in plan.stores:
                for key, data in entries(job, job.key.num_chunks):
                    seen.setdefault(key, blake3(data).digest())
                    self.watched["stored"] += 1
            started(side, plan)

        def poll_loads(side: Any) -> Any:
            jobs = {request_id: load.job for request_id, load in side.loads.items()}
            futures = {request_id: load.future for request_id, load in side.loads.items()}
            results = polled(side)
            for request_id in results.finished:
                job, future = jobs[request_id], futures[request_id]
                for key, data in entries(job, future.num_chunks if future is not None else 0):
                    self.watched["loaded"] += 1
                    self.watched["unknown"] += key not in seen
                    self.watched["wrong"] += seen.get(key, blake3(data).digest()) != blake3(data).digest()
            return results

        self._groups = self.groups_of(context)
        started, polled = WorkerSide.start_stores, WorkerSide.poll_loads
        WorkerSide.start_stores, WorkerSide.poll_loads = start_stores, poll_loads
        return {}

    def stored_digests(self) -> Any:
        """Return the digests that `watch` kept, by key and group."""
        return {key: digest.hex() for key, digest in self._seen.items()}

    def fault(self, kind: str, num_chunks: int = 0) -> Any:
        """From now on, hold all loads until `release` ("hold"), or fail them after their first `num_chunks` ("fail").

        A failed load leaves wrong values in the blocks that it did not fill. They are finite, as vLLM multiplies masked
        rows by 0.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        context = connector.worker_side.context
        submit = type(context).submit_retrieve.__get__(context)
        child = self

        class Faulty:
            num_bytes, seconds = 0, 0.0

            def __init__(self, future: Any, key: Any, block_ids: Any) -> None:
                self.future, self.key, self.block_ids = future, key, block_ids

            @property
            def num_chunks(self) -> int:
                return min(num_chunks, self.future.num_chunks) if kind == "fail" else self.future.num_chunks

            def query(self) -> bool:
                return self.future.query() and (kind == "fail" or child.released)

            def result(self, timeout_seconds: float | None = None) -> bool:
                if not self.query():
                    raise TimeoutError
                whole = self.future.result()
                if kind != "fail":
                    return whole
                for number, (group, ids) in enumerate(zip(connector.cache.groups, self.block_ids, strict=True)):
                    step = max(1, connector.cache.chunk_tokens // group.block_tokens)
                    first = max(0, len(ids) - (self.key.num_chunks - self.num_chunks) * step)
                    for tensor in child.groups_of(context)[number]:
                        for block in ids[first:]:
                            if block >= 0 and tensor.dtype.is_floating_point:
                                tensor[block] = 777.0
                return False

        context.submit_retrieve = lambda request_id, key, ids, skip=0: Faulty(
            submit(request_id, key, ids, skip), key, ids
        )
        self.released = False
        return {}

    def hold_stores(self) -> Any:
        """From now on, hold all stores until `release`."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        context = get_kv_transfer_group().worker_side.context
        submit = type(context).submit_store.__get__(context)
        child = self

        class Held:
            num_bytes, seconds = 0, 0.0

            def __init__(self, future: Any) -> None:
                self.future = future

            def __getattr__(self, name: str) -> Any:
                return getattr(self.future, name)

            def query(self) -> bool:
                return child.released and self.future.query()

        context.submit_store = lambda *arguments: Held(submit(*arguments))
        self.released = False
        return {}

    def release(self) -> Any:
        self.released = True
        return {}

    @staticmethod
    def groups_of(context: Any) -> Any:
        return [group.tensors for group in context.copier.keep_alive.groups]

    def submit(
        self, requests: dict[str, list[int]], max_tokens: int, steps: int = 0, adapter: list[Any] | None = None
    ) -> Any:
        """Add requests and make `steps` steps."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        lora = lora_request(*adapter) if adapter else None
        for request_id, prompt in requests.items():
            self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling, lora_request=lora)
        return self.step(steps)

    def step(self, steps: int) -> Any:
        """Make `steps` steps. Answer with the requests that finished, and the tokens of each."""
        done = [output for _ in range(steps) for output in self.llm.llm_engine.step() if output.finished]
        return {
            "finished": [output.request_id for output in done],
            "tokens": {output.request_id: list(output.outputs[0].token_ids) for output in done},
        }

    def add_adapter(self, adapter: list[Any]) -> Any:
        """Load an adapter without a request, as `POST /v1/load_lora_adapter` does."""
        self.llm.llm_engine.add_lora(lora_request(*adapter))
        return {}

    def reload(self, path: str, version: str | None = None) -> Any:
        """Load other weights in place, and give them a version. vLLM keeps its own prefix cache."""
        self.core.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if version is not None:
            self.core.set_weight_version(version)
        return {}

    def abort(self, requests: list[str], steps: int = 0) -> Any:
        self.llm.llm_engine.abort_request(requests)
        for _ in range(steps):
            self.llm.llm_engine.step()
        return {}

    def state(self) -> Any:
        """Answer with the numbers of blocks, requests and transfers in the engine and the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        worker = get_kv_transfer_group().worker_side
        return {
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(scheduler.requests),
            "transfers": worker.num_pending,
            "loads": len(worker.loads),
            "connector": scheduler.connector.scheduler_side.audit(),
        }

    def _bytes_of(self, group: int, blocks: list[int]) -> bytes:
        import torch

        return b"".join(
            tensor[block].contiguous().cpu().view(torch.uint8).numpy().tobytes()
            for tensor in self._groups[group]
            for block in blocks
        )

    def execute(self, code: str) -> Any:
        """Run test code in this process and answer with its `result`."""
        scope: dict[str, Any] = {"child": self, "llm": self.llm, "result": None}
        exec(code, scope)  # noqa: S102
        return {"result": scope["result"]}


def lora_request(name: str, path: str, number: int | str, in_place: bool = False) -> Any:
    """Return a request for an adapter that is in the folder `path` and has the id `number`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, int(number), path, load_inplace=in_place)


def _random_image(seed: int) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)


def _random_embeddings(seed: int, width: int) -> Any:
    import torch

    return torch.randn(400, width, generator=torch.Generator().manual_seed(seed)) * 0.06


def _mixed_prompt(places: list[int], width: int) -> Any:
    embeddings = _random_embeddings(0, width)
    return {
        "prompt_embeds": embeddings,
        "prompt_token_ids": [0] * len(embeddings),
        "prompt_is_token_ids": [place in places for place in range(len(embeddings))],
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's output goes to the log
    child = Child()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(child, command.pop("op"))(**command)
        except BaseException as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # an orderly end of the engine takes seconds


if __name__ == "__main__":
    main()

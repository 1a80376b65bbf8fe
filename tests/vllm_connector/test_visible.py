"""Users of vLLM see the depot in counters, a log line, the source of hits, and events for routers."""

import re
from pathlib import Path
from typing import Any

from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.status import describe_status
from support.events import FLAGS
from support.vllm.engines import Engine, MakeModel, connector, prompts

PROMPT = prompts(1, 700, seed=60)

LISTEN = """
import threading, zmq
from vllm.distributed.kv_events import KVEventBatch
import msgspec
child.events = []
def listen():
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect({endpoint!r})
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    child.listening = True
    while True:
        _, _, payload = socket.recv_multipart()
        child.events += decoder.decode(payload).events
threading.Thread(target=listen, daemon=True).start()
"""

TAKE = """
import time
end = time.monotonic() + 10
while time.monotonic() < end and sum(len(e.token_ids) for e in child.events if getattr(e, "medium", "") == "CPU"
                                     and hasattr(e, "token_ids")) < 640:
    time.sleep(0.01)
result = [
    dict(medium=e.medium, hashes=[str(h) for h in e.block_hashes], tokens=len(e.token_ids), size=e.block_size,
         group=e.group_idx, kind=e.kv_cache_spec_kind)
    for e in child.events if type(e).__name__ == "BlockStored"
]
"""


def test_counters_log_line_and_source(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(model("gqa"), connector(depot.url)) as engine:
        engine.generate(PROMPT)
        (start,) = [line for line in engine.log().splitlines() if "stores prompts and answers in" in line]
        assert all(words in start for words in ("kvdepot: model ", "tenant default", "chunks of 128 tokens", depot.url))
        assert "first hit" not in engine.log()
        engine.reset()
        engine.generate(PROMPT)
        assert engine.log().count("kvdepot: first hit: request ") == 1
        metrics = engine.ask("metrics")
        num_bytes = 5 * 4 * 128 * 2 * 128 * 4  # 5 blocks, 4 layers
        assert metrics["vllm:kvdepot_store_bytes"] == metrics["vllm:kvdepot_load_bytes"] == num_bytes
        assert metrics["vllm:kvdepot_hit_tokens"] == metrics["vllm:external_prefix_cache_hits"] == 640
        assert engine.hit_sources() == {"host": 640}
        names = engine.execute("from prometheus_client import REGISTRY\nresult = [m.name for m in REGISTRY.collect()]")
        assert "vllm:kvdepot_hand_overs_missed" in names, "each declared counter is there before it counts"
        (worker,) = [line for line in describe_status(depot.status()).splitlines() if "worker on cpu" in line]
        assert re.search(r"\[\d+\] vllm \S*gqa\S* [0-9a-f]{8}, worker on cpu, pid \d+$", worker), worker
        engine.execute("llm.llm_engine.do_log_stats()")
        assert "KV Transfer metrics:" in engine.log()
        assert "Loaded MB=" in engine.log()


def test_events_tell_routers_what_the_depot_has(model: MakeModel, tmp_path: Path) -> None:
    with DepotProcess(*FLAGS, new_session=True) as depot:
        listen(depot, model, tmp_path)


def listen(depot: DepotProcess, model: MakeModel, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    events: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with Engine(model("windows"), connector(depot.url), kv_events=events, kv_cache_memory_bytes=128 << 20) as engine:
        engine.execute(LISTEN.format(endpoint=endpoint))
        for _ in range(50):  # a subscriber may miss events until the publisher knows it
            engine.generate(prompts(1, 300, seed=61))
            if engine.execute("result = bool(child.events)"):
                break
        engine.execute("child.events.clear()")
        engine.generate(PROMPT)
        stored = engine.execute(TAKE)
        by_medium = {medium: [e for e in stored if e["medium"] == medium] for medium in ("GPU", "CPU")}
        device = {digest for event in by_medium["GPU"] for digest in event["hashes"]}
        by_medium["CPU"] = [event for event in by_medium["CPU"] if device & set(event["hashes"])]  # only this prompt's
        assert {event["size"] for event in by_medium["CPU"]} == {128}
        groups = {event["group"] for event in by_medium["CPU"]}
        assert sum(len(event["hashes"]) for event in by_medium["CPU"]) == 5 * len(groups)
        assert {digest for event in by_medium["CPU"] for digest in event["hashes"]} <= device, "vLLM's own hashes"
        kinds = sorted({e["kind"] for e in by_medium["CPU"]})
        assert kinds == ["full_attention"], "windows follow from it"


def test_an_engine_that_found_no_depot_says_so_once(model: MakeModel, tmp_path: Any) -> None:
    with Engine(model("gqa"), connector(str(tmp_path)), expects_depot=False) as engine:
        for _ in range(3):
            engine.generate(PROMPT)
        lines = [line for line in engine.log().splitlines() if "no depot in" in line]
        assert len(lines) == 2, "the scheduler's side and the worker's"
        assert all("kvdepot: no depot in" in line and "the engine runs without it" in line for line in lines)


# The same as `VLLM_LOGGING_LEVEL=DEBUG` before vLLM is imported.
DEBUG = """
import importlib, os, vllm.logger
os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
importlib.reload(vllm.logger)
"""


def test_the_debug_log_says_why_a_request_was_no_hit(depot: DepotProcess, model: MakeModel) -> None:
    prompt = prompts(1, 700, seed=62)  # no other test has stored it
    with Engine(model("gqa"), connector(depot.url), first=DEBUG) as engine:
        engine.generate(prompt)
        engine.reset()
        engine.generate(prompt)
        told = re.findall(r"kvdepot: request \S+: (.*)", engine.log())
    lookup = "lookup of 5 chunks (announces them: True, awaits 0 of a prefill engine)"
    store = ["store 1 of chunks 0 to 5 begins", "a store of 5 chunks from 0 on ended, 0 were cut"]
    load = ["load of tokens 0 to 640 begins", "loaded 640 tokens under exact keys"]
    assert told[:4] == [lookup, "the depot has 0 of 5 chunks", *store], told
    assert told[4:8] == [lookup, "the depot has 5 of 5 chunks", *load], told

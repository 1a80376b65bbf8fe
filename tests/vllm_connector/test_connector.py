"""vLLM makes both sides. The workers report the format to the scheduler, and no failure there breaks the engine."""

from pathlib import Path

import pytest

from support.vllm.engines import RunCode

SCENE = """
import sys
from types import SimpleNamespace as Space
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole as Role
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
import vllm.distributed.parallel_state as state
from kvdepot.errors import BackendUnavailable, LayoutError
from kvdepot.keys import KeyRun, Namespace
from kvdepot.layout import GroupKind
from kvdepot_vllm import connector as module, setup
from kvdepot_vllm.jobs import LoadJob, StepPlan, StoreJob
from kvdepot_vllm.groups import EngineCache, EngineGroup
from kvdepot_vllm.scheduler import SchedulerSide

SPEC = Space(groups=())
names = ("a", "b")
group = EngineGroup(0, GroupKind.FULL_ATTENTION, 16, 0, names, False, False)
layer = lambda isa: Space(get_attn_backend=lambda: type("CPUAttentionBackend", (), {}), isa=isa)
def backend(create):
    return lambda _: Space(create_context=create, settings=frozenset(), capabilities=frozenset(),
                           why_unsuited=lambda engine: None, cuts_pages=lambda row_tokens, **k: True)

good = {
    "engine_cache": lambda *_: EngineCache((group,), 1, 16, 1, "bfloat16"),
    "worker_groups": lambda *_, **__: [Space(plane=(1, 1), is_mla=False)],
    "get_backend": backend(lambda cache, **k: Space(format=cache.format, spec=SPEC, close=lambda: None)),
    "engine_namespace": lambda *_, **__: Namespace("m"),
    "named_format": setup.named_format,
}

def use(**changes):
    for name, value in {**good, **changes}.items():
        setattr(setup if hasattr(setup, name) else module, name, value)

def raising(error):
    def raises(*_, **__):
        raise error
    return raises

def config(isa="amx"):
    parallel = Space(pipeline_parallel_size=1, tensor_parallel_size=1, world_size=1)
    transfer = Space(kv_connector_extra_config={"kvdepot.url": sys.argv[1]}, engine_id="e", kv_role="kv_both",
                     kv_load_failure_policy="recompute")
    return Space(kv_transfer_config=transfer, parallel_config=parallel, kv_events_config=None,
                 model_config=Space(model="m", served_model_name="m"),
                 cache_config=Space(enable_prefix_caching=True, cache_dtype="auto"),
                 compilation_config=Space(static_forward_context={name: layer(isa) for name in names}))

def make(role, isa="amx"):
    return module.KVDepotConnector(config(isa), role, Space(num_blocks=8, kv_cache_groups=[1]))

def worker(isa="amx"):
    made = make(Role.WORKER, isa)
    module.get_kv_transfer_group = lambda: made
    made.register_kv_caches({})
    return made

for name in ("tp", "pp", "pcp", "dcp"):
    setattr(state, f"get_{name}_group", lambda: Space(rank_in_group=0))
key = KeyRun(bytes(32), 0, bytes(32))
"""


def said(output: str) -> list[list[str]]:
    """Return the lines that the scene printed, split into words."""
    return [line.split() for line in output.splitlines() if line.endswith(("True", "False"))]


FAILURES = (
    SCENE
    + """
def serves(made):
    \"\"\"A step with a load and a store comes to its end.\"\"\"
    plan = StepPlan((LoadJob("r", key, ([1],), 0),), (StoreJob(7, "s", key, ([2],)),))
    made.bind_connector_metadata(module.StepMetadata(plan))
    made.wait_for_save()
    results = made.get_transfer_results(set())
    return results.failed_recving == {"r"}, made.build_connector_worker_meta().report.ended == {7: (1, 0)}

errors = [RuntimeError("a bug"), MemoryError(), TypeError("another"), BackendUnavailable("gone"), LayoutError("no")]
for error in errors:
    for place in ("get_backend", "worker_groups", "named_format"):
        use(**{place: raising(error)})
        made = worker()
        told = made.get_handshake_metadata()
        scheduler = make(Role.SCHEDULER)
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        print("register", told.format == "", *serves(made), scheduler.scheduler_side is None,
              scheduler.get_num_new_matched_tokens(Space(request_id="r"), 0) == (0, False))
    use(engine_cache=raising(error))
    made = worker()
    print("cache", made.get_handshake_metadata().format == "", *serves(made), make(Role.SCHEDULER).cache is None)
    use(engine_namespace=raising(error))
    scheduler = make(Role.SCHEDULER)
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker().get_handshake_metadata()})
    print("namespace", scheduler.scheduler_side is None)
    context = Space(spec=SPEC, submit_retrieve=raising(error), submit_store=raising(error))
    use(get_backend=backend(lambda *a, **k: context))
    made = worker()
    print("submit", made.get_handshake_metadata().format != "", made.worker_side.context is not None)
    plan = StepPlan((LoadJob("r", key, ([1],), 0),), (StoreJob(7, "s", key, ([2],)),))
    made.bind_connector_metadata(module.StepMetadata(plan))
    made.wait_for_save()
    print("loads", made.get_transfer_results(set()).finished_recving == {"r"},
          made.get_block_ids_with_load_errors() == {1}, made.build_connector_worker_meta().report.ended == {7: (1, 0)})
"""
)


@pytest.mark.promise(28, 32)
def test_whatever_is_raised_is_no_depot_or_a_miss_and_the_engine_goes_on(run_code: RunCode, tmp_path: Path) -> None:
    """Errors at registration, at the start of loads and stores, and when the scheduler's side is made."""
    found = [
        line.split() for line in run_code(FAILURES, str(tmp_path)).splitlines() if line.endswith(("True", "False"))
    ]
    assert len(found) == 5 * 7
    assert [line for line in found if "False" in line] == []


FORMATS = (
    SCENE
    + """
use()
pools = []
SchedulerSide.bind_block_pool = lambda side, pool: pools.append(pool)
def told(*formats):
    scheduler = make(Role.SCHEDULER)
    scheduler.bind_gpu_block_pool("pool")
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, n): module.WorkerFormat(f) for n, f in enumerate(formats)})
    return scheduler

def format_of(scheduler):
    return scheduler.scheduler_side and scheduler.scheduler_side.cache.format

amx, vec = worker("amx"), worker("vec")
module.get_kv_transfer_group = lambda: amx
one = amx.get_handshake_metadata().format
module.get_kv_transfer_group = lambda: vec
other = vec.get_handshake_metadata().format
print("differ", one != other, amx.worker_side.context.format == one, vec.worker_side.context.format == other)
print("adopted", format_of(told(one)) == one, format_of(told(one, one)) == one,
      told(one) is not None and pools.pop() == "pool")
print("refused", format_of(told(one, other)) is None, format_of(told(one, "")) is None, format_of(told()) is None)

class Talkative(MultiConnector):
    def __init__(self, *connectors):
        self._connectors = connectors
    def get_handshake_metadata(self):
        return super().get_handshake_metadata()

Base = module.KVConnectorBase_V1
class Silent:
    get_handshake_metadata = Base.get_handshake_metadata
    set_xfer_handshake_metadata = Base.set_xfer_handshake_metadata
    set_xfer_handshake_metadata_pp_aware = Base.set_xfer_handshake_metadata_pp_aware

class Listening(Silent):
    def set_xfer_handshake_metadata(self, metadata):
        raise TypeError("not mine")

for others, stages, replicas, early in (
    ((), 2, 1, True), ((Silent(),), 1, 1, True), ((Silent(),), 2, 1, False), ((Listening(),), 1, 1, False),
    ((worker(),), 1, 1, False), ((), 1, 2, False)
):
    inner, scheduler = worker(), make(Role.SCHEDULER)
    inner._vllm_config.parallel_config.pipeline_parallel_size = stages
    inner._vllm_config.parallel_config.prefill_context_parallel_size = replicas
    multi = Talkative(inner, *others)
    module.get_kv_transfer_group = lambda: multi
    said = inner.get_handshake_metadata()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): said} if said else {})
    print("multi", (format_of(scheduler) is not None) == early)
    meta = inner.build_connector_worker_meta()
    print("report", (meta is None) == early)
    output = lambda meta: Space(kv_connector_worker_meta=meta, finished_recving=None, failed_recving=None,
                                invalid_block_ids=None)
    scheduler.update_connector_output(output(meta))
    scheduler.update_connector_output(output(inner.build_connector_worker_meta()))
    print("then", format_of(scheduler) == one)
"""
)


@pytest.mark.promise(70)
def test_the_scheduler_looks_up_what_its_workers_register(run_code: RunCode, tmp_path: Path) -> None:
    """It learns the format at the engine's start, or with the first step if another connector's metadata goes first."""
    found = said(run_code(FORMATS, str(tmp_path)))
    assert len(found) == 3 + 6 * 3
    assert [line for line in found if "False" in line] == []


SEATS = (
    SCENE
    + """
from kvdepot_vllm.groups import Seat
for name, place in {"tp": 3, "pp": 1, "pcp": 2, "dcp": 5}.items():
    setattr(state, f"get_{name}_group", lambda place=place: Space(rank_in_group=place))
divided = EngineGroup(0, GroupKind.FULL_ATTENTION, 128, 0, names, False, False, num_shards=8)
engine = EngineCache((divided,), 1, 128, 4, "bfloat16", num_stages=2, num_replicas=3, interleave_tokens=2)
seats, caches = [], []
def create(cache, **_):
    caches.append(cache)
    return Space(format=cache.format, spec=SPEC, close=lambda: None)
use(
    engine_cache=lambda *_: engine,
    worker_groups=lambda *each, **_: seats.append(each[3]) or [Space(plane=(1, 1), is_mla=False)],
    get_backend=backend(create),
)
worker()
print("seat", seats == [Seat(3, 1, 2, 5)], caches[0].rank == (1 * 3 + 2) * 4 + 3, caches[0].world_size == 24)
print("format", caches[0].format.endswith(" cp8x2"))
"""
)


def test_a_worker_registers_with_the_place_that_vllm_gives_it(run_code: RunCode, tmp_path: Path) -> None:
    """Its number, its part and its share of the tokens follow from vLLM's groups of ranks."""
    assert said(run_code(SEATS, str(tmp_path))) == [["seat", "True", "True", "True"], ["format", "True"]]


INVARIANT = (
    SCENE
    + """
import os
from kvdepot_vllm import encoding
encoding.seen_format = lambda *_: "seen"
use()
for value in ("0", "1"):
    os.environ["VLLM_BATCH_INVARIANT"] = value
    told = worker().get_handshake_metadata()
    print("seen" in told.format, "named" in told.format)
"""
)


@pytest.mark.promise(70)
def test_engines_that_compute_equal_bits_are_told_apart_by_names(run_code: RunCode, tmp_path: Path) -> None:
    """Another version, attention backend or device writes to the same places, but its last bits differ."""
    assert said(run_code(INVARIANT, str(tmp_path))) == [["True", "False"], ["False", "True"]]


CUDA = (
    SCENE
    + """
from vllm import platforms
calls = []
def create_context(*_, **options):
    name = len([call for call in calls if call.startswith("create")])
    calls.append(f"create{name}{options.get('register_when_asked')}")
    serve = lambda: calls.append(f"serve{name}")
    return Space(spec=SPEC, close=lambda: calls.append(f"close{name}"), start_registering=serve)
for device in ("cpu", "cuda"):
    platforms._current_platform = Space(device_type=device, device_name=device, is_rocm=lambda: False)
    calls.clear()
    use(get_backend=backend(create_context), named_format=lambda *_: "format")
    made = worker()
    made.register_kv_caches({})
    print("registered", calls == ["create0True", "close0", "create1True"])
    made.reset_capture_state()
    print("captured", calls[3:] == ["serve1"])
    made.unregister_kv_caches()
    made.unregister_kv_caches()
    print("asleep", calls[4:] == ["close1"] and made.worker_side.context is None)
    made.restore_kv_caches()
    print("awake", calls[5:] == ["create2True", "serve2"] and made.worker_side.context is not None)
    print("sleep", made.supports_sleep_mode(None))
"""
)


def test_a_second_registration_closes_the_first_captures_end_before_the_pool_is_registered_and_sleep_gives_it_up(
    run_code: RunCode,
) -> None:
    output = said(run_code(CUDA, "/nowhere"))
    assert len(output) == 10
    assert all(word == "True" for _, word in output), output


TILES = (
    SCENE
    + """
import logging, torch
from vllm import platforms
calls = []
logging.getLogger("kvdepot_vllm.setup").warning = lambda text: calls.append(text)
def create_context(*_, **__):
    calls.append("create")
    return Space(spec=SPEC, close=lambda: None)
CASES = (("cpu", True, True), ("cpu", True, False), ("cpu", False, True), ("cuda", True, True))
for device, has_tiles, granted in CASES:
    platforms._current_platform = Space(device_type=device, device_name=device, is_rocm=lambda: False)
    torch.cpu._is_amx_tile_supported = lambda: has_tiles
    torch.cpu._init_amx = lambda: calls.append("ask") or granted
    calls.clear()
    use(get_backend=backend(create_context), named_format=lambda *_: "format")
    worker()
    asked = ["ask"] if device == "cpu" and has_tiles else []
    print("order", [call for call in calls if len(call) < 8] == [*asked, "create"])
    print("warned", any("SIGILL" in call for call in calls) == (not granted))
"""
)


def test_a_worker_on_a_cpu_with_amx_asks_for_tiles_before_it_registers(run_code: RunCode) -> None:
    output = said(run_code(TILES, "/nowhere"))
    assert len(output) == 8
    assert all(word == "True" for _, word in output), output

"""Two ranks find the tier's entries of an engine of one rank, after a restart of the machine or on another node."""

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.keys import KeyRun
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.layout import Part, Plane
from kvdepot.testing.plan import Cache, GroupPlan, WorkerPlan, prompt
from support.mooncake.cluster import Client, Master, need_sdk
from support.tiers.servers import S3Server, ValkeyServer, valkey_program
from support.tools import needs_tool

workers = pytest.importorskip("support.cpu.workers", reason="engines need kvdepot-cpu")
pytestmark = pytest.mark.slow

WAIT_SECONDS = 30.0
HEADS, CHUNKS = 8, 8  # after fewer chunks, an object store waits two seconds for more


def plan_of(size: int, rank: int) -> WorkerPlan:
    part = Part(0, 1, rank * HEADS // size, HEADS // size)
    full = GroupPlan(page_sizes_bytes=(256 * part.num_heads,) * 2, part=part, plane=Plane(1, HEADS))
    tokens_first = GroupPlan(page_sizes_bytes=(512 * part.num_heads,), part=part, plane=Plane(1, HEADS), rows=16)
    return WorkerPlan((full, tokens_first), instance=f"engine of {size}", rank=rank, world_size=size)


class Engine:
    """The ranks of an engine on one depot, and its scheduler."""

    def __init__(self, depot: DepotProcess, size: int) -> None:
        plans = [plan_of(size, rank) for rank in range(size)]
        self.ranks = [Cache(workers.NumpyWorker(depot.url, plan), plan) for plan in plans]
        for rank in self.ranks:
            rank.worker.wait_until_connected(WAIT_SECONDS)
        self.scheduler = SchedulerClient(
            self.ranks[0].worker.spec, f"engine of {size}", url=depot.url, deadline_seconds=WAIT_SECONDS
        )
        self.scheduler.wait_until_connected(WAIT_SECONDS)

    def store(self, run: KeyRun) -> None:
        assert all(rank.store(run) for rank in self.ranks)

    def retrieve(self, run: KeyRun) -> list[int]:
        """Return how many chunks each rank retrieves. Check their bytes."""
        return [rank.retrieve(run) for rank in self.ranks]

    def close(self) -> None:
        self.scheduler.close()
        for rank in self.ranks:
            rank.context.close()


@contextlib.contextmanager
def valkey(folder: Path) -> Generator[str]:
    server = ValkeyServer(folder)
    yield server.url()
    server.kill()


@contextlib.contextmanager
def s3() -> Generator[str]:
    server = S3Server()
    yield server.url("prefix", "&deadline=20")
    server.kill()


@contextlib.contextmanager
def mooncake() -> Generator[str]:
    """A cluster whose memory belongs to no depot, as in `deploy/kubernetes/mooncake`."""
    master = Master()
    with contextlib.closing(Client(master, 256 << 20)):
        yield f"mooncake://{master.address}?segment=0"
    master.kill()


@pytest.fixture(
    params=[
        "disk",
        "files",
        pytest.param("valkey", marks=needs_tool(valkey_program(), "no valkey here")),
        "s3",
        "mooncake",
    ]
)
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty tier that outlives its depots."""
    if request.param == "mooncake":
        need_sdk()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = {"valkey": lambda: valkey(tmp_path), "s3": s3, "mooncake": mooncake}
    if request.param in servers:
        with servers[request.param]() as url:
            yield url
    else:
        yield f"disk://{tmp_path}/tier?capacity=1GiB" if request.param == "disk" else f"file://{tmp_path}"


@pytest.mark.parametrize(("stored_by", "read_by"), [(1, 2), (2, 1), (2, 4)])
def test_engines_of_other_sizes_find_the_entries_of_a_tier_on_an_empty_pool(
    tier: str, stored_by: int, read_by: int
) -> None:
    run = prompt(CHUNKS)
    with DepotProcess("--tier", tier) as depot, contextlib.closing(Engine(depot, stored_by)) as engine:
        engine.store(run)
        num_entries = CHUNKS * len(plan_of(1, 0).groups) * stored_by
        wait_until(lambda: depot.status().tiers[0].counters.get("written_entries") == num_entries, what="the writes")
    with DepotProcess("--tier", tier) as depot, contextlib.closing(Engine(depot, read_by)) as engine:
        assert engine.scheduler.submit_lookup("request", run).result().num_chunks == CHUNKS
        assert engine.retrieve(run) == [CHUNKS] * read_by


@pytest.mark.promise(77)
def test_a_prefill_engine_of_one_rank_hands_over_to_two_of_another_node(tmp_path: Path) -> None:
    run, tier = prompt(CHUNKS), f"file://{tmp_path}"
    with (
        DepotProcess("--tier", tier) as here,
        DepotProcess("--tier", tier) as there,
        contextlib.closing(Engine(here, 1)) as prefill,
        contextlib.closing(Engine(there, 2)) as decode,
    ):
        waiting = decode.scheduler.submit_lookup("request", run, joins=True, awaits=CHUNKS, wait_seconds=WAIT_SECONDS)
        prefill.scheduler.submit_lookup("request", run, hands_over=True).result()
        prefill.store(run)
        assert waiting.result().num_chunks == CHUNKS
        assert decode.retrieve(run) == [CHUNKS] * 2

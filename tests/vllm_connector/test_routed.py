"""Real engines behind a real router, which learns about their depots from the engines' announcements."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from support.events import FLAGS, Context, Listener
from support.routers import HOST_CREDIT, Front, VllmRouter, free_ports
from support.vllm.engines import Engine, MakeModel, Prompt, cached, connector, prompts

BLOCK = 128  # tokens; a block is a chunk
HELD = 5 * BLOCK  # tokens that the depot holds of a prompt of 700
DEVICE_BYTES = 8 << 20  # 16 blocks: room for two prompts and the blocks of the next one
POOL_CHUNKS = 48

LISTEN_ON_LOOPBACK = """
from vllm.distributed.kv_events import ZmqEventPublisher
ZmqEventPublisher._is_bind_endpoint = staticmethod(lambda endpoint: True)  # it binds to all interfaces, or connects
"""


class Served(Front):
    """A vLLM engine with its front, which stays up while the engine restarts."""

    def __init__(self, name: str, model: Path, depot: DepotProcess, context: Context) -> None:
        super().__init__(name, self._serve)
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        self._model, self._depot, self._context = model, depot, context
        self.engine = self._start()

    def compute(self, asked: list[Prompt]) -> None:
        """Serve prompts without the router, each until it is stored, as its blocks are held until then."""
        assert [self._serve(prompt) for prompt in asked] == [0] * len(asked)

    def is_known(self, router: VllmRouter) -> bool:
        """Return whether a router has heard of all chunks in the depot."""
        has_told = self._listener.num_found() == self._depot.status().num_chunks
        return has_told and router.last_heard(self) + 1 == self._listener.next

    def restart(self) -> None:
        self.engine.close()
        self.engine = self._start()

    def close(self) -> None:
        super().close()
        self.engine.close()

    def _start(self) -> Engine:
        self._listener = Listener(self.events, self._context)
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events}
        return Engine(
            self._model,
            connector(self._depot.url),
            max_tokens=1,
            kv_events={**events, "replay_endpoint": self.replay},
            kv_cache_memory_bytes=DEVICE_BYTES,
            max_model_len=1024,
            first=LISTEN_ON_LOOPBACK,
        )

    def _serve(self, prompt: Prompt) -> int:
        return cached(self.engine.generate([prompt]))[0]


@pytest.fixture
def depots() -> Iterator[list[DepotProcess]]:
    """Two nodes' depots, with room for nine prompts each."""
    with contextlib.ExitStack() as opened:
        size = f"{POOL_CHUNKS // 2 + 1}MiB"
        yield [
            opened.enter_context(DepotProcess(*FLAGS, "--policy", "lru", pool_size=size, new_session=True))
            for _ in range(2)
        ]


def test_prompts_go_to_the_engines_of_the_depot_that_holds_them(
    depots: list[DepotProcess], model: MakeModel, tmp_path: Path, context: Context
) -> None:
    """Engines A and N share a depot, B has its own. Depots hold prompts, B and the router restart, A's depot evicts."""
    with contextlib.ExitStack() as running:

        def serve(name: str, depot: DepotProcess) -> Served:
            served = Served(name, model("gqa"), depot, context)
            running.callback(served.close)
            return served

        def start_router(*engines: Served) -> VllmRouter:
            router = VllmRouter(tmp_path / "".join(each.name for each in engines), engines, BLOCK)
            running.callback(router.close)
            return router

        a, neighbour, b = engines = serve("A", depots[0]), serve("N", depots[0]), serve("B", depots[1])
        router, alone = start_router(*engines), start_router(neighbour)

        def wait_until_known() -> None:
            for engine in engines:
                wait_until(lambda: engine.is_known(router), what=f"what {engine.name} announces")  # noqa: B023

        def went(asked: list[Prompt], *to: Served) -> list[bool]:
            """Return whether each prompt went to one of the engines, and this one computed only its last tokens."""
            routed = [router.route(prompt) for prompt in asked]
            return [name in [each.name for each in to] and found == HELD for name, found in routed]

        first, second = prompts(4, 700, seed=80), prompts(4, 700, seed=81)
        a.compute(first)
        b.compute(second)
        wait_until_known()
        wait_until(lambda: neighbour.is_known(alone))
        assert alone.credit(first[0]) == HOST_CREDIT * HELD, "computed by A, held for both"
        assert went(first, a, neighbour) + went(second, b) == [True] * 8

        router.forget()
        b.restart()
        wait_until(lambda: b.is_known(router), what="what a restarted engine announces")
        assert went(second, b) == [True] * 4

        router.close()
        router = start_router(*engines)
        wait_until_known()  # while all engines are idle
        assert went(first, a, neighbour) + went(second, b) == [True] * 8

        moved = prompts(6, 700, seed=82)
        a.compute(moved)
        ask_depot(o.Clear(), depots[1].url, 30)
        a.compute(prompts(POOL_CHUNKS // 5 + 1, 700, seed=83))
        b.compute(moved)
        wait_until_known()
        assert went(moved, b) == [True] * 6

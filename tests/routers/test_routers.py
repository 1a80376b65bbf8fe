"""Two unmodified routers over two nodes know what each depot holds, also after moves, restarts and losses."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import wait_until
from kvdepot.operate import operations as o
from support.routers import DynamoIndexer, Node, VllmRouter

pytestmark = pytest.mark.slow

LONG = 8  # chunks
OPERATIONS = 1000


def test_prompts_go_to_the_node_that_holds_them(nodes: list[Node], tmp_path: Path) -> None:
    """There are six prompts, and three of them move. A node loses everything. Both routers restart."""
    a, b, _ = nodes
    homes = {f"prompt {number}": nodes[number % 2] for number in range(6)}
    with contextlib.ExitStack() as running:

        def start() -> tuple[VllmRouter, DynamoIndexer]:
            router, indexer = VllmRouter(tmp_path / "router", nodes), DynamoIndexer(tmp_path / "indexer", nodes)
            running.callback(router.close)
            running.callback(indexer.close)
            return router, indexer

        router, indexer = start()

        def all_at_home() -> bool:
            known = all(indexer.known(name, LONG) == {home.name: LONG} for name, home in homes.items())
            return known and all(router.choice(name, LONG) == home.name for name, home in homes.items())

        for name, home in homes.items():
            home.store(name, LONG)
        wait_until(all_at_home, 10, "6 of 6")

        moved = [name for name, home in homes.items() if home is b]
        ask_depot(o.Clear(), b.depot.url, 30)
        for name in moved:
            a.store(name, LONG)
            homes[name] = a
        wait_until(all_at_home, 10, "3 of 3 after a move")

        router.close()
        indexer.close()
        router, indexer = start()
        wait_until(all_at_home, 10, "6 of 6 after a restart of the routers")

        for name in moved:
            b.store(name, LONG // 2)
        a.restart(is_cold=False)
        wait_until(lambda: [router.choice(name, LONG) for name in moved] == ["A"] * 3, 10, "a depot that was upgraded")
        a.restart(is_cold=True)
        wait_until(
            lambda: all(indexer.known(name, LONG) == {"B": LONG // 2} for name in moved),
            10,
            "nothing known of the empty node",
        )
        wait_until(lambda: [router.choice(name, LONG) for name in moved] == ["B"] * 3, 10, "0 to the empty node")


def test_a_thousand_random_operations_leave_both_routers_with_what_the_depots_hold(
    nodes: list[Node], tmp_path: Path
) -> None:
    """Each look waits until the routers are connected again. Dynamo pauses as long as the depot was away, up to 5 s."""
    rng = random.Random(35)
    names = [f"prompt {number}" for number in range(40)]
    length = 12  # 480 chunks in all; a pool has room for half of them
    with contextlib.ExitStack() as running:
        indexer = DynamoIndexer(tmp_path / "indexer", nodes)
        running.callback(indexer.close)
        routers = {node: VllmRouter(tmp_path / f"router {node.name}", [node]) for node in nodes}
        for router in routers.values():
            running.callback(router.close)

        def differences() -> list[tuple[str, str, int, int, int]]:
            found: list[tuple[str, str, int, int, int]] = []
            for name in names:
                known = indexer.known(name, length)
                for node, router in routers.items():
                    truth = node.holds(name, length)
                    views = known.get(node.name, 0), router.credited(name, length)
                    if views != (truth, truth):
                        found.append((name, node.name, truth, *views))
            return found

        def store(node: Node) -> None:
            node.store(rng.choice(names), rng.randint(1, length))

        def clear(node: Node) -> None:
            ask_depot(o.Clear(), node.depot.url, 30)

        operations: list[tuple[Callable[[Node], None], int]] = [
            (store, 960),
            (clear, 8),
            (Node.restart_engine, 16),
            (lambda node: node.restart(is_cold=False), 8),
            (lambda node: node.restart(is_cold=True), 8),
        ]
        plan = [operation for operation, count in operations for _ in range(count)]
        assert len(plan) == OPERATIONS
        rng.shuffle(plan)
        for number, operation in enumerate(plan, 1):
            operation(rng.choice(nodes))
            if number % 200 == 0:
                wait_until(lambda: not differences(), what=f"both views after {number} operations")
        assert sum(node.depot.status().counters["chunks_evicted"] for node in nodes) > 0

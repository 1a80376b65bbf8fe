"""Routers by the rules of their decoders know what each of three depots holds."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from support.decoders import Blind, DynamoPublisher, LlmD
from support.events import Context, Engine, Router
from support.peer import prompt

KINDS = [LlmD, DynamoPublisher, Blind]
_NAMES = [f"prompt {number}" for number in range(12)]
_LENGTH = 8  # 96 chunks in all; a pool has room for half of them


class Node:
    """A depot with an engine that computes nothing. A decoder follows it."""

    def __init__(self, kind: type[Blind], folder: Path, context: Context) -> None:
        tier = ("--tier", f"disk://{folder}/tier?capacity=1MiB") if kind is Blind else ()
        self.depot = DepotProcess(*kind.FLAGS, *tier, "--max-entries", "48", pool_size="1MiB", directory=folder)
        self.engine = Engine(self.depot)
        self.decoder = kind(self.depot, context)

    def store(self, name: str, length: int) -> None:
        self.engine.store(prompt(length, name))

    def holds(self, name: str) -> int:
        return self.engine.holds(prompt(_LENGTH, name))

    def restart(self) -> None:
        self.engine.close()
        self.depot.kill()
        self.depot.start()
        wait_until(lambda: not self.depot.status().recovering, what="the entries of the depot before")
        self.engine = Engine(self.depot)

    def close(self) -> None:
        self.engine.close()
        self.depot.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_leave_a_router_with_what_three_depots_hold(
    kind: type[Blind], context: Context, tmp_path: Path
) -> None:
    rng = random.Random(57)
    with contextlib.ExitStack() as opened:
        nodes: list[Node] = []
        for name in "abc":
            (tmp_path / name).mkdir()
            nodes.append(Node(kind, tmp_path / name, context))
            opened.callback(nodes[-1].close)

        def clear(node: Node) -> None:
            ask_depot(o.Clear(), node.depot.url, 30)

        def come(node: Node) -> None:
            Router(node.depot, context, is_exact=False).take_all()

        operations: list[tuple[Callable[[Node], None], int]] = [
            (lambda node: node.store(rng.choice(_NAMES), rng.randint(1, _LENGTH)), 960),
            (clear, 14),
            (come, 20),
            (Node.restart, 6),
        ]
        if kind is Blind:  # each restart is a new endpoint here, which its subscription does not follow
            operations.pop()
        plan = [operation for operation, count in operations for _ in range(count)]
        rng.shuffle(plan)

        def differences() -> list[tuple[str, int, int]]:
            views = [
                (name, node.holds(name), node.decoder.known(prompt(_LENGTH, name))) for node in nodes for name in _NAMES
            ]
            # A chunk that only a tier has is announced, too, although a lookup that does not wait finds less.
            return [each for each in views if (each[2] < each[1] if kind is Blind else each[1] != each[2])]

        for number, operation in enumerate(plan, 1):
            node = rng.choice(nodes)
            operation(node)
            if operation is Node.restart:
                node.decoder = kind(node.depot, context)  # its ports are others
            if number % 200 == 0:
                wait_until(lambda: not differences(), what=f"what the depots hold after {number} operations")
        assert sum(node.depot.status().counters["chunks_evicted"] for node in nodes) > 0
        for node in nodes:
            node.engine.close()  # its leases keep chunks
            wait_until(lambda: not node.depot.status().contexts)  # noqa: B023
            clear(node)
            wait_until(lambda: not any(node.decoder.known(prompt(_LENGTH, name)) for name in _NAMES))  # noqa: B023
            assert not node.decoder.held, "phantoms"


@pytest.mark.parametrize("kind", [LlmD, DynamoPublisher])
def test_subscribers_that_come_and_go_leave_no_phantoms(kind: type[LlmD], context: Context) -> None:
    """Regression: after three of them and a clear, all blocks stayed in routers that count."""
    with DepotProcess(*kind.FLAGS, pool_size="1MiB") as depot:
        engine, decoder, run = Engine(depot), kind(depot, context), prompt(9, "a")
        engine.store(run)
        wait_until(lambda: decoder.known(run) == 9)
        for number in range(10):
            newcomer = Router(depot, context)
            engine.store(prompt(2, f"b{number}"))
            wait_until(lambda: newcomer.knows(run))  # noqa: B023
            newcomer.socket.close()
        assert set(decoder.counts.values()) <= {0, 1}
        ask_depot(o.Clear(), depot.url, 30)
        wait_until(lambda: (decoder.take_all(), not decoder.held)[1])
        assert decoder.num_resets == 0
        engine.close()


def test_llm_d_indexes_two_models_of_one_depot(context: Context) -> None:
    """Regression: each topic had its own numbers, and a replay mixed them: 0 of 400 blocks were indexed."""
    with DepotProcess(*LlmD.FLAGS, pool_size="1MiB") as depot:
        engines = [Engine(depot, model, model) for model in ("one", "two")]
        decoder = LlmD(depot, context)
        for number in range(20):
            engines[number % 2].store(prompt(4, f"{number}"))
            decoder.take_all()
        wait_until(lambda: all(decoder.known(prompt(4, f"{number}")) == 4 for number in range(20)))
        assert decoder.num_resets == 0
        for engine in engines:
            engine.close()


def test_a_last_batch_that_was_lost_is_noticed_on_an_idle_node(context: Context) -> None:
    with DepotProcess(*LlmD.FLAGS, pool_size="1MiB") as depot:
        engine, decoder, run = Engine(depot), LlmD(depot, context), prompt(4, "a")
        engine.store(prompt(1, "b"))
        wait_until(lambda: decoder.known(prompt(1, "b")) == 1)
        last = decoder.last
        engine.store(run)
        wait_until(lambda: decoder.known(run) == 4)
        decoder.last, decoder.held = last, set()  # as if the batch had been lost
        decoder.counts.clear()
        wait_until(lambda: decoder.known(run) == 4, 10)
        engine.close()


def test_a_depot_whose_clock_was_set_back_goes_on_with_higher_numbers(context: Context, tmp_path: Path) -> None:
    """Regression: Dynamo kept the blocks of a depot that had restarted empty, and learned none of its new ones."""
    flags = (*LlmD.FLAGS, "--fresh")
    with DepotProcess(*flags, pool_size="1MiB", directory=tmp_path) as depot:
        engine, router = Engine(depot), Router(depot, context)
        engine.store(prompt(2, "a"))
        wait_until(lambda: router.knows(prompt(2, "a")))
        engine.close()
        depot.kill()
        numbers = tmp_path / "events"
        assert int.from_bytes(numbers.read_bytes(), "little") >= router.next
        ahead = router.next + 3600 * 10**6  # as if the clock had been an hour ahead until now
        numbers.write_bytes(ahead.to_bytes(8, "little"))
        depot.start()
        again = Router(depot, context)
        engine = Engine(depot)
        engine.store(prompt(2, "b"))
        wait_until(lambda: again.knows(prompt(2, "b")))
        assert again.next > ahead
        assert not again.knows(prompt(2, "a"))
        engine.close()

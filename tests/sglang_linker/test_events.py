# pyright: basic
"""Routers learn which pages of SGLang engines a depot has."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.events import FLAGS, Context, Router
from support.sglang.stand_in import Key, MakeEngine, Scheduler, engines, names_of, tokens_of


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotProcess(*FLAGS) as depot:
        yield depot


@pytest.fixture
def engine(depot: DepotProcess) -> Iterator[MakeEngine]:
    with engines(depot.url) as make:
        yield make


def ids_of(names: list[str]) -> list[int]:
    return [int(name[:16], 16) for name in names]


def knows(router: Router, names: list[str]) -> bool:
    """Return whether a router knows these pages of a prompt, each with its tokens and behind the page before it."""
    router.take_all()
    ids = ids_of(names)
    return set(ids) <= router.reached() and all(
        router.tokens[each] == tuple(tokens_of(name)) and router.parents[each] == before
        for name, each, before in zip(names, ids, [None, *ids], strict=False)
    )


def stored(one: Scheduler, names: list[str], first: int = 0, **prompt: Any) -> None:
    assert one.store(names, one.slots(0, len(names)), first, **prompt)


def test_stored_pages_are_described_node_by_node(engine: MakeEngine, depot: DepotProcess, context: Context) -> None:
    router, one, names = Router(depot, context), engine(), names_of(1, 5)
    stored(one, names[:2])
    wait_until(lambda: knows(router, names[:2]))
    stored(one, names, first=2)
    wait_until(lambda: knows(router, names))
    assert router.found == set(ids_of(names))


def test_pages_that_nobody_has_described_are_described_by_the_next_hit(
    engine: MakeEngine, depot: DepotProcess, context: Context
) -> None:
    router, one, names = Router(depot, context), engine(), names_of(1, 5)
    stored(one, names, extra_key="an adapter")
    assert engine().look_up("r", names, on_device=1) == 4
    wait_until(lambda: knows(router, names))


def test_a_path_that_is_stored_again_is_described_again(
    engine: MakeEngine, depot: DepotProcess, context: Context
) -> None:
    one, names = engine(), names_of(1, 5)
    stored(one, names[:3])
    depot.kill()
    for file in depot.pool_directory.glob("*"):
        file.unlink()  # the next server starts empty
    depot.start()
    wait_until(lambda: len(depot.status().contexts) == 2)
    assert one.look_up("r", names, on_device=3) == 0
    stored(one, names, first=3)
    router = Router(depot, context)
    wait_until(lambda: knows(router, names))


def test_a_salt_is_told_and_pages_with_an_adapter_are_not_described(
    engine: MakeEngine, depot: DepotProcess, context: Context
) -> None:
    router, one, salted, adapted = Router(depot, context), engine(), names_of(1, 3), names_of(2, 3)
    stored(one, adapted, extra_key="an adapter")
    stored(one, salted, cache_salt="pepper")
    keys: dict[int, Any] = {}

    def is_told() -> bool:
        for _, batch in router.take_all():
            for event in batch:
                if event["type"] == "BlockStored":
                    keys.update(zip(event["block_hashes"], event["extra_keys"], strict=True))
        return len(keys) == 3

    wait_until(is_told)
    assert keys == {each: ["pepper"] for each in ids_of(salted)}
    assert router.found == set(ids_of(salted))


def test_pages_whose_tokens_are_unknown_are_not_described(
    engine: MakeEngine, depot: DepotProcess, context: Context
) -> None:
    """SGLang could offer pages outside an insert."""
    router, one, names = Router(depot, context), engine(), names_of(1, 3)
    one.linker.prompt = Key(names[:2])
    one.linker.before = []
    assert one.linker.offload(one.transfers(names, one.slots(0, 3)))
    one.linker.prompt = None
    one.look_up("r", names_of(4, 3))
    one.linker.before = []
    assert one.linker.offload(one.transfers(names_of(2, 3), one.slots(0, 3)))
    wait_until(lambda: one.linker.num_completed_offloads() == 2)
    assert one.linker.pop_completed_offload()
    assert one.linker.pop_completed_offload()
    described = names_of(3, 2)
    stored(one, described)
    wait_until(lambda: knows(router, described))
    assert router.found == set(ids_of(described))

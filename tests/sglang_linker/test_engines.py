"""Real SGLang engines on CPU with a real depot: the same tokens as without one, whichever process dies."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.leftovers import left_in_shared_memory
from support.sglang.engines import Engine, Prompt, linker, prompts, tokens
from support.stopped import stopped

pytestmark = pytest.mark.slow

MakeModel = Callable[[str], Path]
WANTED = prompts(20, 702, seed=1, shared=320)  # an answer completes another page


@pytest.fixture(scope="module")
def engines(shared_depot: DepotProcess, model: MakeModel) -> Iterator[tuple[Engine, Engine]]:
    """Two engines on one depot. A flush empties their own cache and does not change their keys."""
    settings = linker(shared_depot.url, keep_after_reset=True, lookup_seconds=1.0, deadline_seconds=5.0)
    with Engine(model("gqa"), **settings) as one, Engine(model("gqa"), **settings) as two:
        one.wait_until_ready()
        two.wait_until_ready()
        yield one, two


@pytest.fixture(scope="module")
def reference(engines: tuple[Engine, Engine]) -> list[tuple[int, ...]]:
    """The tokens of an engine with an empty depot, which loads nothing."""
    one, _ = engines
    answers = one.each(WANTED)
    assert not any(each.from_depot for each in answers)
    return tokens(answers)


def whole_pages(wanted: list[Prompt]) -> int:
    return sum((len(prompt) - 1) // 64 * 64 for prompt in wanted)


def wait_until_stored(engine: Engine) -> None:
    engine.flush()  # refused while stores are under way


def test_an_engine_loads_the_pages_of_another_and_answers_the_same(
    engines: tuple[Engine, Engine], reference: list[tuple[int, ...]]
) -> None:
    one, two = engines
    wait_until_stored(one)
    shared = two.each(WANTED)
    assert tokens(shared) == reference
    # The first 320 tokens are loaded once; afterwards the engine's own cache has them.
    assert sum(each.cached for each in shared) >= 0.95 * whole_pages(WANTED)
    assert shared[0].from_depot == 640
    one.flush()
    after = one.each(WANTED)
    assert tokens(after) == reference
    assert sum(each.cached for each in after) == whole_pages(WANTED)


def test_many_requests_at_once_are_loaded(engines: tuple[Engine, Engine], reference: list[tuple[int, ...]]) -> None:
    one, _ = engines
    one.flush()
    answers = one.generate(*WANTED)
    assert tokens(answers) == reference
    assert sum(each.from_depot for each in answers) > 0.5 * whole_pages(WANTED)


def test_salted_requests_share_among_themselves_alone(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    (prompt,) = prompts(1, 700, seed=2)
    one.generate(prompt, cache_salt="a")
    wait_until_stored(one)
    assert two.generate(prompt, cache_salt="b")[0].cached == 0
    assert two.generate(prompt)[0].cached == 0
    assert two.generate(prompt, cache_salt="a")[0].from_depot == 640
    (other,) = prompts(1, 700, seed=8)
    one.generate(other, cache_salt="a")
    wait_until_stored(one)
    assert two.generate(other, cache_salt="a")[0].from_depot == 640
    assert two.generate(other)[0].cached == 0


def test_a_stopped_depot_costs_one_deadline_and_no_request(
    engines: tuple[Engine, Engine], shared_depot: DepotProcess, reference: list[tuple[int, ...]]
) -> None:
    one, _ = engines
    one.flush()
    with stopped(shared_depot):
        answers = one.each(WANTED[:5])
        assert tokens(answers) == reference[:5]
        assert not any(each.failed or each.from_depot for each in answers)
    wait_until(lambda: (one.flush(), one.generate(WANTED[6])[0].from_depot == 640)[1], 60)
    assert tokens(one.each(WANTED)) == reference


def test_kills_of_the_depot_cost_no_request(
    engines: tuple[Engine, Engine], shared_depot: DepotProcess, reference: list[tuple[int, ...]]
) -> None:
    done, num_kills = threading.Event(), itertools.count()

    def kill_and_restart() -> None:
        for _ in range(5):
            shared_depot.kill()
            next(num_kills)
            done.wait(0.2)
            shared_depot.start()
            done.wait(0.8)  # reconnect, and load again

    killer = threading.Thread(target=kill_and_restart)
    killer.start()
    try:
        for number, engine in itertools.cycle(itertools.product(range(len(WANTED)), engines)):
            if not killer.is_alive():
                break
            engine.flush()
            answer = engine.generate(WANTED[number])[0]
            assert answer.tokens == reference[number]
            assert not answer.failed
    finally:
        done.set()
        killer.join()
    assert next(num_kills) == 5


def test_a_new_engine_finds_what_others_stored_and_a_flush_begins_a_new_generation(
    shared_depot: DepotProcess, model: MakeModel, reference: list[tuple[int, ...]]
) -> None:
    with Engine(model("gqa"), **linker(shared_depot.url)) as engine:
        answers = engine.wait_until_ready().each(WANTED)
        assert tokens(answers) == reference
        assert answers[0].from_depot == 640
        engine.flush()
        assert engine.generate(WANTED[0])[0].cached == 0


def test_requests_decode_while_another_is_loaded(shared_depot: DepotProcess, model: MakeModel) -> None:
    wanted, decoding = prompts(1, 700, seed=6), prompts(3, 60, seed=7)
    settings = linker(shared_depot.url, keep_after_reset=True, deadline_seconds=60.0)
    with Engine(model("gqa"), plugin="support.sglang.held_copies", **settings) as engine:
        expected = engine.wait_until_ready().each(wanted, max_tokens=1)
        alone, _ = engine.beside(decoding, [], 200, 0.0)
        engine.flush()
        decoded, arrived = engine.beside(decoding, wanted, 200, 0.0)
    assert arrived[0].from_depot == 640
    assert tokens(arrived) == tokens(expected)
    assert tokens(decoded) == tokens(alone)


def test_two_ranks_share_with_one(engines: tuple[Engine, Engine], shared_depot: DepotProcess, model: MakeModel) -> None:
    one, _ = engines
    wanted = prompts(6, 700, seed=3)
    with Engine(model("gqa"), tp_size=2, **linker(shared_depot.url, keep_after_reset=True)) as two:
        two.wait_until_ready()
        cold = one.each(wanted[:3])
        wait_until_stored(one)
        shared = two.each(wanted[:3])
        assert [each.from_depot for each in shared] == [640] * 3
        assert tokens(shared) == tokens(cold)
        mine = two.each(wanted[3:])
        wait_until_stored(two)
        again = two.each(wanted[3:])
        assert [each.from_depot for each in again] == [640] * 3
        assert tokens(again) == tokens(mine)
        back = one.each(wanted[3:])
        assert [each.from_depot for each in back] == [640] * 3
        assert tokens(back) == tokens(mine)
        kinds = {path.name.split("_")[2] == "mq" for path in left_in_shared_memory()}
        assert kinds == {True, False}, "both the queues and the loads of these engines can be told from those of others"


@pytest.mark.parametrize(
    ("name", "plugin", "said"),
    [
        ("window-pool", "window_reads", "SWAKVPool"),
        ("mla-dense", "latent_reads", "type=DeepseekV2ForCausalLM"),
        ("gqa", "fp8_cache", "float8_e5m2"),
    ],
)
def test_windows_latent_attention_and_fp8_are_loaded(
    name: str, plugin: str, said: str, shared_depot: DepotProcess, model: MakeModel
) -> None:
    """After a flush and a restart. The docstrings of the plugins say what they fix in SGLang."""
    wanted = prompts(4, 702, seed=4, shared=256)
    settings = linker(shared_depot.url, keep_after_reset=True)
    plain = Engine(model(name), plugin=f"support.sglang.{plugin}")
    with plain, Engine(model(name), plugin=f"support.sglang.{plugin}", **settings) as engine:
        wanted_tokens = tokens(plain.wait_until_ready().each(wanted))
        cold = engine.wait_until_ready().each(wanted)
        assert said in engine.log()
        engine.flush()
        warm = engine.each(wanted)
    with Engine(model(name), plugin=f"support.sglang.{plugin}", **settings) as engine:
        restarted = engine.wait_until_ready().generate(*wanted)
    for answers in (cold, warm, restarted):
        assert tokens(answers) == wanted_tokens
        assert not any(each.failed for each in answers)
    assert not any(each.from_depot for each in cold)
    for answers in (warm, restarted):
        assert all(each.from_depot for each in answers)
    assert sum(each.cached for each in warm) == whole_pages(wanted)

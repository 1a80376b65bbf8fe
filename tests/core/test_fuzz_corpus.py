"""Replays the corpus and the seeds of fuzzing, and as many new inputs as time allows.

`python -m fuzz` searches for more inputs, guided by coverage: see docs/reliability.md.
"""

import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.depot import Life
from fuzz.mutate import mutate_message
from fuzz.targets import CORPUS, TARGETS, kept_inputs

SEEDS = {name: target.seeds() for name, target in TARGETS.items()}  # some come from a depot that is filled for them
MESSAGES = [name for name, target in TARGETS.items() if target.is_message]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.promise(60)
def test_every_input_that_is_kept_passes(name: str) -> None:
    paths = kept_inputs(name)
    assert paths, "an empty corpus shows nothing"
    for path in paths:
        try:
            TARGETS[name].run(path.read_bytes())
        except BaseException as error:
            error.add_note(f"the input is {path}")
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_passes(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@pytest.mark.promise(60)
def test_any_bytes_pass(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    target.run(data.draw(st.binary(max_size=min(target.maximum_bytes, 400))))


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in MESSAGES])
@given(data=st.data())
@pytest.mark.promise(60)
def test_seeds_with_changed_bytes_pass(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    seed = bytearray(data.draw(st.sampled_from([seed for seed in SEEDS[name] if 0 < len(seed) < 10_000])))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(seed) - 1), st.integers(0, 255)), max_size=8)):
        seed[place] = value
    target.run(bytes(seed))


@pytest.mark.parametrize("name", MESSAGES)
@given(number=st.integers(0, 2**32))
@pytest.mark.promise(60)
def test_messages_with_changed_values_pass(name: str, number: int) -> None:
    target, rng = TARGETS[name], random.Random(number)
    data = rng.choice(SEEDS[name])
    for _ in range(3):
        body = mutate_message(data[target.prefix :], rng)
        data = data if body is None else data[: target.prefix] + body
        target.run(data)


def test_a_killed_depot_changes_nothing_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector ends its handlers at any moment, for example right after the restart."""
    restart = Life.restart

    def restart_and_collect(life: Life) -> None:
        restart(life)
        gc.collect()

    monkeypatch.setattr(Life, "restart", restart_and_collect)
    TARGETS["movers"].run((CORPUS / "movers" / "restart-under-a-copy").read_bytes())

"""How long, and for which request, an answer is repeated while the request waits."""

from dataclasses import dataclass, field
from typing import cast

import pytest

from kvdepot.client.answers import MISS, Lease
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.keys import DIGEST_BYTES, KeyRun
from kvdepot_sglang.lookups import Lookups


@dataclass
class Client:
    """A depot that has `found` pages of every prompt."""

    found: int
    asked: list[KeyRun] = field(default_factory=list[KeyRun])
    released: list[int] = field(default_factory=list[int])

    def submit_lookup(self, request_id: str, key: KeyRun, wait_seconds: float) -> "Client":
        self.asked.append(key)
        return self

    def result(self) -> Lease:
        return Lease(self.found, len(self.asked), 10.0) if self.found else MISS

    def release(self, lease: Lease) -> None:
        self.released.append(lease.number)


class Engine:
    def __init__(self, found: int) -> None:
        self.client, self.now = Client(found), 0.0
        self.lookups = Lookups(cast("SchedulerClient", self.client), 0.0, lambda: self.now)


def key(prompt: int, num_pages: int = 4) -> KeyRun:
    digests = b"".join(bytes([prompt, page]).ljust(DIGEST_BYTES) for page in range(num_pages))
    return KeyRun(digests, 0, bytes(DIGEST_BYTES))


@pytest.mark.parametrize(("found", "seconds"), [(4, 5.0), (0, 0.2)])
def test_an_answer_is_repeated_until_half_of_its_lease_has_passed_and_a_miss_for_a_moment(
    found: int, seconds: float
) -> None:
    engine = Engine(found)
    for now in (0.0, seconds * 0.9):
        engine.now = now
        assert engine.lookups.ask("r", key(1), 0) == found
    assert len(engine.client.asked) == 1
    engine.now = seconds * 1.1
    assert engine.lookups.ask("r", key(1), 0) == found
    assert len(engine.client.asked) == 2
    assert engine.client.released == ([1] if found else [])


def test_an_answer_is_for_one_prompt_although_another_request_has_the_same_name() -> None:
    engine = Engine(4)
    engine.lookups.ask("r", key(1), 0)
    engine.lookups.ask("r", key(2), 0)
    assert engine.client.asked == [key(1), key(2)]
    assert engine.client.released == [1]
    assert engine.lookups.key_of("r", 4) == key(2)


def test_no_more_pages_are_promised_than_were_found_behind_the_device_s() -> None:
    engine = Engine(3)
    assert engine.lookups.ask("r", key(1), 2) == 1
    assert engine.lookups.key_of("r", 1) == key(1).slice(2, 3)
    assert engine.lookups.key_of("r", 2) is None
    engine.lookups.drop("r")
    assert engine.lookups.key_of("r", 1) is None


@pytest.mark.parametrize(("found", "seconds"), [(4, 10.0), (0, 0.2)])
def test_answers_of_requests_that_never_load_are_not_kept_beyond_their_leases(found: int, seconds: float) -> None:
    engine = Engine(found)
    engine.lookups.ask("left", key(1), 0)
    for number, now in enumerate((seconds * 0.9, seconds * 1.1)):
        engine.now = now
        engine.lookups.ask(f"later {number}", key(2), 0)
        assert (engine.lookups.key_of("left", found) is not None) == (number == 0)
    assert engine.client.released == ([1] if found else [])


@pytest.mark.parametrize(("found", "start"), [(4, 4), (2, 2), (0, 0)])
def test_a_store_begins_with_what_the_depot_lacks_of_the_device_s_pages(found: int, start: int) -> None:
    engine = Engine(found)
    assert engine.lookups.ask("r", key(1, 6), 4) == 0
    assert engine.lookups.first_to_store(key(1, 6), 4) == start
    assert engine.lookups.first_to_store(key(1, 6), 4) == 4  # the first store sent them


def test_a_refused_request_has_a_miss_for_a_moment_and_its_lease_ends() -> None:
    engine = Engine(4)
    assert engine.lookups.ask("r", key(1), 0) == engine.lookups.ask("s", key(1), 0) == 4
    engine.lookups.refuse("r")
    engine.lookups.refuse("unknown")
    assert engine.client.released == [1]
    assert engine.lookups.ask("r", key(1), 0) == 0
    assert engine.lookups.key_of("r", 1) is None
    assert engine.lookups.ask("s", key(1), 0) == 4
    engine.now = 0.3
    assert engine.lookups.ask("r", key(1), 0) == 4

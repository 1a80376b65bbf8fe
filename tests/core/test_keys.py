"""Keys identify a whole prefix and everything else that determines its KV."""

import itertools
import os
import struct
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvdepot import KeyRun, Namespace, PrefixHasher, hash_prefix
from kvdepot.errors import KeyFormatError

NAMESPACE = Namespace("model", "main", tenant_salt="salt")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(tokens, st.integers(0, 60), st.integers(1, 9))
def test_the_key_of_a_prefix_is_a_prefix_of_the_key(prompt: list[int], cut: int, chunk_tokens: int) -> None:
    whole = hash_prefix(NAMESPACE, chunk_tokens, prompt)
    part = hash_prefix(NAMESPACE, chunk_tokens, prompt[:cut])
    assert whole.digests.startswith(part.digests)
    assert whole.num_chunks == len(prompt) // chunk_tokens


@given(tokens, st.lists(st.integers(0, 60), max_size=5), st.integers(1, 9))
def test_tokens_may_come_in_any_pieces(prompt: list[int], cuts: list[int], chunk_tokens: int) -> None:
    hasher = PrefixHasher(NAMESPACE, chunk_tokens)
    bounds = sorted({0, len(prompt), *(min(cut, len(prompt)) for cut in cuts)})
    for start, stop in itertools.pairwise(bounds):
        hasher.extend(prompt[start:stop])
    assert hasher.run() == hash_prefix(NAMESPACE, chunk_tokens, prompt)
    assert hasher.num_tokens == len(prompt)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), st.data())
def test_a_changed_token_changes_its_chunk_and_all_after_it(prompt: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(prompt) // 4 * 4 - 1))
    other = [*prompt]
    other[place] ^= 1
    before, after = hash_prefix(NAMESPACE, 4, prompt), hash_prefix(NAMESPACE, 4, other)
    same = [before.digests[i : i + 32] == after.digests[i : i + 32] for i in range(0, len(before.digests), 32)]
    assert same == [chunk < place // 4 for chunk in range(len(same))]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "x"},
        {"revision": "x"},
        {"tenant": "x"},
        {"tenant_salt": "x"},
        {"quantization": "x"},
        {"extra": (("a", "b"),)},
    ],
)
@pytest.mark.promise(19)
def test_every_part_of_the_identity_counts(change: dict[str, str]) -> None:
    assert hash_prefix(NAMESPACE, 4, range(8)) != hash_prefix(replace(NAMESPACE, **change), 4, range(8))


def test_the_order_of_extra_identity_does_not_count() -> None:
    first = Namespace("m", extra=(("a", "1"), ("b", "2")))
    assert first.digest(64) == Namespace("m", extra=(("b", "2"), ("a", "1"))).digest(64)


@pytest.mark.promise(20)
def test_chunk_sizes_never_share() -> None:
    assert hash_prefix(NAMESPACE, 4, range(8)).parent != hash_prefix(NAMESPACE, 8, range(8)).parent


def with_extra(*extra: tuple[int, int, bytes]) -> list[bytes]:
    hasher = PrefixHasher(NAMESPACE, 4, extra)
    hasher.extend(range(16))
    digests = hasher.run().digests
    return [digests[start : start + 32] for start in range(0, len(digests), 32)]


def test_an_extra_key_counts_from_its_first_chunk_on() -> None:
    plain, image = with_extra(), with_extra((5, 7, b"image"))
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]


@pytest.mark.promise(19)
def test_an_extra_key_counts_with_its_place_and_its_content() -> None:
    variants = [with_extra((5, 7, b"image")), with_extra((5, 7, b"other")), with_extra((4, 6, b"image")), with_extra()]
    assert len({variant[1] for variant in variants}) == 4


@pytest.mark.promise(19)
def test_the_key_of_an_incomplete_chunk_is_no_other_one() -> None:
    def tail(prompt: range, num_tokens: int, extra: tuple[tuple[int, int, bytes], ...] = ()) -> bytes:
        hasher = PrefixHasher(Namespace("m"), 16, extra)
        hasher.extend(prompt)
        return hasher.tail(2, prompt[32 : 32 + num_tokens])

    assert tail(range(48), 9) == tail(range(41), 9), "later tokens do not count"
    others = [
        tail(range(48), 9),
        tail(range(48), 10),
        tail(range(48), 16),
        tail(range(1, 49), 9),
        tail(range(48), 9, ((35, 36, b"item"),)),
        tail(range(48), 9, ((36, 37, b"item"),)),
        *(hash_prefix(Namespace("m"), 16, range(48)).slice(chunk, chunk + 1).digests for chunk in range(3)),
    ]
    assert len(set(others)) == len(others)
    assert tail(range(48), 9, ((41, 43, b"item"),)) == tail(range(48), 9), "an item behind the prompt does not count"


def test_two_processes_with_different_hash_seeds_agree() -> None:
    code = (
        "from kvdepot import *; print(hash_prefix(Namespace('m', extra=(('b', ''), ('a', ''))), 4, range(8)).digests)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "random")
    }
    assert len(found) == 1


@pytest.mark.promise(19, 21)
def test_the_format_of_a_digest_is_fixed() -> None:
    fields: tuple[object, ...] = ("model", "main", "default", "salt", "", [], 4)
    root = blake3(msgspec.msgpack.encode(fields), derive_key_context="kvdepot 2026-11 namespace").digest()
    first = blake3(root + struct.pack("<4I", 0, 1, 2, 3)).digest()
    second = blake3(first + struct.pack("<4I", 4, 5, 6, 7)).digest()
    assert hash_prefix(NAMESPACE, 4, range(9)) == KeyRun(first + second, 0, root)


@pytest.mark.parametrize("bad", [[-1] * 4, [2**32] * 4, [1.5] * 4, ["x"] * 4, [0, 0, 0, 0, -1]])
def test_a_bad_token_is_refused_and_changes_nothing(bad: list[int]) -> None:
    hasher = PrefixHasher(NAMESPACE, 4)
    hasher.extend([1, 2])
    with pytest.raises(KeyFormatError):
        hasher.extend(bad)
    hasher.extend([3, 4])
    assert hasher.run() == hash_prefix(NAMESPACE, 4, [1, 2, 3, 4])


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_slice_knows_what_comes_before_it(start: int, length: int) -> None:
    run = hash_prefix(NAMESPACE, 1, range(10))
    part = run.slice(start, start + length)
    assert part.first_chunk == start
    assert part.parent == (run.digests[start * 32 - 32 : start * 32] if start else run.parent)
    assert part.digests == run.digests[start * 32 : (start + length) * 32]


@pytest.mark.parametrize(
    ("digests", "first", "parent"), [(b"x", 0, bytes(32)), (bytes(32), 0, b""), (b"", -1, bytes(32))]
)
def test_a_run_that_is_not_well_formed_is_refused(digests: bytes, first: int, parent: bytes) -> None:
    with pytest.raises(KeyFormatError):
        KeyRun(digests, first, parent)

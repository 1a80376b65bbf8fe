"""Equal tokens give equal segments at any position, but segments of another namespace have other names."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import KeyFormatError
from kvdepot.features.blend.messages import MAXIMUM_SEGMENTS, SEGMENT
from kvdepot.features.blend.segments import SegmentNamer, Segments
from kvdepot.keys import Namespace

NAMER = SegmentNamer(Namespace("model", tenant_salt="secret"))


def text(seed: int, num_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128_000, num_tokens).tolist()


def places(segments: Segments) -> list[tuple[bytes, int, int]]:
    found: list[Any] = list(SEGMENT.iter_unpack(segments.packed))
    return found


def share_found(known: Segments, asked: Segments, begin: int, end: int) -> float:
    """Return the share of the asking prompt's tokens from `begin` to `end` that are in known segments."""
    names = {name for name, _, _ in places(known)}
    inside = [length for name, at, length in places(asked) if name in names and begin <= at and at + length <= end]
    return sum(inside) / (end - begin)


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 1000))
def test_a_document_is_found_again_behind_other_text(before: int, after: int, seed: int) -> None:
    document = text(seed, 600)
    prompt = text(seed + 1, before) + document + text(seed + 2, after)
    assert share_found(NAMER.name(document), NAMER.name(prompt), before, before + 600) >= 0.6
    exact = NAMER.name(prompt, (before, before + 600))
    assert share_found(NAMER.name(document, (600,)), exact, before, before + 600) > 0.98  # all but pieces below 8


@given(st.lists(st.integers(0, 3), max_size=400), st.lists(st.integers(0, 500), max_size=5))
def test_segments_ascend_and_lie_in_the_prompt(tokens: list[int], borders: list[int]) -> None:
    end = 0
    segments = NAMER.name(tokens, borders)
    for name, position, length in places(segments):
        assert len(name) == 16
        assert position >= end
        assert 8 <= length <= 1024
        end = position + length
    assert end <= len(tokens)
    for limit in range(0, len(tokens), 50):
        inside = [place for place in places(segments) if place[1] + place[2] <= limit]
        assert places(segments.before(limit)) == inside


def test_other_tenants_have_other_names() -> None:
    tokens = text(0, 2000)
    own = {name for name, _, _ in places(NAMER.name(tokens))}
    assert len(own) > 60
    for other in (Namespace("model"), Namespace("model", tenant="b", tenant_salt="secret"), Namespace("m")):
        assert not own & {name for name, _, _ in places(SegmentNamer(other).name(tokens))}


def test_a_prompt_has_a_bounded_number_of_segments() -> None:
    assert len(NAMER.name(text(0, 300_000))) == MAXIMUM_SEGMENTS
    assert len(NAMER.name([7] * 100_000)) == 0  # no anchor, or one at every token


@pytest.mark.parametrize("token", [-1, 1 << 32, "a", 1.5])
def test_values_that_are_not_tokens_are_refused(token: Any) -> None:
    with pytest.raises(KeyFormatError, match="token ids"):
        NAMER.name([1, token])

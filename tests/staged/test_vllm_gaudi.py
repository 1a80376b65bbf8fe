"""Engines of vllm-gaudi that cannot use a depot are refused with a reason."""

import pytest

from kvdepot.backends import Capability, EngineTraits
from kvdepot.layout import GroupKind
from kvdepot_hpu import backend

FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_DEFRAG", "VLLM_CONTIGUOUS_PA"):
        monkeypatch.delenv(name, raising=False)


def test_recurrent_states_are_refused() -> None:
    reason = backend.why_unsuited(EngineTraits("vllm", (FULL, STATE), prefix_caching=True))
    assert reason is not None
    assert "recurrent states" in reason
    assert backend.why_unsuited(EngineTraits("vllm", (FULL, WINDOW), prefix_caching=True)) is None
    assert backend.why_unsuited(EngineTraits("another", (FULL, STATE), prefix_caching=True)) is None


@pytest.mark.parametrize(
    ("prefix_caching", "environment", "is_refused"),
    [
        (True, {}, False),
        (False, {}, True),
        (False, {"VLLM_CONTIGUOUS_PA": "False"}, False),
        (True, {"VLLM_CONTIGUOUS_PA": "1"}, True),
        (False, {"VLLM_CONTIGUOUS_PA": "true", "VLLM_DEFRAG": "0"}, False),
        (True, {"VLLM_DEFRAG": "true"}, True),
        (True, {"VLLM_CONTIGUOUS_PA": "what"}, True),
    ],
)
def test_block_ids_that_may_lie_are_refused(
    prefix_caching: bool, environment: dict[str, str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    reason = backend.why_unsuited(EngineTraits("vllm", (FULL,), prefix_caching))
    assert (reason is not None and "--enable-prefix-caching" in reason) == is_refused


def test_connectors_transfer_on_the_engines_thread_unless_somebody_says_otherwise() -> None:
    assert Capability.ASYNCHRONOUS not in backend.capabilities

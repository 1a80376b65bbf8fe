"""A store waits for an event of the device, of a kind that its backend can hand to the device."""

import pytest

from support.vllm.engines import RunCode

CODE = """
import sys
from types import SimpleNamespace as Space
import torch, vllm.platforms
from kvdepot_vllm.device import recorded_event
class Event:
    recorded = 0
    def __init__(self, blocking=False):
        self.blocking = blocking
    def record(self):
        self.recorded += 1
torch.cuda.Event, torch.Event = type("Cuda", (Event,), {}), type("Any", (Event,), {})
vllm.platforms._current_platform = Space(device_type=sys.argv[1])
event = recorded_event()
print(type(event).__name__, getattr(event, "recorded", 0), getattr(event, "blocking", ""))
"""


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", "NoneType 0"), ("cuda", "Cuda 1 True"), ("xpu", "Any 1 False"), ("hpu", "NoneType 0")],
)
def test_a_store_waits_for_an_event_that_was_recorded_on_the_engine_s_stream(
    device: str, expected: str, run_code: RunCode
) -> None:
    assert run_code(CODE, device).splitlines()[-1].strip() == expected

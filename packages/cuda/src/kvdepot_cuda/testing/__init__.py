"""A CUDA driver without a device, for tests and dry runs: `FakeDriver` and its tensors, events and kernel."""

from kvdepot_cuda.testing.driver import DEFAULT_STREAM, POISON, FakeDriver, FakeEvent, fake_gather
from kvdepot_cuda.testing.memory import FakeDevice, FakeTensor, holders

__all__ = [
    "DEFAULT_STREAM",
    "POISON",
    "FakeDevice",
    "FakeDriver",
    "FakeEvent",
    "FakeTensor",
    "fake_gather",
    "holders",
]

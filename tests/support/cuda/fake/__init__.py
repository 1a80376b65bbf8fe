"""A CUDA driver without a device, for tests and dry runs: `FakeDriver` and its tensors, events and kernels."""

from support.cuda.fake.driver import DEFAULT_STREAM, POISON, FakeDriver, FakeEvent
from support.cuda.fake.kernels import fake_gather, fake_sums
from support.cuda.fake.memory import FakeDevice, FakeTensor, holders

__all__ = [
    "DEFAULT_STREAM",
    "POISON",
    "FakeDevice",
    "FakeDriver",
    "FakeEvent",
    "FakeTensor",
    "fake_gather",
    "fake_sums",
    "holders",
]

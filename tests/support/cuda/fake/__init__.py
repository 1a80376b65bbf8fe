"""A CUDA driver without a device, for tests and dry runs: `FakeDriver` and its tensors, events and kernel."""

from support.cuda.fake.driver import DEFAULT_STREAM, POISON, FakeDriver, FakeEvent, fake_gather
from support.cuda.fake.memory import FakeDevice, FakeTensor, holders

__all__ = ["DEFAULT_STREAM", "POISON", "FakeDevice", "FakeDriver", "FakeEvent", "FakeTensor", "fake_gather", "holders"]

"""The conformance suite of accelerator backends: `suite`, and the workers that it tests: `plan`."""

from kvdepot.testing.backend.plan import Worker, WorkerPlan
from kvdepot.testing.backend.suite import BackendSuite, MakeCache

__all__ = ["BackendSuite", "MakeCache", "Worker", "WorkerPlan"]

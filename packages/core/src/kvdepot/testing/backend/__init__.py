"""The conformance suite of accelerator backends: `suite`, and the workers that it tests: `plan`."""

from kvdepot.testing.backend.plan import FULL, PLANS, STATE, WINDOW, Cache, GroupPlan, Worker, WorkerPlan, prompt
from kvdepot.testing.backend.suite import BackendSuite, MakeCache

__all__ = [
    "FULL",
    "PLANS",
    "STATE",
    "WINDOW",
    "BackendSuite",
    "Cache",
    "GroupPlan",
    "MakeCache",
    "Worker",
    "WorkerPlan",
    "prompt",
]

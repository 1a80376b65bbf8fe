"""The worker's side without an engine: an error of its context costs only that request."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.errors import LayoutError
from kvdepot.keys import KeyRun
from kvdepot_vllm.jobs import LoadJob, StepPlan, StoreJob
from kvdepot_vllm.worker import WorkerSide

ERRORS = [RuntimeError("a driver's"), MemoryError(), TypeError("a bug"), KeyError("another"), LayoutError("refused")]


class Context:
    """Copies at once, except for broken requests."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def submit(self, request_id: str, key: KeyRun, *_: object) -> Any:
        if request_id == "broken":
            raise self.error
        return SimpleNamespace(
            query=lambda: True, result=lambda: True, num_chunks=key.num_chunks, num_bytes=1, seconds=0.0
        )

    submit_retrieve = submit_store = submit


KEY = KeyRun(bytes(64), 0, bytes(32))
NAMES = ["first", "broken", "last"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("block_tokens", [0, 16], ids=["several groups", "one group"])
@pytest.mark.promise(32)
def test_a_load_that_cannot_be_started_has_failed_and_the_others_go_on(block_tokens: int, error: Exception) -> None:
    worker = WorkerSide(Context(error), 16, block_tokens)  # type: ignore[arg-type]
    jobs = [LoadJob(name, KEY, ([10 * number, 10 * number + 1],), 0) for number, name in enumerate(NAMES)]
    worker.start_loads(StepPlan(loads=tuple(jobs)))
    results = worker.poll_loads()
    assert results.finished == {*NAMES}
    if block_tokens:
        assert (results.failed, results.invalid_blocks) == (set(), {10, 11})
    else:
        assert (results.failed, results.invalid_blocks) == ({"broken"}, set())
    assert worker.num_pending == 0


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_store_that_cannot_be_started_ends_and_the_others_go_on(error: Exception) -> None:
    worker = WorkerSide(Context(error), 16, 16)  # type: ignore[arg-type]
    worker.start_stores(StepPlan(stores=tuple(StoreJob(n, name, KEY, ([1, 2],)) for n, name in enumerate(NAMES))))
    report = worker.take_report()
    assert report is not None
    assert report.ended == {0: (1, 2), 1: (1, 0), 2: (1, 2)}
    assert worker.num_pending == 0

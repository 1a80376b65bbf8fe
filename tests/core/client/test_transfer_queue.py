"""The queue of a worker's transfers: jobs that are queued while it stops neither delay its end nor stay unresolved."""

import threading
from typing import cast

import pytest

from kvdepot.client.session import Channel, Session
from kvdepot.client.transfer_queue import Transfer, TransferJob, TransferQueue
from support.peer import prompt


def job() -> TransferJob:
    return TransferJob(Transfer(), cast("Session", None), "r", prompt(1), [[0]], (1,))


def test_a_job_queued_while_the_queue_stops_does_not_keep_it_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, waits = threading.Event(), threading.Event(), threading.Event()
    join = threading.Thread.join

    def join_seen(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.set()
        join(thread, timeout)

    def run_job(channel: Channel | None, job: TransferJob) -> Channel | None:
        begun.set()
        gate.wait()
        job.transfer.resolve(True)
        return channel

    queue, jobs = TransferQueue(run_job, "test"), [job() for _ in range(3)]
    queue.start()
    queue.put(jobs[0])
    assert begun.wait(10)
    stopping = threading.Thread(target=queue.stop, daemon=True)
    monkeypatch.setattr(threading.Thread, "join", join_seen)
    stopping.start()
    assert waits.wait(10)  # its last wake-up is queued
    queue.put(jobs[1])
    gate.set()
    stopping.join(10)
    assert not stopping.is_alive()
    queue.put(jobs[2])
    assert [each.transfer.result(0) for each in jobs] == [True, True, False]

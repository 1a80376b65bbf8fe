"""The prefixes that `kvdepot drain --to` hands over."""

import pytest

from kvdepot.features.peers.hottest import HotPrefix, hottest_of
from support.index import PAGE, Bench, prompt


def hottest(bench: Bench, most_bytes: int) -> list[HotPrefix]:
    turns = bench.depot.background.operators
    steps = hottest_of(bench.index, bench.depot.labels, most_bytes, turns)
    try:
        while True:
            next(steps)
    except StopIteration as ended:
        return ended.value


def test_the_last_prefixes_come_first_up_to_both_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    worker, runs = bench.worker(), [prompt(3, name) for name in range(4)]
    for run in runs:
        bench.now += 1
        worker.store(run)
    expected = [HotPrefix("default", run.digests) for run in reversed(runs)]
    assert hottest(bench, 1 << 30) == expected
    assert hottest(bench, 6 * PAGE) == expected[:2]
    for most, count in ((6, 2), (5, 1)):
        monkeypatch.setattr("kvdepot.features.peers.hottest.MOST_CHUNKS", most)
        assert hottest(bench, 1 << 30) == expected[:count]

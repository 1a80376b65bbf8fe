"""Waiting schedulers are told which chunks came and left."""

import pytest

from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.messages import AwaitNews, News
from kvdepot.server.turns import PendingReply
from kvdepot.wire import messages as m
from support.events import NAMESPACE, description
from support.index import Bench, Worker, bench_and_worker, prompt


class Scheduler:
    """A scheduler that asks for news again and again."""

    def __init__(self, bench: Bench, worker: Worker, served_model: str) -> None:
        self.bench, self.worker, self.position = bench, worker, 0
        request = m.RegisterScheduler(m.PROTOCOL_VERSION, "engine-1", "model", bench.spec, served_model=served_model)
        self.context = worker.ask(request).context

    def wait(self) -> PendingReply:
        """Read all available news, then wait for the next."""
        while True:
            request = AwaitNews(self.context, NAMESPACE, self.position, 60.0)
            reply = self.bench.depot.handle(self.worker.session, self.worker.writer, request)
            if isinstance(reply, PendingReply):
                return reply
            assert isinstance(reply, News)
            self.position = reply.position

    def describe(self, name: int) -> None:
        run = prompt(1, name)
        self.worker.store(run)
        (request,) = description(run, 1).requests(self.context, run)
        assert self.worker.ask(request).count == 1


def test_a_scheduler_that_waits_for_one_model_is_told_after_the_news_of_another() -> None:
    bench, worker = bench_and_worker(holdings=Holdings("{model}"))
    one, other = (Scheduler(bench, worker, name) for name in ("one", "other"))
    waiting = [one.wait(), other.wait()]
    for number, scheduler in enumerate((one, other)):
        scheduler.describe(number)
        assert [each.reply is not None for each in waiting] == [number > 0, False], "news of a moment come together"
        bench.now += 0.02
        bench.depot.state.timers.expire(bench.now)
        assert [each.reply is not None for each in waiting] == [True, number > 0]


@pytest.mark.parametrize("from_start", [True, False])
def test_a_scheduler_that_gave_up_waiting_and_asks_again_is_told_everything_from_the_start(from_start: bool) -> None:
    bench = Bench(holdings=Holdings())
    scheduler = Scheduler(bench, bench.worker(), "model")
    abandoned = scheduler.wait()
    scheduler.describe(1)
    request = AwaitNews(scheduler.context, NAMESPACE, 0 if from_start else scheduler.position, 60.0)
    reply = scheduler.worker.ask(request)
    assert isinstance(abandoned.reply, News)
    assert not abandoned.reply.is_start
    assert reply.is_start
    assert reply.has_more, "the chunks follow"

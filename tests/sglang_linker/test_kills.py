"""A depot is killed again and again while an engine has many requests in flight, and no request is affected."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from support.sglang.engines import Engine, linker, prompts, tokens

KILLS = 100
AT_ONCE = 16


@pytest.mark.slow
def test_kills_of_the_depot_under_many_requests_cost_none(model: Callable[[str], Path]) -> None:
    """Every request ends with the tokens of an engine without a depot, and hits continue between the kills."""
    wanted = prompts(4 * AT_ONCE, 140, seed=5, shared=64)
    rounds = [wanted[start : start + AT_ONCE] for start in range(0, len(wanted), AT_ONCE)]
    done, num_kills, num_requests, from_depot = threading.Event(), 0, 0, 0
    with DepotProcess(pool_size="128MiB", new_session=True) as depot:
        settings = linker(depot.url, keep_after_reset=True, lookup_seconds=1.0, deadline_seconds=5.0)
        with Engine(model("eight-heads"), **settings) as engine:
            engine.wait_until_ready()
            depot.kill()
            expected = [tokens(engine.generate(*each)) for each in rounds]  # the depot is empty
            depot.start()

            def kill_and_restart() -> None:
                nonlocal num_kills
                try:
                    for pause in itertools.islice(itertools.cycle((0.0, 0.0, 0.0, 0.1, 0.6)), KILLS):
                        depot.kill()
                        depot.start()
                        num_kills += 1
                        done.wait(pause)
                finally:
                    done.set()

            killer = threading.Thread(target=kill_and_restart)
            killer.start()
            try:
                for number in itertools.cycle(range(len(rounds))):
                    if done.is_set():
                        break
                    engine.flush()
                    answers = engine.generate(*rounds[number])
                    assert not any(each.failed for each in answers)
                    assert tokens(answers) == expected[number]
                    num_requests += len(answers)
                    from_depot += sum(each.from_depot for each in answers)
            finally:
                done.set()
                killer.join()
    assert num_kills == KILLS
    assert num_requests > KILLS
    assert from_depot > 0

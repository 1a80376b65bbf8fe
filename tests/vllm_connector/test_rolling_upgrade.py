"""A depot and its engines are upgraded one after the other, and every prompt stays a hit."""

from pathlib import Path
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.releases import NextDepot
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens

pytestmark = pytest.mark.slow

_PROMPTS = prompts(3, 700, seed=57)
_NEXT = "import kvdepot.wire.messages as m; m.PROTOCOL_VERSION += 1"


@pytest.mark.promise(7)
def test_a_rolling_upgrade_loses_no_hit_and_no_request(model: MakeModel, tmp_path: Path) -> None:
    def all_hit(engine: Engine) -> bool:
        outputs = engine.generate(_PROMPTS)
        assert tokens(outputs) == engine.reference
        return cached(outputs) == [640] * len(_PROMPTS)

    def start(**options: Any) -> Engine:
        settings = connector(str(tmp_path))
        return Engine(model("gqa"), settings, reference=_PROMPTS, max_tokens=4, enable_prefix_caching=False, **options)

    with DepotProcess(directory=tmp_path, new_session=True) as depot, start() as engine:
        wait_until(lambda: all_hit(engine), 120)
        depot.terminate()
        pool = ("--pool-dir", str(depot.pool_directory))
        with NextDepot(*pool, directory=tmp_path, new_session=True) as later:
            wait_until(lambda: len(later.status().contexts) == 2, 60, "the engine of the release before")
            wait_until(lambda: all_hit(engine), 60)
            with start(first=_NEXT) as upgraded:
                assert all_hit(upgraded)
            later.terminate()
            depot.start()  # the upgrade is taken back
            with start(first=_NEXT) as upgraded:
                wait_until(lambda: all_hit(upgraded), 60)
                assert "is of an earlier release" in upgraded.log()
            assert all_hit(engine)

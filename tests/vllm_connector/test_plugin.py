"""vLLM finds the connector by name and by module, and every mistake in its configuration is reported."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import ConfigError
from kvdepot.installing import install_line
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_vllm.settings import Settings
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens, wait_until_stored


@pytest.mark.promise(55)
def test_the_plugin_is_installed_and_imports_nothing_heavy() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="kvdepot")
    assert entry.value == "kvdepot_vllm:register"
    code = (
        "import sys, kvdepot_vllm, kvdepot_vllm.scheduler, kvdepot_vllm.worker\n"
        "sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'numba', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plugin_that_cannot_register_says_so_and_does_not_raise() -> None:
    code = (
        "import sys; sys.modules['vllm.distributed.kv_transfer.kv_connector.factory'] = None\n"
        "from kvdepot_vllm import register; register()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "could not be registered" in done.stderr


@pytest.mark.parametrize("way", ["name", "module", "in a MultiConnector"])
def test_every_way_to_name_it(way: str, depot: DepotProcess, model: MakeModel) -> None:
    config: dict[str, Any] = connector(depot.url, by_module=way == "module")
    first = "import os; os.environ['VLLM_PLUGINS'] = ''" if way == "module" else ""
    if way == "in a MultiConnector":
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [config]},
            "kv_load_failure_policy": "recompute",
        }
    prompt = prompts(1, 400, seed=sum(way.encode()))
    with Engine(model("gqa"), config, first=first, expects_depot=way != "in a MultiConnector") as engine:
        if way == "in a MultiConnector":
            # Regression: the first request of a newly started engine sometimes found nothing.
            engine.execute(
                # MultiConnector has no public way to its connectors.
                "c = llm.llm_engine.engine_core.engine_core.scheduler.connector._connectors[0]\n"
                "c.scheduler_side.wait_until_connected(0)"
            )
        engine.generate(prompt)
        engine.reset()
        assert cached(engine.generate(prompt)) == [384]


def test_vllm_s_engine_core_in_its_own_process(depot: DepotProcess, model: MakeModel) -> None:
    prompt = prompts(1, 400, seed=51)
    with Engine(model("gqa"), connector(depot.url), multiprocessing=True) as engine:
        wait_until_stored(engine, depot, seed=5100)
        before = depot.status().num_chunks
        engine.generate(prompt)
        wait_until(lambda: depot.status().num_chunks >= before + 3 and depot.status().num_tickets == 0, 60)
        engine.reset()
        assert cached(engine.generate(prompt)) == [384]
        engine.reset()  # held blocks were freed although the engine got no request since


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"kvdepot.ulr": "x"}, "kvdepot.ulr"),
        ({"kvdepot.url": 3}, "give str or null"),
        ({"kvdepot.load": "yes"}, "give bool"),
        ({"kvdepot.store": "some"}, '"all", "prompt" or "none"'),
        ({"kvdepot.deadline_seconds": 0}, "above 0"),
        ({"kvdepot.mode": "copy"}, "direct"),
        ({"kvdepot.deadline_seconds": float("nan")}, "above 0"),
        ({"kvdepot.max_pinned_share": 2}, "at most 1"),
        ({"kvdepot.chunk_tokens": -1}, "at least 1"),
    ],
)
def test_settings_that_are_wrong_say_what_is_right(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings.parse(extra)


def test_settings_of_other_connectors_are_left_alone() -> None:
    assert Settings.parse({"other.thing": 1, "kvdepot.deadline_seconds": 1}) == Settings(deadline_seconds=1.0)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"kvdepot.ulr": "typo"}, r"kvdepot\.ulr"),
        ({"tenant_salt": "secret"}, r"for example 'kvdepot\.tenant_salt'"),
        ({"kvdepot.tenant": "x" * 300}, "300 characters: a tenant's name has 1 to 256"),
        ({"kvdepot.url": "http://x"}, "'http://x': name a depot of this machine by its directory"),
    ],
    ids=["typo", "no prefix", "tenant", "url"],
)
def test_a_wrong_setting_stops_the_engine_at_start(
    extra: dict[str, Any], text: str, depot: DepotProcess, model: MakeModel
) -> None:
    config = connector(depot.url)
    config["kv_connector_extra_config"] |= extra
    with pytest.raises(AssertionError, match=text):
        Engine(model("gqa"), config)


@pytest.mark.promise(34)
def test_a_backend_that_is_missing_says_the_way_out_and_the_engine_serves(
    depot: DepotProcess, model: MakeModel, tmp_path: Path
) -> None:
    # entry points are found on the path: a directory with an empty kvdepot_cpu distribution hides the installed one
    hidden = tmp_path / "kvdepot_cpu-0.1.0.dist-info"
    hidden.mkdir()
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: kvdepot-cpu\nVersion: 0.1.0\n")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    wanted = prompts(1, 400, seed=52)
    with Engine(model("gqa"), connector(depot.url), first=first, reference=wanted, expects_depot=False) as engine:
        assert install_line("cpu") in engine.log()
        assert tokens(engine.generate(wanted)) == engine.reference

"""The vLLM connector is not built yet, and says so without harming vLLM."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest


def test_the_plugin_that_vllm_calls_says_why_there_is_no_connector(caplog: pytest.LogCaptureFixture) -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="kvdepot")
    with caplog.at_level(logging.WARNING):
        entry.load()()
    assert "not built yet" in caplog.text


def test_importing_the_plugin_loads_neither_vllm_nor_torch() -> None:
    code = "import sys, kvdepot_vllm.plugin; sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

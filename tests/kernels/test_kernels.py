# pyright: basic
"""The kernels move the right bytes and make the right digests in Triton's interpreter, and compile for their devices.

The import of Triton chooses the interpreter for the whole process, so each of the two runs in its own child. Neither
shows races, addresses of host memory on a device, or speed.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WAIT_SECONDS = 240


def run(module: str, *arguments: str, **environment: str) -> str:
    if importlib.util.find_spec("triton") is None:
        if os.environ.get("KVDEPOT_REQUIRE_TRITON"):
            pytest.fail("triton is not installed, and these tests are to run here")
        pytest.skip("needs triton: tox r -e triton")
    variables: dict[str, Any] = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", f"support.kernels.{module}", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=variables | environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_every_byte_is_right_for_any_size_and_alignment() -> None:
    assert "runs are right" in run("interpret", "bytes", TRITON_INTERPRET="1")


def test_every_digest_is_that_of_xxhash() -> None:
    assert re.search(r"extents in 10\d{3} runs are right", run("interpret", "digests", TRITON_INTERPRET="1"))


def test_a_worker_s_copies_and_checksums_by_the_interpreted_kernels_are_right() -> None:
    """Around it are a depot, the copy engine and the fake driver, whose launches run the kernels."""
    assert "copies are right" in run("interpret", "worker", TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_for_every_device_that_they_are_meant_for(capability: int, tmp_path: Path) -> None:
    out = run("compile_ahead", str(capability), TRITON_CACHE_DIR=str(tmp_path))
    assert f"sm_{capability}" in out


def test_the_compiler_is_asked_once_and_its_answer_fits_the_launch(tmp_path: Path) -> None:
    out = run("compile_ahead", "image", TRITON_CACHE_DIR=str(tmp_path))
    assert out.count("an image of") == 3


def test_under_the_interpreter_there_is_no_kernel_to_load_and_the_reason_says_so() -> None:
    assert "triton cannot compile it" in run("compile_ahead", "interpreted", TRITON_INTERPRET="1")

"""`CudaDriver` through the real bindings down to C: every value arrives in a stub of NVIDIA's library, built here.

Runs with the newest bindings and, in the environment `lowest`, with the oldest. It shows nothing about NVIDIA's driver.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.tools import needs_tool

SOURCE = Path(__file__).parents[1] / "support" / "cuda" / "stub_libcuda.c"
pytestmark = needs_tool(shutil.which("cc"), "the stub library needs a C compiler")

CALLS = """
stub: look up cuMemcpyBatchAsync 12080
stub: stream flags 1 priority 0
stub: event flags 3
stub: event flags 3
stub: is capturing 0x100
stub: record event 0x201 stream 0x100
stub: wait stream 0x100 event 0x201 flags 0
stub: synchronize event 0x201
stub: record event 0x200 stream 0x100
stub: synchronize event 0x200
stub: register 0x1000 8192 flags 3
stub: pointer attribute 10 of 7f0000201000
stub: handle of 7f0000200000
stub: open 0 to 63 flags 1
stub: to host 0x2 from 1 3 stream 0x100
stub: to device 2 from 0x1 3 stream 0x100
stub: run 14 from 10000000000 4
stub: run 20000000000 from b 8589934592
stub: batch order 3 flags 0 first 0 of 1 stream 0x100
stub: run 14 from 10000000000 4
stub: batch order 1 flags 0 first 0 of 1 stream 0x100
stub: to device 2 from 0x1 13 stream 0x100
stub: run d from d 13
stub: batch order 3 flags 0 first 0 of 1 stream 0x100
stub: unregister 0x1000
stub: allocate 8192
stub: load \x7fELF|
stub: function 0x300 gather_runs
stub: launch 0x400 grid 8,1,1 block 128,1,1 shared 1024 stream 0x100 of 10000000000,5,0 extra 0
stub: unload 0x300
stub: free 7f0000200000
stub: cuStreamDestroy 0x100
""".strip().splitlines()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """The child's output, and the calls that reached the library."""
    folder = tmp_path_factory.mktemp("stub")
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wno-unused-parameter", "-o", library, SOURCE, "-ldl"], check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "support.cuda.stub_child"],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("stub: ")]
    return done.stdout.splitlines(), said[said.index("stub: cuInit 0") :]  # after the bindings' own look-ups


def test_every_call_arrives_with_its_values(found: tuple[list[str], list[str]]) -> None:
    said = found[1]
    assert said[:2] == ["stub: cuInit 0", "stub: cuDeviceGet 3"]
    assert said[-1] == "stub: cuDevicePrimaryCtxRelease 3"
    modes = [line for line in said if "capture mode" in line]
    assert modes == ["stub: capture mode 0 -> 2", "stub: capture mode 2 -> 0"]
    assert [line for line in said[2:-1] if line not in modes] == CALLS


def test_the_answers_of_the_driver_come_back(found: tuple[list[str], list[str]]) -> None:
    printed = [line for line in found[0] if not re.search("released|held|copy|batch", line)]
    uuid = "GPU-03040506-0708-090a-0b0c-0d0e0f101112"
    assert printed == [f"STUB 3, driver for CUDA 13.0 {uuid} 90 True", "4097", "True 0x7f0000200000 2097152"]


def test_a_code_that_the_bindings_do_not_know_is_an_error_of_the_driver(found: tuple[list[str], list[str]]) -> None:
    """`KeyError` in 12.9 and 13.0, `ValueError` in 13.5, and a plain number in calls that bypass the bindings."""
    (copy,) = [line for line in found[0] if line.startswith("copy cuMemcpy")]
    assert re.fullmatch(r"copy cuMemcpyHtoDAsync: a code that the bindings do not know: .*99999.*", copy)
    assert "batch cuMemcpyBatchAsync: error 99999 (run 0 of 1)" in found[0]


@pytest.mark.parametrize(
    "call", ["synchronize_event", "synchronize_stream", "register_host", "open_memory", "copy", "copy_batch"]
)
def test_python_goes_on_while_the_driver_waits(call: str, found: tuple[list[str], list[str]]) -> None:
    assert f"{call} released" in found[0]

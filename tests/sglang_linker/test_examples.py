"""The example does what it says, with a tiny model."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.pool.inventory import find_pools
from support.forking_python import ForkingPython
from support.sglang.engines import ENVIRONMENT, nursery

EXAMPLE = Path(__file__).parents[2] / "examples" / "sglang" / "serve.sh"
FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --disable-cuda-graph"
    " --mem-fraction-static 0.9 --max-total-tokens 8192 --context-length 4096 --skip-tokenizer-init --sleep-on-idle"
    " --skip-server-warmup"
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_a_prompt_outlives_its_engine_and_the_example_leaves_no_memory(model: Callable[[str], Path]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvd-") as folder,  # short, as it will contain sockets
        ForkingPython(nursery()) as forking,
    ):
        path = os.pathsep.join(map(str, (forking.python.parent, Path(sys.executable).parent, os.environ["PATH"])))
        places = {"PATH": path, "PORT": str(free_port()), "POOL_SIZE": "128MiB", "TMPDIR": folder}
        done = subprocess.run(
            ["bash", str(EXAMPLE), str(model("gqa")), *FLAGS.split()],
            env={**os.environ, **ENVIRONMENT, **places},
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
        log = "".join(path.read_text(errors="replace")[-3000:] for path in Path(folder).glob("tmp.*") if path.is_file())
        assert done.returncode == 0, done.stderr + log
    pattern = r"^(\w+) engine: (\d+) of 700 prompt tokens came .*, first token after [\d.]+ s$"
    assert re.findall(pattern, done.stdout, re.MULTILINE) == [("first", "0"), ("second", "640")]
    assert "It works" in done.stdout
    assert not [pool for pool in find_pools() if folder in pool.server]

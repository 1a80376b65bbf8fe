"""Two minor versions of vLLM share: what one stored, the other reads, in both directions.

Runs in `tox r -e torch33`, which has the newer version's Python over the older one's kernels for CPU. Its folder is
first in PYTHONPATH; engines without that folder are of the older version.
"""

import os

import pytest

from kvdepot.lab.processes import DepotProcess
from support.vllm.engines import ENVIRONMENT, Engine, MakeModel, cached, connector, prompts, tokens

NEXT = os.environ.get("KVDEPOT_NEXT_VLLM")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NEXT is None, reason="one version of vLLM is installed")]
OLDER = {"PYTHONPATH": os.pathsep.join(each for each in ENVIRONMENT["PYTHONPATH"].split(os.pathsep) if each != NEXT)}
VERSION = "import vllm; result = vllm.__version__"


@pytest.mark.parametrize("name", ["gqa", "short-windows"])
@pytest.mark.promise(70)
def test_each_version_reads_what_the_other_stored(name: str, depot: DepotProcess, model: MakeModel) -> None:
    """The answers are those of the older version without a depot."""
    path, first, second = model(name), prompts(2, 700, seed=90), prompts(2, 700, seed=91)
    older = Engine(path, connector(depot.url), reference=first + second, environment=OLDER)
    with older, Engine(path, connector(depot.url)) as newer:
        assert older.execute(VERSION) < newer.execute(VERSION)
        for writer, reader, prompt, expected in (
            (older, newer, first, older.reference[:2]),
            (newer, older, second, older.reference[2:]),
        ):
            for engine, whole in ((writer, 0), (reader, 640)):
                outputs = engine.generate(prompt, together=False)
                assert (tokens(outputs), cached(outputs)) == (expected, [whole] * 2)

"""An engine on the CPU that obeys commands: `python -m support.cpu.engine_child URL INSTANCE [large]`."""

import sys

from kvdepot.testing.engine import PLAN, obey
from support.cpu.engines import LARGE
from support.cpu.workers import NumpyWorker

if __name__ == "__main__":
    obey(NumpyWorker, sys.argv[1], sys.argv[2], LARGE if "large" in sys.argv[3:] else PLAN)

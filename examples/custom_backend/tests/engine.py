"""An engine that obeys commands. Run: python engine.py URL INSTANCE"""

import sys

from worker import ToyWorker

from kvdepot.testing.engine import obey

if __name__ == "__main__":
    obey(ToyWorker, sys.argv[1], sys.argv[2])

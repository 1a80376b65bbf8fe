"""Processes end as a terminal or a supervisor asks them to."""

import subprocess
import sys

_STOPPED = """
import os, signal
from kvdepot.processes import stopped_once

signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run below nohup
before = [signal.getsignal(each) for each in signals]
with stopped_once():
    pass
assert [signal.getsignal(each) for each in signals] == before
try:
    with stopped_once():
        os.kill(os.getpid(), signal.SIGHUP)
        print("went on")
except KeyboardInterrupt:
    for each in signals:
        os.kill(os.getpid(), each)
    print("cleaned up")
"""


def test_a_process_is_stopped_once_and_cleans_up_whatever_comes_then() -> None:
    done = subprocess.run([sys.executable, "-c", _STOPPED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cleaned up\n", "")

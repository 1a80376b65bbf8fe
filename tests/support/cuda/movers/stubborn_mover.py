"""A mover that outlives its depot: it stops itself in its first copy and unsets its parent-death signal."""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from kvdepot.movers.child import CopyNow, run_mover
from kvdepot.movers.protocol import Copy, Setup
from kvdepot.pool.files import PoolMemory

PR_SET_PDEATHSIG = 1


def open_device(setup: Setup, pool: PoolMemory) -> CopyNow:
    del setup, pool
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)

    def copy(request: Copy) -> None:
        del request
        (Path(os.environ["KVDEPOT_FAKE_DEVICE"]) / f"at-gate-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait(3600)  # SIGSTOP may reach another thread first

    return copy


if __name__ == "__main__":
    run_mover(sys.argv[1:], open_device)

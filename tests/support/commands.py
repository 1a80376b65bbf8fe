"""`kvdepot` as a user runs it, in a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import pytest

KVDEPOT: Final = (sys.executable, "-m", "kvdepot")
IN_SMALL_SHM: Final = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]
"""Runs a command in a mount namespace whose `/dev/shm` has 64 MiB."""

needs_small_shm: Final = pytest.mark.skipif(
    subprocess.run([*IN_SMALL_SHM, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to mount a tmpfs, as root has",
)


def run_kvdepot(*arguments: str, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without input. `prefix` is a command that runs it."""
    return subprocess.run(
        [*prefix, *KVDEPOT, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def log_of_serve(
    *arguments: str, prefix: Sequence[str] = (), signals: Sequence[signal.Signals] = (signal.SIGTERM,)
) -> str:
    """Start a depot, send it signals once it serves, and return its log. It must end with status 0."""
    with subprocess.Popen([*prefix, *KVDEPOT, "serve", *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        logged = ""
        for line in process.stderr:
            logged += line
            if "serving" in line:
                for number in signals:
                    process.send_signal(number)
        assert process.wait(20) == 0, logged
    return logged

"""`kvdepot` as a user runs it, in a process of its own."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

KVDEPOT: Final = (sys.executable, "-m", "kvdepot")


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

"""The start time of a process. Together with the pid, it identifies a process even if the pid is reused."""

from pathlib import Path

from kvdepot.processes.descriptors import raise_if_exhausted


def process_start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, 0 if the process does not exist.

    Raises:
        OSError: this process has no descriptor left.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError) as error:
        raise_if_exhausted(error)
        return 0

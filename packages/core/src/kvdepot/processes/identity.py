"""When a process started: with its number this names it for ever, however often the number is given out again."""

from pathlib import Path

from kvdepot.processes.descriptors import raise_if_exhausted


def process_start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it is not there.

    Raises:
        OSError: this process has no descriptor left to look.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError) as error:
        raise_if_exhausted(error)
        return 0

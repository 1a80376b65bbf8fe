"""Keeps the corpus minimal: the fewest and smallest inputs that together reach all lines that any input reached."""

import hashlib
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, cast

from fuzz.targets import CORPUS, TARGETS

_FOLDERS = (f"{os.sep}kvdepot{os.sep}", f"{os.sep}fuzz{os.sep}")

_KEPT_NAME = re.compile("[0-9a-f]{12}")

Step = tuple[str, int, int]  # file, line, next line


def steps_of(target: str, data: bytes) -> set[Step]:
    """Return the steps between lines that an input takes."""
    found: set[Step] = set()
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(folder in name for folder in _FOLDERS):
            return None
        if event == "line":
            found.add((name, last.get(id(frame), 0), frame.f_lineno))
            last[id(frame)] = frame.f_lineno
        elif event == "call":
            last[id(frame)] = 0
        return trace

    sys.settrace(trace)
    threading.settrace(trace)  # of the threads that a target starts
    try:
        TARGETS[target].run(data)
    finally:
        sys.settrace(None)
        threading.settrace(cast("Any", None))
    return found


def keep_smallest(target: str, found: Path) -> int:
    """Keep the smallest inputs of the corpus and of `found` that take new steps. Return the number of kept inputs.

    Inputs with their own names, which once crashed, stay unchanged.
    """
    folder = CORPUS / target
    named = [path for path in folder.iterdir() if not _KEPT_NAME.fullmatch(path.name)]
    seen: set[Step] = set()
    for path in named:
        seen |= steps_of(target, path.read_bytes())
    others = {path.read_bytes() for place in (folder, found) for path in place.iterdir() if path not in named}
    kept: list[bytes] = []
    for data in sorted(others, key=lambda data: (len(data), data)):
        if len(data) > TARGETS[target].maximum_bytes:
            break
        new = steps_of(target, data) - seen
        if new:
            seen |= new
            kept.append(data)
    for path in folder.iterdir():
        if path not in named:
            path.unlink()
    for data in kept:
        (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
    return len(kept) + len(named)

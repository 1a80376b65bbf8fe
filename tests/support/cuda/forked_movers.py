"""Lets a depot fork the fake device's movers, whose imports take longer than most tests.

The nursery of such depots imports this module, and those that the movers need.
"""

import gc
import logging
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from kvdepot.movers import process

_ALL_DESCRIPTORS: Final = 1 << 20


class ForkedMover(subprocess.Popen[bytes]):
    """Runs `python -P -m MODULE ARGUMENTS...` in the fork itself, in place of a new program."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> None:
        super().__init__(command, pass_fds=pass_fds, preexec_fn=partial(_run, command[3:], pass_fds), **options)


def _run(argv: Sequence[str], kept: Sequence[int]) -> NoReturn:
    gc.freeze()  # nothing of the depot's may be closed here, where its descriptors may be another's
    begin = 3
    for descriptor in (*sorted(kept), _ALL_DESCRIPTORS):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    logging.getLogger().handlers.clear()
    sys.argv = list(argv)
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


process.__dict__["subprocess"] = SimpleNamespace(Popen=ForkedMover, DEVNULL=subprocess.DEVNULL)

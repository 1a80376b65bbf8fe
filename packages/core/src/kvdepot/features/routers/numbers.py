"""The sequence numbers of published batches. They only grow, over restarts and with a clock that was set back, too.

Routers take a batch with a lower number than the last one for an old one: Dynamo's indexer then kept the blocks of a
depot that had restarted empty with its clock an hour back, and learned none of its new ones in that hour.
"""

import logging
import struct
import time
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

NUMBERS_FILE: Final = "events"
_NUMBER: Final = struct.Struct("<Q")
_AHEAD: Final = 1 << 20  # numbers reserved by one write: minutes of the busiest depot


class Numbers:
    """Numbers for batches, from the present time in microseconds on, or above the numbers of an earlier depot.

    Args:
        path: has the least number that no depot has used; None to keep none.

    Attributes:
        first: the first number to use.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._reserved = self.first = max(time.time_ns() // 1000, self._read())

    def use(self, number: int) -> None:
        """Note that a number is about to be used."""
        if number >= self._reserved:
            self._reserved = number + _AHEAD
            if self._path is not None:
                try:
                    self._path.write_bytes(_NUMBER.pack(self._reserved))
                except OSError as error:
                    logger.warning("cannot keep the numbers of events, so the clock must not be set back: %s", error)
                    self._path = None

    def _read(self) -> int:
        try:
            data = b"" if self._path is None else self._path.read_bytes()
        except OSError:  # there is none
            return 0
        # A damaged file must not use up the numbers: routers read them as signed.
        return number if len(data) == _NUMBER.size and (number := _NUMBER.unpack(data)[0]) < 1 << 62 else 0

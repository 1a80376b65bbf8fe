"""The file of the chunks' tokens that engines described for routers. The next server reads it.

It grows by one frame per accepted message. `rewrite` drops messages that are no longer wanted. If the file is damaged,
engines describe the chunks after the damage again with later prompts.
"""

import logging
import os
from collections.abc import Callable, Iterator
from typing import ClassVar, Final

from kvdepot.pool.frames import FrameFile

logger = logging.getLogger(__name__)


TOKENS_FILE: Final = "tokens"


class TokensFile(FrameFile):
    """The open file of a pool's tokens."""

    MAGIC: ClassVar[bytes] = b"KVDEPOTT\x01\x00\x00\x00"
    _is_full = False  # whether the last message found no room

    def append(self, body: bytes) -> None:
        """Append a message. Without room, log a warning and drop it."""
        try:
            self.add_frame(body)
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                folder = self.path.parent
                logger.warning("no room for tokens in %s: the next server will not know them (%s)", folder, error)
            self._is_full = True

    def rewrite(self, is_wanted: Callable[[bytes], bool | None]) -> Iterator[int]:
        """Rewrite the file with the wanted messages and messages appended meanwhile, one per step.

        `is_wanted` returns None to be asked about the message again in the next step.

        If the server is killed before the end, the file stays as it was. Without room for a new file it stays, too, but
        `is_wanted` learns of all its messages.
        """
        unfinished = self.path.with_name(f".{TOKENS_FILE}-{os.urandom(8).hex()}")
        try:
            fd = self._make(unfinished)
        except OSError as error:
            logger.warning("cannot rewrite the tokens in %s: %s", self.path.parent, error)
            for body in self.bodies():
                while is_wanted(body) is None:
                    yield 0
                yield 0
            return
        old = TokensFile(self._fd, self.path, self.size_bytes)
        self._fd, self.size_bytes = fd, len(self.MAGIC)
        try:
            for body in old.bodies():
                while (wanted := is_wanted(body)) is None:
                    yield 0
                if wanted:
                    self.append(body)
                yield 0
            # Only now: until then, a kill leaves the whole old file. A new one got its name after it was opened.
            unfinished.rename(self.path.with_name(TOKENS_FILE))
        finally:
            old.close()

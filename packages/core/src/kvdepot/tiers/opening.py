"""Opens tiers: the settings' before the server starts to serve, later ones on a thread."""

import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvdepot.errors import ConfigError
from kvdepot.tiers.base import Tier, TierPool
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.url import TierUrl, open_tier

logger = logging.getLogger(__name__)


OnOpened = Callable[[TierQueue | ConfigError], None]


class TierOpener:
    """Opens tiers over one pool, which it maps when it opens the first one.

    Args:
        pool_fd: the pool's file.
        size_bytes: the size of the pool.
        wake: wakes the depot's loop from any thread.
    """

    def __init__(self, pool_fd: int, size_bytes: int, wake: Callable[[], None]) -> None:
        self._pool_fd = pool_fd
        self._size_bytes = size_bytes
        self._wake = wake
        self._memory: mmap.mmap | None = None
        self._opened: deque[tuple[TierQueue | ConfigError, OnOpened]] = deque()
        self._num_opening = 0

    @property
    def is_opening(self) -> bool:
        """Whether a thread is opening a tier, or an opened tier waits for `deliver`."""
        return bool(self._num_opening)

    def open_all(self, urls: Sequence[str]) -> list[TierQueue]:
        """Open a tier per URL. Return their queues.

        Raises:
            ConfigError: a tier cannot be opened. None stays open.
        """
        queues: list[TierQueue] = []
        try:
            for url in urls:
                queues.append(self._open(url))
        except ConfigError:
            for queue in queues:
                queue.close()
            raise
        return queues

    def begin(self, url: str, on_opened: OnOpened) -> None:
        """Open a tier on a thread. `deliver` calls `on_opened` with its queue or with the error."""
        self._num_opening += 1

        def work() -> None:
            try:
                result: TierQueue | ConfigError = self._open(url)
            except ConfigError as error:
                result = error
            except Exception as error:
                logger.exception("opening a tier failed")
                result = ConfigError(f"{type(error).__name__}: {error}")
            self._opened.append((result, on_opened))
            self._wake()

        threading.Thread(target=work, name="kvdepot-open-tier", daemon=True).start()

    def deliver(self) -> None:
        """Pass on the opened tiers. Called on the loop's thread."""
        while self._opened:
            result, on_opened = self._opened.popleft()
            self._num_opening -= 1
            on_opened(result)

    def _open(self, text: str) -> TierQueue:
        url = TierUrl.parse(text)
        waiting = url.take_size("queue", min(1 << 30, self._size_bytes // 2))
        url.takes_writes = waiting > 0
        pool = self._pool()
        tier = open_tier(url, pool)
        queue = TierQueue(
            tier,
            pool,
            url.name,
            deadline_seconds=url.deadline_seconds,
            num_threads=url.num_threads,
            write_bytes=waiting,
            wake=self._wake,
        )
        queue.breaker.begin()
        return queue

    def host(self, make: Callable[[TierPool], Tier], name: str, num_threads: int) -> TierQueue:
        """Return the queue of a tier that is only read, and that `make` opens without waiting."""
        pool = self._pool()
        queue = TierQueue(make(pool), pool, name, num_threads=num_threads, write_bytes=0, wake=self._wake)
        queue.breaker.begin()
        return queue

    def _pool(self) -> TierPool:
        if self._memory is None:
            self._memory = mmap.mmap(self._pool_fd, self._size_bytes)
        return TierPool(self._pool_fd, memoryview(self._memory))

"""A mover that is never ready."""

import signal

signal.pause()

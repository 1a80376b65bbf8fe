"""Errors meant for callers. Each says what happened, to which object, and what to do about it.

`ErrorCode` travels in error replies; a client raises it as `RemoteError`.
"""

import enum


class KVDepotError(Exception):
    """Base of every error that kvdepot raises on purpose."""


class ConfigError(KVDepotError):
    """A setting is wrong; the text names its flag."""


class LayoutError(KVDepotError):
    """A layout is inconsistent."""


class KeyFormatError(KVDepotError):
    """A key, token or digest is malformed."""


class PoolError(KVDepotError):
    """The pool's files cannot be created, mapped or trusted."""


class TraceError(KVDepotError):
    """A trace cannot be replayed; the text names the file and the line."""


class BackendUnavailable(KVDepotError):
    """An accelerator backend is missing, not built, or has no device."""


class DeviceError(KVDepotError):
    """A device failed; `is_permanent` says whether this process can no longer use it at all."""

    is_permanent: bool = False


class DepotUnavailable(KVDepotError):
    """No depot answers: there is none, it hangs, or the connection is lost. The request is a miss."""


class DepotTimeout(DepotUnavailable):
    """The depot did not answer within a deadline."""


class DepotBusy(KVDepotError):
    """Another server already uses this directory."""


def printable(text: str) -> str:
    """Return untrusted text as one line that is safe to print: unprintable characters are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class RemoteError(KVDepotError):
    """The depot refused a request; `code` says why. Untrusted names in its text are escaped."""

    def __init__(self, code: "ErrorCode", message: str) -> None:
        super().__init__(f"{code.value}: {printable(message)}")
        self.code = code


class ErrorCode(enum.StrEnum):
    """The reason in an error reply."""

    MALFORMED = "malformed"  # not a message, or a field out of range
    UNKNOWN_OPERATION = "unknown_operation"  # this server does not know the tag
    VERSION_MISMATCH = "version_mismatch"  # no protocol version in common
    UNKNOWN_SESSION = "unknown_session"  # no open session: connect again
    UNKNOWN_CONTEXT = "unknown_context"  # not registered, or registered by another session
    UNKNOWN_TICKET = "unknown_ticket"  # not prepared, or already committed
    BAD_LAYOUT = "bad_layout"  # an inconsistent layout, or one that differs from its peers'
    BAD_KEY = "bad_key"  # digests of a wrong length or number
    OUT_OF_RANGE = "out_of_range"  # a limit is exceeded
    DRAINING = "draining"  # the server is about to stop
    TIER_UNAVAILABLE = "tier_unavailable"  # done in the pool, but not in all tiers
    INTERNAL = "internal"  # a bug: the request failed, the server goes on

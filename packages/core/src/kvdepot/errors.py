"""Errors meant for callers: each says what happened, to what, and the way out.

`ErrorCode` travels in error replies; a client raises the exception that `error_for_code` names, so that both sides
speak of a failure by the same word.
"""

import enum


class KVDepotError(Exception):
    """Base of every error that kvdepot raises on purpose."""


class ConfigError(KVDepotError):
    """A setting that cannot work, with the flag that changes it."""


class LayoutError(KVDepotError):
    """A layout that does not add up."""


class KeyFormatError(KVDepotError):
    """A key, token or digest that is not well formed."""


class PoolError(KVDepotError):
    """The pool's files cannot be made, mapped or trusted."""


class TraceError(KVDepotError):
    """A trace that cannot be replayed, with the file and the line that is wrong."""


class BackendUnavailable(KVDepotError):
    """An accelerator backend is missing, not built or without its device."""


class DeviceError(KVDepotError):
    """A device failed; `is_permanent` says whether all that this process asks of it will fail from now on."""

    is_permanent: bool = False


class DepotUnavailable(KVDepotError):
    """No depot answers: there is none, it hangs, or the connection was lost; the work is a miss."""


class DepotTimeout(DepotUnavailable):
    """The depot did not answer within a deadline."""


class DepotBusy(KVDepotError):
    """Another server already serves this directory."""


class IntegrityError(KVDepotError):
    """Bookkeeping that does not add up: a bug; the text says of what."""


def require(condition: bool, text: str) -> None:
    """Check bookkeeping.

    Raises:
        IntegrityError: the condition does not hold.
    """
    if not condition:
        raise IntegrityError(text)


def printable(text: str) -> str:
    """Return text that others chose as one line without a meaning for a terminal: what does not print is escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class RemoteError(KVDepotError):
    """The depot refused a request; `code` says why. Its text may have names that other clients chose, escaped."""

    def __init__(self, code: "ErrorCode", message: str) -> None:
        super().__init__(f"{code.value}: {printable(message)}")
        self.code = code


class ErrorCode(enum.StrEnum):
    """Why a request was refused, as it stands in an error reply."""

    MALFORMED = "malformed"  # not a message, or a field out of range
    UNKNOWN_OPERATION = "unknown_operation"  # a tag this server does not know
    VERSION_MISMATCH = "version_mismatch"  # protocol versions without a common one
    UNKNOWN_SESSION = "unknown_session"  # no open session: connect again
    UNKNOWN_CONTEXT = "unknown_context"  # not registered, or registered by another session
    UNKNOWN_TICKET = "unknown_ticket"  # not prepared, or committed before
    BAD_LAYOUT = "bad_layout"  # a layout that does not add up, or differs from its peers'
    BAD_KEY = "bad_key"  # digests of the wrong length or count
    OUT_OF_RANGE = "out_of_range"  # there is no room for what is asked
    DRAINING = "draining"  # the server is about to stop
    TIER_UNAVAILABLE = "tier_unavailable"  # done in the pool, but not in every tier
    INTERNAL = "internal"  # a bug: the request failed, the server goes on

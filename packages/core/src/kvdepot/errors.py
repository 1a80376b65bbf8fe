"""Errors meant for callers. Each text names the failure, the object and the remedy.

An error reply contains an `ErrorCode`. The client raises it as a `RemoteError`.
"""

import codecs
import enum
import re
from typing import Final

# Found at import: its module is a file, and a process that has no descriptors left logs that, too.
_ESCAPE: Final = codecs.getencoder("unicode_escape")


class KVDepotError(Exception):
    """The base of all errors that kvdepot raises deliberately."""


class ConfigError(KVDepotError):
    """A setting is invalid. The text names the flag."""


class LayoutError(KVDepotError):
    """A layout contradicts itself or its tensors."""


class KeyFormatError(KVDepotError):
    """A key, token or digest is malformed."""


class PoolError(KVDepotError):
    """The pool's files cannot be created, mapped or trusted."""


class BackendUnavailable(KVDepotError):
    """An accelerator backend is missing, not built, or has no device."""


class DeviceError(KVDepotError):
    """A device failed. If `is_permanent`, all further requests of this process will fail."""

    is_permanent: bool = False


class DepotUnavailable(KVDepotError):
    """No depot answers: it is absent or hung, or the connection was lost. The work is a miss."""


class DepotTimeout(DepotUnavailable):
    """The depot did not answer within a deadline."""


class DepotForeign(DepotUnavailable):
    """A process of another user answers in the depot's place."""


class DepotBusy(KVDepotError):
    """Another server already uses this directory."""


class IntegrityError(KVDepotError):
    """The depot's bookkeeping is inconsistent, which is a bug. The text names the place."""


def require(condition: bool, text: str) -> None:
    """Check a condition of the bookkeeping.

    Raises:
        IntegrityError: the condition does not hold.
    """
    if not condition:
        raise IntegrityError(text)


def printable(text: str) -> str:
    """Escape unprintable characters of foreign text, so that it is one line without control characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _ESCAPE(each)[0].decode() for each in text)


def describe_os_error(error: OSError) -> str:
    """Describe the operation that the kernel refused and its file, without the errno."""
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename is not None else what


def reason_of(error: Exception) -> str:
    """Return the kernel's message without errno and file, for a text that already names the file."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_INVALID = re.compile(r"(?:Expected `(?:\w+)` (of length )?([<>]=) ([\d.]+))?(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)


def reason_of_invalid(error: Exception) -> str:
    """Return the reason for which msgspec or `bytes.fromhex` refused a value, in words, after the name of its field."""
    text = str(error)
    if "fromhex()" in text:
        return "digests and keys are pairs of hexadecimal digits, 0 to 9 and a to f"
    if text == "Input data was truncated":
        return "it ends before its JSON does"
    found = _INVALID.fullmatch(text)
    assert found is not None  # each of its parts may be missing
    of_length, bound, number, rest, field = found.groups()
    if bound:
        unit = (" character" if number == "1" else " characters") if of_length else ""
        rest = f"give at {'least' if bound == '>=' else 'most'} {float(number):,}".removesuffix(".0") + unit
    return f"{field}: {rest}" if field else rest


class RemoteError(KVDepotError):
    """The depot refused a request; `code` gives the reason. Names chosen by other clients are escaped in the text."""

    def __init__(self, code: "ErrorCode", message: str) -> None:
        super().__init__(f"{code.value}: {printable(message)}")
        self.code = code
        self.reason = printable(message)  # the text without the code


class ErrorCode(enum.StrEnum):
    """The reasons for a refusal, as in an error reply."""

    MALFORMED = "malformed"  # not a valid message, or a field is out of range
    UNKNOWN_OPERATION = "unknown_operation"  # an unknown tag
    VERSION_MISMATCH = "version_mismatch"  # no common protocol version
    UNKNOWN_SESSION = "unknown_session"  # no open session: connect again
    UNKNOWN_CONTEXT = "unknown_context"  # not registered, or registered by another session
    UNKNOWN_TICKET = "unknown_ticket"  # not prepared, or committed already
    BAD_LAYOUT = "bad_layout"  # a layout that contradicts itself or its peers'
    BAD_KEY = "bad_key"  # digests of the wrong length or count
    OUT_OF_RANGE = "out_of_range"  # no room for the request
    DRAINING = "draining"  # the server accepts no stores
    TIER_UNAVAILABLE = "tier_unavailable"  # done in the pool, but not in every tier
    INTERNAL = "internal"  # a bug: the request failed, the server continues
    OTHER = "other"  # a code of a later release, which this one does not know

    @classmethod
    def _missing_(cls, value: object) -> "ErrorCode":
        # Otherwise the reply of a later depot would be no reply at all, and end the connection.
        return cls.OTHER

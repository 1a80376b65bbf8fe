"""CURVE keys, by which a depot and its clients over TCP know each other.

A key pair is two files in the format of ZMQ's own tools (`zmq.auth`, czmq). `NAME.key` is public and goes to the peers
of the pair's owner. `NAME.key_secret` holds both keys and stays where it was made, readable by its user. The depot has
a pair and the public keys of its clients; a client has a pair and the public key of its depot. Files are read once, at
the start. After changing them, restart the depot, which keeps its cache and ends every connection.
"""

import contextlib
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import load_certificate  # pyright: ignore[reportUnknownVariableType]
from zmq.utils import z85

from kvdepot.errors import ConfigError

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_KEY_CHARACTERS: Final = 40
_HOW_TO_MAKE_KEYS: Final = "make keys with 'kvdepot keys generate DIR'"
_PUBLIC_FILE: Final = """\
#   ZeroMQ CURVE Public Certificate
#   For everybody who talks to the owner of this key; make sure that it arrives unchanged.

metadata
curve
    public-key = "{public}"
"""
_SECRET_FILE: Final = """\
#   ZeroMQ CURVE **Secret** Certificate
#   DO NOT GIVE THIS FILE TO ANYBODY nor change its permissions.

metadata
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret, each as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's keys for a depot over TCP: its own pair, and the depot's public key."""

    own: KeyPair
    server: bytes


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """A depot's keys for TCP: its own pair, and the names of admitted clients."""

    own: KeyPair
    allowed: Mapping[bytes, str]  # by public key, as 32 bytes


def generate_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Generate a key pair and return its public and its secret file. Nothing is overwritten.

    Raises:
        ConfigError: the name is invalid, a file exists, or the files cannot be written. No file is left behind.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} cannot be a key's name: letters, digits, '.', '_' and '-', for example 'node-7'")
    if not zmq.has("curve"):
        raise ConfigError("this libzmq has no CURVE: install pyzmq from its wheels, or build libzmq with libsodium")
    public_path, secret_path = directory / f"{name}{PUBLIC_SUFFIX}", directory / f"{name}{SECRET_SUFFIX}"
    public, secret = (key.decode() for key in zmq.curve_keypair())
    made: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, mode, text in ((public_path, 0o644, _PUBLIC_FILE), (secret_path, 0o600, _SECRET_FILE)):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            made.append(path)
            with open(fd, "w") as file:
                file.write(text.format(public=public, secret=secret))
    except OSError as error:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, FileExistsError):
            raise ConfigError(
                f"{error.filename} is there already and is not overwritten: choose another --name, or remove it"
                " yourself if nobody uses that key any more"
            ) from error
        raise ConfigError(f"cannot write keys into {directory}: {error.strerror}") from error
    return public_path, secret_path


def load_pair(path: Path, flag: str) -> KeyPair:
    """Return the pair in a secret file. Errors name `flag`.

    Raises:
        ConfigError: it is not a secret file, or everybody on this machine may read it.
    """
    public, secret = _load(path, flag)
    if secret is None:
        raise ConfigError(f"{flag} {path} holds a public key only: name the file that ends in {SECRET_SUFFIX}")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{flag} {path}: its public key does not belong to its secret key; {_HOW_TO_MAKE_KEYS}")
    mode = path.stat().st_mode
    if mode & 0o007:
        raise ConfigError(f"{flag} {path} has mode {mode & 0o777:04o}, so others know the secret: chmod 600 {path}")
    return KeyPair(public, secret)


def load_public(path: Path, flag: str) -> bytes:
    """Return the public key in a file. Errors name `flag`.

    Raises:
        ConfigError: it is not a key file.
    """
    return _load(path, flag)[0]


def load_allowed(path: Path, flag: str) -> dict[bytes, str]:
    """Return the public keys in the folder (`*.key`) or the file `path`: names by keys of 32 bytes.

    Raises:
        ConfigError: a file is damaged or missing, so nobody could connect.
    """
    files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(
            f"{flag} {path} has no public keys (*{PUBLIC_SUFFIX}), so nobody could be served: copy the"
            f" {PUBLIC_SUFFIX} file of every client there; {_HOW_TO_MAKE_KEYS}"
        )
    return {z85.decode(load_public(file, flag)): file.stem for file in files}


def _load(path: Path, flag: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
        for key in (public, secret):
            if key is not None and (len(key) != _KEY_CHARACTERS or len(z85.decode(key)) != 32):
                raise ValueError("a key has 40 characters of Z85")
    except PermissionError as error:
        raise ConfigError(f"{flag} {path} cannot be read by this user") from error
    except OSError as error:
        reason = "is a folder" if path.is_dir() else "is not there"
        raise ConfigError(f"{flag} {path} {reason}: name a key's file; {_HOW_TO_MAKE_KEYS}") from error
    except (ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"{flag} {path} holds no CURVE key: {error}; {_HOW_TO_MAKE_KEYS}") from error
    return public, secret

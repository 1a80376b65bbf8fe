"""Files of weights as a target: headers of safetensors, and the listings of archives that `torch.save` writes."""

import json
import os
from typing import Any, Final
from unittest.mock import patch

from fuzz.tiers import FOLDER
from kvdepot.engines import identity
from support.weights import archive, safetensors

_SUFFIXES: Final = (".safetensors", ".bin", ".gguf")
_WHOLE_BYTES, _SAMPLE_BYTES = 64, 16  # so that small files have large tensors
_MOST_READ_BYTES: Final = 200_000  # by a fingerprint of a file of at most 3,000 bytes


def parse(data: bytes) -> None:
    """A file, of which byte 0 chooses the kind: a fingerprint, or an `OSError`, for few bytes read.

    If byte 0 is large, the length of a header is made right.
    """
    kind, body = data[0] if data else 0, data[1:]
    if kind & 0x80:
        head, _, rest = body.partition(b"\n")
        body = len(head).to_bytes(8, "little") + head + rest
    file = FOLDER / f"model{_SUFFIXES[kind % len(_SUFFIXES)]}"
    file.write_bytes(body)
    num_bytes, pread = 0, os.pread

    def counted(place: int, size: int, offset: int) -> bytes:
        nonlocal num_bytes
        num_bytes += size
        return pread(place, size, offset)

    with patch.multiple(identity, _WHOLE_BYTES=_WHOLE_BYTES, _SAMPLE_BYTES=_SAMPLE_BYTES), patch("os.pread", counted):
        try:
            found = identity.fingerprint(file)
        except OSError:
            return
        finally:
            assert num_bytes < _MOST_READ_BYTES
        assert found == identity.fingerprint(file)
    assert found.digest
    assert found.coarse in ((), (file.name,))
    assert 0 <= found.unseen_bytes <= len(body)


def seeds() -> list[bytes]:
    """Return whole files, headers that contradict their files, and archives that do."""
    tensors = {"norm": bytes(40), "projection": bytes(range(256)) * 4, "scale": b"abcd"}
    file = FOLDER / "seed" / "model"
    whole, packed = safetensors(file, tensors).read_bytes(), archive(file, tensors).read_bytes()
    headers: list[Any] = [
        {"a": {"data_offsets": [0, 8]}},
        {"a": {"data_offsets": [8, 0]}, "b": {"data_offsets": [4, 900]}},
        {"a": {"data_offsets": [0, 8, 9]}},
        {"a": {"data_offsets": [-99, 1]}},
        {"a": {"data_offsets": ["1", 1.5]}},
        {"a": {"data_offsets": [True, None]}},
        {"a": {}, "__metadata__": 5},
        {"a": 5},
        [],
    ]
    return [
        *(bytes([kind]) + body for kind in range(len(_SUFFIXES)) for body in (whole, packed, b"")),
        *(b"\x81" + json.dumps(header).encode() + b"\n" + bytes(600) for header in headers),
        b"\0\xff" + bytes(10),
    ]

"""Any tensor that changes in place changes the fingerprint of the weights, for which few bytes are read."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.engines.identity import fingerprint
from support.weights import archive, model_tensors, safetensors


@pytest.mark.slow
@pytest.mark.parametrize("write", [safetensors, archive])
@pytest.mark.promise(19, 69)
def test_any_tensor_that_changed_in_place_makes_other_weights(
    write: Callable[[Path, dict[str, bytes]], Path], tmp_path: Path
) -> None:
    # Regression: only 64 places of a file were sampled, and the doubled norms lay between them.
    file = write(tmp_path / "model" / ("model.safetensors" if write is safetensors else "model.bin"), model_tensors())
    size, found = file.stat().st_size, {"": fingerprint(tmp_path / "model").digest}
    for name in [f"{layer}.{name}" for layer in (0, 7, 29) for name in ("qkv", "norm", "scale", "down", "norm2")]:
        tensors = model_tensors()
        tensors[name] = tensors[name].translate(bytes(range(255, -1, -1)))
        write(file, tensors)
        assert file.stat().st_size == size
        found[name] = fingerprint(tmp_path / "model").digest
    assert len(set(found.values())) == 16


def test_half_of_a_large_tensor_that_changed_is_noticed(tmp_path: Path) -> None:
    fused = random.Random(6).randbytes(8_000_000)
    found: set[str] = set()
    for data in (fused, fused[:4_000_000] + bytes(4_000_000), bytes(4_000_000) + fused[4_000_000:]):
        safetensors(tmp_path / "model" / "model.safetensors", {**model_tensors(), "fused": data})
        found.add(fingerprint(tmp_path / "model").digest)
    assert len(found) == 3


def test_samples_are_few_however_large_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors(tmp_path / "model" / "model.safetensors", model_tensors())
    read: list[int] = []
    pread = os.pread

    def counted(place: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(place, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    fingerprint(tmp_path / "model")
    assert len(read) <= 2 + 30 * 7 + 64
    assert sum(read) < 600_000, "of 36 MB"

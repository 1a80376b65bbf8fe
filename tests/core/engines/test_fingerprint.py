"""Any tensor that changes in place changes the fingerprint of the weights, for which few bytes are read.

Files that no engine loads do not change it.
"""

import json
import os
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    "offsets",
    [
        [[0, 100_000_000]],
        [[0, 1 << 62]],
        [[-(1 << 62), 64]],
        [[0, 4096], [0, 4096]],
        [[64, 0]],
        [[1e300, 1e301]],
        [["0", None]],
    ],
    ids=str,
)
def test_a_file_whose_listing_does_not_fit_it_is_sampled_evenly(offsets: list[list[Any]], tmp_path: Path) -> None:
    # Regression: the samples for tensors far beyond the file took all memory and some seconds at an engine's start.
    (tmp_path / "model").mkdir()
    tensors = {str(number): {"dtype": "U8", "shape": [1], "data_offsets": each} for number, each in enumerate(offsets)}
    text = json.dumps(tensors).encode()
    data = len(text).to_bytes(8, "little") + text + random.Random(6).randbytes(1 << 16)
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    found = fingerprint(tmp_path / "model")
    assert found.coarse == ("model.safetensors",)
    (tmp_path / "model" / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert fingerprint(tmp_path / "model").digest != found.digest


def test_an_archive_whose_listing_does_not_fit_it_is_sampled_evenly(tmp_path: Path) -> None:
    data = bytearray(archive(tmp_path / "model" / "model.bin", model_tensors()).read_bytes())
    entry = data.index(b"PK\1\2")
    data[entry + 42 : entry + 46] = (len(data) + 1).to_bytes(4, "little")  # the place of the first member
    (tmp_path / "model" / "model.bin").write_bytes(data)
    assert fingerprint(tmp_path / "model").coarse == ("model.bin",)


@pytest.mark.parametrize(
    ("place", "field"),
    [(6, b"\xff\xff"), (46, b"\xff\xff\xff"), (0, b"PK\5\6" + bytes(18))],
    ids=["later format", "a name that is no text", "no members"],
)
def test_an_archive_that_cannot_be_listed_is_sampled_evenly(place: int, field: bytes, tmp_path: Path) -> None:
    # Regression: each of them stopped an engine at its start.
    data = bytearray(archive(tmp_path / "model" / "model.bin", model_tensors()).read_bytes())
    entry = data.index(b"PK\1\2")
    data[entry + 8 : entry + 10] = (1 << 11).to_bytes(2, "little")  # names are UTF-8
    data[entry + place : len(data) if place == 0 else entry + place + len(field)] = field
    (tmp_path / "model" / "model.bin").write_bytes(data)
    found = fingerprint(tmp_path / "model")
    assert found.coarse == ("model.bin",)
    data[:100] = bytes(100)
    (tmp_path / "model" / "model.bin").write_bytes(data)
    assert fingerprint(tmp_path / "model").digest != found.digest


SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
ADAPTER = "adapter_model.safetensors"


def shard(number: int, value: int = 0, name: str = "") -> dict[str, bytes]:
    """Return the tensors of a shard: with other `value`s they differ, also under the same names."""
    return {name or f"layer {number}": random.Random(number + 9 * value).randbytes(5000)}


def write_index(folder: Path, names: Collection[str]) -> None:
    places = {f"layer {number}": name for number, name in enumerate(names, 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def model(folder: Path, names: Collection[str] = SHARDS, *, indexed: bool = True) -> Path:
    for number, name in enumerate(names, 1):
        safetensors(folder / name, shard(number))
    if indexed:
        write_index(folder, names)
    return folder


STATES = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state_0.pth")


@pytest.mark.promise(69)
@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", ""])
@pytest.mark.parametrize("name", [*STATES, "pytorch_model-00001-of-00002.bin", "notes.txt"])
def test_files_that_no_engine_loads_beside_the_weights_do_not_count(
    name: str, load_format: str, tmp_path: Path
) -> None:
    # Regression: one such file more made equal weights differ.
    folder = model(tmp_path / "model")
    alone = fingerprint(folder, load_format)
    assert alone.digest
    archive(folder / name, shard(3))
    assert fingerprint(folder, load_format) == alone


@pytest.mark.promise(69)
@pytest.mark.parametrize("indexed", [True, False])
def test_equal_shards_under_other_names_are_equal_weights(indexed: bool, tmp_path: Path) -> None:
    longer = [f"model-0000{number}-of-000002.safetensors" for number in (2, 1)]
    folders = [model(tmp_path / str(len(names[0])), names, indexed=indexed) for names in (SHARDS, longer)]
    assert len({fingerprint(folder, "auto").digest for folder in folders}) == 1
    safetensors(folders[0] / SHARDS[0], shard(1, value=1))
    assert len({fingerprint(folder, "auto").digest for folder in folders}) == 2


@pytest.mark.parametrize(("load_format", "counts"), [("hf", False), ("safetensors", False), ("auto", True)])
def test_a_consolidated_copy_counts_unless_the_load_format_leaves_it_out(
    load_format: str, counts: bool, tmp_path: Path
) -> None:
    """With `auto`, vLLM loads it in place of the shards."""
    folder = model(tmp_path / "model")
    found = [fingerprint(folder, load_format).digest]
    for value in (1, 2):
        safetensors(folder / "consolidated.safetensors", shard(3, value=value))
        found.append(fingerprint(folder, load_format).digest)
    assert len(set(found)) == (3 if counts else 1)


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor"])
def test_shards_of_another_split_that_the_index_does_not_list_do_not_count(load_format: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    alone = fingerprint(folder, load_format)
    for name in ("model-00001-of-00003.safetensors", "model.safetensors"):
        safetensors(folder / name, shard(3))
    assert fingerprint(folder, load_format) == alone
    assert fingerprint(folder, "sharded_state") != alone, "this loader follows no index"


@pytest.mark.parametrize(
    "damage", ["{", '{"weight_map": [1]}', '{"weight_map": {"a": "gone.safetensors"}}', "[" * 9999]
)
def test_an_index_that_cannot_be_followed_leaves_nothing_out(damage: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(damage)
    found = {fingerprint(folder, "auto").digest}
    for name in ("model-00001-of-00003.safetensors", "consolidated.safetensors"):
        safetensors(folder / name, shard(3))
        found.add(fingerprint(folder, "hf").digest)
    assert len(found) == 3


def test_a_file_counts_with_its_name_where_its_name_decides_what_is_loaded(tmp_path: Path) -> None:
    """Each pair of folders has the same files, which have exchanged their names."""

    def digests(names: tuple[str, str], tensors: tuple[str, str], load_format: str, *listed: str) -> set[str]:
        found: set[str] = set()
        for order in (1, -1):
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            for name, number in zip(names[::order], (1, 2), strict=True):
                write = safetensors if name.endswith(".safetensors") else archive
                write(folder / name, shard(number, name=tensors[number - 1]))
            write_index(folder, listed)
            found.add(fingerprint(folder, load_format).digest)
        return found

    shards, apart = (SHARDS[0], SHARDS[1]), ("a", "b")
    assert len(digests(shards, apart, "auto", *shards)) == 1
    assert len(digests(shards, ("a", "a"), "auto", *shards)) == 2, "the last one of two equal names is loaded"
    assert len(digests((SHARDS[0], "consolidated.safetensors"), apart, "auto", SHARDS[0])) == 2
    assert len(digests((SHARDS[0], "mtp.safetensors"), apart, "auto", SHARDS[0])) == 2
    assert len(digests(("model.safetensors", "mtp.safetensors"), apart, "auto")) == 2
    assert len(digests(("pytorch_model-1.bin", "pytorch_model-2.bin"), apart, "auto")) == 2


@pytest.mark.parametrize("load_format", ["pt", "npcache"])
def test_pickles_count_where_the_load_format_loads_them(load_format: str, tmp_path: Path) -> None:
    folder, found = model(tmp_path / "model"), set[str]()
    for value in (1, 2):
        archive(folder / "pytorch_model.bin", shard(3, value=value))
        found.add(fingerprint(folder, load_format).digest)
    assert len(found) == 2


@pytest.mark.promise(69)
def test_an_adapter_among_a_trainer_s_files_is_the_same_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    safetensors(folder / ADAPTER, shard(1))
    (folder / "adapter_config.json").write_text('{"r": 8}')
    alone = fingerprint(folder)
    for name in (*STATES, "adapter_model.bin", "adapter_model.pt"):
        archive(folder / name, shard(3))
    assert fingerprint(folder) == alone
    (folder / "adapter_config.json").write_text('{"r": 9}')
    assert fingerprint(folder) != alone
    (folder / "adapter_config.json").write_text('{"r": 8}')
    safetensors(folder / ADAPTER, shard(2))
    assert fingerprint(folder) != alone


def test_an_adapter_s_pickle_counts_beside_safetensors_of_another_name(tmp_path: Path) -> None:
    """vLLM loads it unless there is `adapter_model.safetensors`."""
    folder, found = tmp_path / "adapter", set[str]()
    safetensors(folder / "model.safetensors", shard(1))
    for value in (1, 2):
        archive(folder / "adapter_model.bin", shard(3, value=value))
        found.add(fingerprint(folder).digest)
    assert len(found) == 2

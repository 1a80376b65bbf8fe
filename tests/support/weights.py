"""Files of weights in the formats that engines load, with random tensors."""

import json
import random
import zipfile
from functools import cache
from pathlib import Path
from typing import Any


def safetensors(path: Path, tensors: dict[str, bytes], metadata: str = "pt") -> Path:
    """Write a safetensors file with the tensors in the given order."""
    header: dict[str, Any] = {"__metadata__": {"format": metadata}}
    place = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [place, place + len(data)]}
        place += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return path


def archive(path: Path, tensors: dict[str, bytes]) -> Path:
    """Write a file as `torch.save` does: a zip archive with a member for each tensor, nothing compressed."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), b"names and places")
        for number, data in enumerate(tensors.values()):
            file.writestr(zipfile.ZipInfo(f"archive/data/{number}"), data)
    return path


def model_tensors() -> dict[str, bytes]:
    """Return the tensors layer by layer: projections of 300 KB with small norms and scales among them."""
    return dict(_model_tensors())


@cache
def _model_tensors() -> dict[str, bytes]:
    source = random.Random(5)
    sizes = {"qkv": 300_000, "o": 300_000, "norm": 1024, "scale": 4, "gate": 300_000, "down": 300_000, "norm2": 1024}
    return {f"{layer}.{name}": source.randbytes(size) for layer in range(30) for name, size in sizes.items()}

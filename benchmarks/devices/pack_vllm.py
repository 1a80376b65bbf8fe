"""Makes a folder with vLLM small enough for a GPU machine without network: `python pack_vllm.py FOLDER [--arch 90]`.

Make the folder with `pip install --target FOLDER --no-deps vllm==0.33.0 ...`, and name the packages that the machine
lacks, apart from torch and triton. vLLM's libraries use torch's stable interface, so an older torch loads them, too:
every symbol that those of 0.32.0 and 0.33.0 need is in torch 2.11. On the machine, set
`VLLM_USE_FLASHINFER_SAMPLER=0` if FlashInfer is missing. Then `tar c FOLDER | xz` took 805 MB down to 45 MB for sm_90.

This script deletes the libraries and headers that no dense model needs, and overwrites the machine code of all other
architectures with zeros. The driver does not read that code; it only has to keep its place.
"""

import argparse
import mmap
import struct
import subprocess
from pathlib import Path

# Llama, Gemma, Mistral, DeepSeek-V2 and Qwen3-Next need these, with FlashAttention 3 and Triton.
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_vllm_fa3_C", "cumem_allocator", "spinloop", "fs_io_C")
MAGIC = 0xBA55ED50  # of each container in the section .nv_fatbin
ELF = 2  # the kind of an entry that has machine code; others have PTX, which is compiled at the first use


def keep_only(library: Path, arch: int) -> int:
    """Overwrite the machine code for other architectures, and all PTX. Return the number of bytes that stay."""
    listed = subprocess.run(["readelf", "-SW", library], check=True, capture_output=True, text=True).stdout
    sections = [line.split("]")[1].split() for line in listed.splitlines() if " .nv_fatbin " in line]
    kept = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for _, _, _, offset, size, *_ in sections:
            place, end = int(offset, 16), int(offset, 16) + int(size, 16)
            while place < end:
                magic, _, header_bytes, num_bytes = struct.unpack_from("<IHHQ", memory, place)
                if magic != MAGIC:
                    place += 8  # padding between containers
                    continue
                entry, place = place + header_bytes, place + header_bytes + num_bytes
                while entry < place:
                    kind, _, entry_header, code_bytes = struct.unpack_from("<HHIQ", memory, entry)
                    (its_arch,) = struct.unpack_from("<I", memory, entry + 28)
                    start = entry + entry_header
                    if kind == ELF and its_arch == arch:
                        kept += code_bytes
                    else:
                        memory[start : start + code_bytes] = bytes(code_bytes)
                    entry = start + code_bytes
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="as in sm_90 (default %(default)s)")
    options = parser.parse_args()
    vllm: Path = options.folder / "vllm"
    for path in sorted(vllm.rglob("*")):
        if not path.is_file():
            continue
        is_library = path.suffix == ".so"
        is_header = "third_party" in path.parts and path.suffix != ".py"
        if (is_library and path.name.partition(".")[0] not in LIBRARIES) or is_header or path.name == "vllm-rs":
            path.unlink()
        elif is_library:
            print(path.name, f"{keep_only(path, options.arch) >> 20} MiB of code for sm_{options.arch}")


if __name__ == "__main__":
    main()

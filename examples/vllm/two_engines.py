"""Two vLLM processes and one depot: the second process reuses the first one's KV.

Start a depot first (`kvdepot serve`), then: python two_engines.py MODEL
"""

import subprocess
import sys
from pathlib import Path


def main() -> None:
    for title in ("first engine", "second engine"):
        print(f"--- {title}", flush=True)
        subprocess.run([sys.executable, str(Path(__file__).with_name("one_engine.py")), *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()

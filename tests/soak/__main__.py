"""Load, random kills and an audit: `python -m soak --seconds N --seed S`, in the folder `tests`.

Prints its progress on standard error and the numbers as JSON on standard output. Exits with 1 if the audit found
something wrong, late or left over.
"""

import argparse
import json
import sys
from pathlib import Path

from kvdepot.ops.commandline import count_argument
from kvdepot.wire import messages as m
from soak.soak import Soak
from support.arguments import seconds_argument


def main() -> int:
    """Run one soak and print its numbers."""
    parser = argparse.ArgumentParser(prog="python -m soak", description="run a depot under load and random kills")
    parser.add_argument("--seconds", type=seconds_argument, default=60.0, help="duration (default 60)")
    parser.add_argument("--engines", type=count_argument, default=3, help="number of engine processes (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of prompts and kills (default 1)")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="use a smaller pool with a disk tier in this folder")
    parser.add_argument("--verify", choices=[*m.Verify], default="all", help="as for kvdepot serve (default all)")
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = Soak(options.seconds, options.engines, options.seed, options.verify, options.disk, say).run()
    print(json.dumps(result, indent=2))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs the simulation in real time with a small file system, full or read-only at times, as its tier. Needs root, ext4.

    python benchmarks/depot/torture.py --seconds 600 --seed 1

It kills and stops engines and depots, and damages files of the tier. This script makes the file system in a
file, mounts it, and puts it through phases: full, read-only, and healthy. The last phase is healthy, so that the audit
finds a depot at rest. Prints the simulation's output and ends with its exit status.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

_IMAGE_BYTES = 400 << 20  # slightly more than the tier may use
_LAST_GOOD_SECONDS = 45.0  # for the breaker to close and waiting writes to finish
_STEP_BYTES = 1 << 20
_TESTS = Path(__file__).parents[2] / "tests"


def fill(folder: Path) -> None:
    """Fill up the file system."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(_STEP_BYTES)) == _STEP_BYTES:
            pass


def remount(folder: Path, mode: str) -> bool:
    """Remount the file system. Return False if files open for writing prevent it."""
    return subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=False, capture_output=True).returncode == 0


def disturb(folder: Path, until: float, seed: int, is_over: threading.Event, counts: dict[str, int]) -> None:
    """Put the file system through one phase after the other."""
    rng = random.Random(seed)
    while time.monotonic() < until and not is_over.is_set():
        phase = rng.choice(("full", "read-only", "good"))
        if phase == "full":
            fill(folder)
        if phase == "read-only" and not remount(folder, "ro"):
            phase = "still writable"
        counts[phase] = counts.get(phase, 0) + 1
        is_over.wait(rng.uniform(1, 12))
        remount(folder, "rw")
        (folder / "filler").unlink(missing_ok=True)


def main() -> int:
    """Run the simulation over the file system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", default="all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvdepot-torture-") as place:
        image, folder = Path(place) / "image", Path(place) / "mount"
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True)
        counts: dict[str, int] = {}
        is_over = threading.Event()
        until = time.monotonic() + options.seconds - _LAST_GOOD_SECONDS
        thread = threading.Thread(target=disturb, args=(folder, until, options.seed, is_over, counts))
        command = [sys.executable, "-m", "simulation", "--real-time", "--seconds", str(options.seconds)]
        command += ["--seed", str(options.seed), "--engines", str(options.engines), "--verify", options.verify]
        try:
            thread.start()
            status = subprocess.run([*command, "--disk", folder / "tier"], cwd=_TESTS, check=False).returncode
        finally:
            is_over.set()
            thread.join()
            subprocess.run(["umount", "--lazy", folder], check=True)
    print("phases of the file system:", counts)
    return status


if __name__ == "__main__":
    sys.exit(main())

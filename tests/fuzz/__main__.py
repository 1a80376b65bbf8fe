"""Coverage-guided fuzzing: `python -m fuzz [TARGET ...] --seconds N`. By default, all targets, 60 s in total.

An input that crashes a target stays in its folder of the corpus, and the tests replay it from then on. Fix the bug,
name the file after it, and commit both. `--keep` adds the inputs that reached new lines. Only Python code counts as
covered. As msgspec's C code gives no guidance, messages are also mutated by value.
"""

import argparse
import logging
import random
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_GUIDED = ("kvdepot", "kvdepot_vllm")


def main() -> int:
    """Fuzz one target in this process, or several targets in one process each."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="fuzz what takes bytes from others")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (default 60)")
    parser.add_argument("--keep", action="store_true", help="add what reached new lines to the corpus, make it minimal")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # fuzz this target in this process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.only:
        return fuzz(options.only, options.seconds, options.folder)
    from fuzz.targets import TARGETS

    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
    failed = [name for name in names if not run_apart(name, max(1, options.seconds // len(names)), keep=options.keep)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


def run_apart(target: str, seconds: int, *, keep: bool) -> bool:
    """Fuzz one target in its own process. Return whether it passed."""
    from fuzz.corpus import keep_smallest

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvdepot-fuzz-") as folder:
        command = [sys.executable, "-m", "fuzz", "--only", target, "--seconds", str(seconds), "--folder", folder]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        last = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("Done ")), "")
        print(f"{target}: {last or done.stderr[-6000:]} ({time.monotonic() - started:.0f} s)", flush=True)
        if keep and not done.returncode:
            print(f"{target}: {keep_smallest(target, Path(folder))} inputs kept")
    return not done.returncode


def fuzz(target: str, seconds: int, folder: Path) -> int:
    """Fuzz in this process, which libFuzzer ends."""
    try:
        atheris: Any = import_module("atheris")  # without types
    except ModuleNotFoundError:
        print("Done 0 runs: atheris has no wheel for this Python or machine, so nothing is searched", file=sys.stderr)
        return replay(target)
    with atheris.instrument_imports(include=list(_GUIDED)):
        from fuzz.mutate import mutate_message
        from fuzz.targets import CORPUS, TARGETS
    it = TARGETS[target]
    for number, seed in enumerate(it.seeds()):
        (folder / f"seed-{number}").write_bytes(seed)
    kept = CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)

    def mutate(data: bytes, maximum: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.5:
            body = mutate_message(data[it.prefix :], rng)
            if body is not None and len(body) + it.prefix <= maximum:
                return data[: it.prefix] + body
        return atheris.Mutate(data, maximum)

    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-max_len={it.maximum_bytes}",
        "-timeout=10",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={kept}/",
        "-verbosity=1",
        str(folder),
        str(kept),
    ]
    options = {"custom_mutator": mutate} if it.is_message else {}
    atheris.Setup(arguments, it.run, **options)
    atheris.Fuzz()
    return 0


def replay(target: str) -> int:
    """Run the corpus and the seeds."""
    from fuzz.targets import TARGETS, kept_inputs

    for data in [*TARGETS[target].seeds(), *(path.read_bytes() for path in kept_inputs(target))]:
        TARGETS[target].run(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Coverage-guided fuzzing: `python -m fuzz [TARGET ...] --seconds N`. By default, all targets, 60 s in total.

An input that crashes a target stays in its folder of the corpus, and the tests replay it from then on. Fix the bug,
name the file after it, and commit both. `--keep` adds the inputs that reached new lines. Only Python code counts as
covered. As msgspec's C code gives no guidance, messages are also mutated by value.
"""

import argparse
import io
import logging
import os
import random
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_GUIDED = ("kvdepot", "kvdepot_mooncake", "kvdepot_plan", "kvdepot_vllm")
_ATHERIS: Any = import_module("atheris") if find_spec("atheris") else None  # without types; no wheel for some machines


def main() -> int:
    """Instrument the code, which takes ten seconds, then fuzz each target in a fork, as libFuzzer ends its process."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="fuzz what takes bytes from others")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (default 60)")
    parser.add_argument("--keep", action="store_true", help="add what reached new lines to the corpus, make it minimal")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    quiet = redirect_stderr(io.StringIO())  # a line for each module
    with quiet, _ATHERIS.instrument_imports(include=list(_GUIDED)) if _ATHERIS else nullcontext():
        from fuzz.targets import TARGETS

    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
    failed = [name for name in names if not run_apart(name, max(1, options.seconds // len(names)), keep=options.keep)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


def run_apart(target: str, seconds: int, *, keep: bool) -> bool:
    """Fuzz one target in a fork. Return whether it passed."""
    from fuzz.corpus import keep_smallest

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvdepot-fuzz-") as folder, tempfile.TemporaryFile() as said:
        pid = os.fork()
        if not pid:
            os.dup2(said.fileno(), sys.stderr.fileno())
            sys.exit(fuzz(target, seconds, Path(folder)))  # not os._exit: libFuzzer writes a failing input at exit
        passed = os.waitpid(pid, 0)[1] == 0
        said.seek(0)
        text = said.read().decode(errors="replace")
        last = next((line for line in reversed(text.splitlines()) if line.startswith("Done ")), "")
        print(f"{target}: {last or text[-6000:]} ({time.monotonic() - started:.0f} s)", flush=True)
        if keep and passed:
            print(f"{target}: {keep_smallest(target, Path(folder))} inputs kept", flush=True)
    return passed


def fuzz(target: str, seconds: int, folder: Path) -> int:
    """Fuzz in this process, which libFuzzer ends."""
    from fuzz.mutate import mutate_message
    from fuzz.targets import CORPUS, TARGETS

    if not _ATHERIS:
        print("Done 0 runs: atheris has no wheel for this Python or machine, so nothing is searched", file=sys.stderr)
        return replay(target)
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
        return _ATHERIS.Mutate(data, maximum)

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
    _ATHERIS.Setup(arguments, it.run, **options)
    _ATHERIS.Fuzz()
    return 0


def replay(target: str) -> int:
    """Run the corpus and the seeds."""
    from fuzz.targets import TARGETS, kept_inputs

    for data in [*TARGETS[target].seeds(), *(path.read_bytes() for path in kept_inputs(target))]:
        TARGETS[target].run(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())

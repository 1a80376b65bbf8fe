"""`benchmarks/cuda_gpu.py` without a device: every step ends, what fails is reported, and the rest goes on."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import BackendUnavailable
from kvdepot_cuda.context import CudaTransferContext

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cuda_gpu.py"
STEPS = {
    "environment": "ok", "raw_ipc": "skipped", "patterned": "ok", "conformance": "skipped", "copies": "ok",
    "interference": "skipped", "retrieve": "ok", "latency": "ok", "registration": "ok", "contexts": "skipped",
}  # fmt: skip


def run(out: Path, *arguments: str, script: Path = SCRIPT) -> tuple[list[dict[str, Any]], str]:
    """Return what it wrote: the lines, and the tables."""
    done = subprocess.run(
        [sys.executable, str(script), "--fake", "--out", str(out), *arguments],
        check=False, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "cuda_gpu.jsonl").read_text().splitlines()]
    return lines, (out / "cuda_gpu.md").read_text()


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    """Return the path of a copy of the script in which each text, which stands there once, is another one."""
    source = SCRIPT.read_text()
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    path = folder / "changed.py"
    path.write_text(source)
    return path


def test_every_step_ends_and_what_the_fake_can_do_is_done(tmp_path: Path) -> None:
    lines, tables = run(tmp_path)
    assert {line["step"]: line["status"] for line in lines if "status" in line} == STEPS
    assert not any("failed" in line and line["failed"] for line in lines)
    assert not any(line["is_a_gpu"] for line in lines)
    moved = [line for line in lines if line.get("what") == "bytes" and "right" in line]
    assert len(moved) == 3
    assert all(line["stored"] and line["retrieved"] and line["right"] for line in moved)
    assert [line["kernel_loaded"] for line in moved] == [False, False, True]
    rows = [line for line in lines if line.get("what") in ("bytes", "one block", "10,000 tokens") and "mode" in line]
    assert len(rows) > len(moved)
    assert all(line["settled"] and line["num_registered"] > 0 for line in rows)
    assert not any(line.get("what") == "begun" for line in lines)
    found = {line["what"] for line in lines if "what" in line and "skipped" not in line}
    assert {"copies", "thresholds", "registration", "one block", "10,000 tokens"} <= found
    assert all("reason" in line for line in lines if line.get("status") == "skipped")
    assert "No GPU is behind these figures" in tables
    assert all(f"| {step} | {status} |" in tables for step, status in STEPS.items())


def test_a_step_that_fails_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    before = '    """Describe this machine."""\n'
    broken = changed(tmp_path, (before, before + '    emit("first", value=1)\n    raise RuntimeError("no luck")\n'))
    lines, tables = run(tmp_path, "--only", "environment,registration", script=broken)
    first, second = (line for line in lines if "status" in line)
    assert (first["status"], first["reason"]) == ("failed", "RuntimeError: no luck")
    assert second["status"] == "ok"
    assert any(line.get("what") == "first" for line in lines), "what was measured before is kept"
    assert "no luck" in tables


@pytest.mark.parametrize(
    ("seconds", "changes", "status"),
    [
        ("1", [], "skipped"),
        ("500", [('"latency": (latency, 40)', '"latency": (latency, 0.2)'), ("limit < 5", "limit < 0.1")], "timed out"),
    ],
)
def test_a_step_is_bounded_in_time(seconds: str, changes: list[tuple[str, str]], status: str, tmp_path: Path) -> None:
    """There is no time for another one, or it takes longer than it may; its processes are gone."""
    lines, _ = run(tmp_path, "--only", "latency", "--seconds", seconds, script=changed(tmp_path, *changes))
    assert lines[-1]["status"] == status
    assert lines[-1]["reason"]


def test_a_step_that_is_cut_off_says_in_which_part(tmp_path: Path) -> None:
    before = 'part("registration", _register, setting, total, piece, is_touched)'
    after = (
        'part(f"{share}", _register, setting, total, piece, is_touched) if share == 1 else '
        'part("sleep", time.sleep, 500)'
    )
    slow = changed(tmp_path, (before, after), ("(registration, 50)", "(registration, 5)"))
    lines, _ = run(tmp_path, "--only", "registration", script=slow)
    assert lines[-1]["status"] == "timed out"
    assert lines[-1]["reason"].endswith("cut off in 'sleep', part 3; what follows it was not begun")
    assert len([line for line in lines if line.get("what") == "registration"]) == 2


def script() -> Any:
    spec = importlib.util.spec_from_file_location("cuda_gpu", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_every_step_has_its_turn_and_what_is_left_over() -> None:
    made = script()
    names = list(made.STEPS)
    left = made.SECONDS
    for name in names:  # each takes all that it may
        limit = made.limit_of(name, names, left, made.STEPS)
        assert limit >= made.STEPS[name][1]
        left -= limit
    assert left >= 0
    own = made.STEPS["contexts"][1]
    assert made.limit_of("contexts", names, own + 3, made.STEPS) == own + 3
    assert made.limit_of("contexts", names, 500.0, made.STEPS) == 2 * own
    assert made.limit_of("contexts", names, 7.0, made.STEPS) == 7.0


def test_a_mode_that_turns_out_to_be_impossible_is_skipped_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_context: CudaTransferContext, _timeout_seconds: float) -> None:
        raise BackendUnavailable("the mover cannot open it")

    closed: list[CudaTransferContext] = []
    close = CudaTransferContext.close

    def noted(context: CudaTransferContext) -> None:
        closed.append(context)
        close(context)

    monkeypatch.setattr(CudaTransferContext, "wait_until_connected", refuse)
    monkeypatch.setattr(CudaTransferContext, "close", noted)
    made = script()
    shape = {"page_bytes": 4096, "num_layers": 1, "num_blocks": 4, "block_outermost": True}
    with (
        pytest.raises(made.Skipped, match="cannot open it"),
        made.cache(made.Setting(True, 60), "direct", 1 << 20, **shape),
    ):
        pass
    assert len(closed) == 1


def test_suites_that_are_cut_off_say_how_far_they_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others keep their results."""
    texts = {
        "good": "def test_one(): pass\ndef test_two(): pass\n",
        "bad": "def test_one(): pass\ndef test_two(): assert 0, 'no luck'\n",
        "slow": "import time\ndef test_one(): pass\ndef test_two(): time.sleep(500)\ndef test_three(): pass\n",
    }
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    script().run_suites({name: [f"{tmp_path}/test_{name}.py"] for name in texts}, 10.0)
    found = {line["suite"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [(found[name]["passed"], found[name]["failed"]) for name in texts] == [(2, 0), (1, 1), (1, 0)]
    assert (found["good"]["status"], found["bad"]["status"]) == (0, 1)
    assert "no luck" in "".join(found["bad"]["last_lines"])
    assert found["slow"]["status"] == "cut off after 10 s"
    assert "KeyboardInterrupt" in "".join(found["slow"]["last_lines"])

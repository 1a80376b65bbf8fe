"""`kvdepot bench cuda` without a device: every way moves the right bytes, and a table becomes thresholds."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kvdepot.ops import cli
from kvdepot_cuda.bench import FAKE, BenchPlan, Row, bench_copies, describe_tuning, tune
from kvdepot_cuda.driver import CopyKind
from kvdepot_cuda.gather import KernelUse
from kvdepot_cuda.testing import FakeDriver, fake_gather

PLAN = replace(FAKE, counts=(16, 40), rounds=1)
WAYS = {"loop", "batch", "merged batch", "kernel 4", "kernel 8"}


def measure(driver: FakeDriver, plan: BenchPlan = PLAN) -> dict[str, Any]:
    said: list[str] = []
    result = bench_copies(driver, plan, compile_gather=fake_gather, say=said.append)
    driver.close()
    assert driver.left_over == {}
    assert len(said) >= 1 + len(result["rows"])
    return result


def test_the_table_has_every_way_in_both_directions_and_the_device_is_given_back() -> None:
    driver = FakeDriver()
    result = measure(driver)
    assert {(row["direction"], row["page_bytes"], row["count"]) for row in result["rows"]} == {
        (direction, page_bytes, count)
        for direction in ("to_device", "to_host") for page_bytes in (4096, 65536) for count in (16, 40)
    }  # fmt: skip
    for row in result["rows"]:
        assert set(row["ways"]) == WAYS
        assert row["failed"] == {}
        assert all(way["ratio"] > 0 and way["spread"][0] <= way["spread"][1] for way in row["ways"].values())
    assert driver.violations == []
    assert "no GPU" in result["device"]


def test_ways_that_move_wrong_bytes_are_no_figures() -> None:
    """A kernel that does nothing."""
    driver = FakeDriver(run_kernel=lambda _table, _num_runs, _num_programs: None)
    for row in measure(driver)["rows"]:
        assert set(row["ways"]) == {"loop", "batch", "merged batch"}
        assert "wrong bytes" in row["failed"]["kernel 4"]


@pytest.mark.parametrize(
    ("options", "failing", "missing"),
    [
        ({"has_batch_copy": False}, None, {"batch", "merged batch"}),
        ({}, "load_kernel", {"kernel 4", "kernel 8"}),
        ({}, "device_address_of", {"kernel 4", "kernel 8"}),
    ],
)
def test_what_the_device_cannot_do_is_left_out(options: dict[str, Any], failing: str | None, missing: set[str]) -> None:
    driver = FakeDriver(**options)
    if failing:
        driver.fail(failing, "CUDA_ERROR_NOT_SUPPORTED (801)")
    for row in measure(driver)["rows"]:
        assert set(row["ways"]) == WAYS - missing


def test_a_way_that_fails_is_named_and_the_others_go_on() -> None:
    driver = FakeDriver()
    driver.fail("copy_batch", "CUDA_ERROR_NOT_SUPPORTED (801)")
    for row in measure(driver)["rows"]:
        assert set(row["ways"]) == WAYS - {"batch", "merged batch"}
        assert "NOT_SUPPORTED" in row["failed"]["batch"]


def test_cells_are_bounded_in_bytes_and_time() -> None:
    assert all(page * count <= PLAN.largest_bytes for _, page, count in BenchPlan(largest_bytes=1 << 22).cells())
    result = measure(FakeDriver(), replace(PLAN, seconds=-1))
    assert result["rows"] == []
    assert result["cells_left_out"] == len(list(PLAN.cells()))


# --- tuning -----------------------------------------------------------------------------------------------------------


def table(batch: dict[int, float], kernel: dict[tuple[int, int], float]) -> list[Row]:
    return [
        {
            "direction": direction.value, "page_bytes": size, "count": count,
            "ways": {"batch": {"ratio": batch[size]}, "kernel 4": {"ratio": ratio * 0.9}, "kernel 8": {"ratio": ratio}},
        }
        for (size, count), ratio in kernel.items() for direction in CopyKind
    ]  # fmt: skip


def test_thresholds_are_where_the_kernel_begins_to_win() -> None:
    kernel = {(size, count): 0.7 if count >= 64 else 0.05 for size in (4096, 8192, 65536) for count in (16, 64, 256)}
    rows = table({4096: 0.1, 8192: 0.2, 65536: 0.9}, kernel)
    tuning = tune(rows)
    assert tuning.use == KernelUse(8192, 64, 8)
    without, with_it = 0.1 + 0.2 + 0.9, (0.1 + 2 * 0.7 + 0.2 + 2 * 0.7) / 3 + 0.9
    assert tuning.gain == pytest.approx(with_it / without - 1)
    text = describe_tuning(tuning)
    assert "kernel_run_bytes=8192, kernel_runs=64, kernel_programs=8" in text
    assert '"kvdepot.kernel_run_bytes": 8192' in text


@pytest.mark.parametrize("ratio", [0.1, 0.4, 0.41])
def test_a_kernel_that_gains_next_to_nothing_stays_off(ratio: float) -> None:
    tuning = tune(table({4096: 0.4}, {(4096, 16): ratio, (4096, 64): ratio}))
    assert tuning.use.run_bytes == 0
    assert "leave it off" in describe_tuning(tuning)
    assert tune([]).use.run_bytes == 0


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_finds_the_bench_and_says_that_no_gpu_is_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "cuda", "--fake", "--tune", "--rounds", "1", "--json"])
    assert ended.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["is_a_gpu"] is False
    assert set(result["tuning"]) == {"kernel_run_bytes", "kernel_runs", "kernel_programs", "gain"}
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "cuda", "--fake", "--rounds", "1"])
    out = capsys.readouterr().out
    assert "these figures come from no GPU" in out
    assert "merged batch" in out


def test_without_a_device_the_command_says_what_is_missing() -> None:
    code = "from kvdepot_cuda import bench; bench.why_unavailable = lambda: 'no driver is installed';" \
           "from kvdepot.ops.cli import main; main(['bench', 'cuda'])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "bench cuda: no driver is installed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--largest", "4KiB"]])
def test_a_bench_of_nothing_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "cuda", "--fake", *options])
    assert ended.value.code == 1
    assert "nothing to measure" in capsys.readouterr().err

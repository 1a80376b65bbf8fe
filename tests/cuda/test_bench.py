"""`benchmarks/devices/cuda_copies.py` without a device: every way moves the right bytes."""

import json
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from support.cuda.fake import FakeDriver, fake_gather


def load_script() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "devices" / "cuda_copies.py"
    spec = spec_from_file_location("cuda_copies", path)
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SCRIPT = load_script()
PLAN = SCRIPT.BenchPlan(page_bytes=(4 << 10, 64 << 10), counts=(16, 40), rounds=1, largest_bytes=4 << 20)
WAYS = {"loop", "batch", "merged batch", "kernel"}


def measure(driver: FakeDriver, plan: Any = PLAN) -> dict[str, Any]:
    said: list[str] = []
    result = SCRIPT.bench_copies(driver, plan, compile_gather=fake_gather, say=said.append)
    driver.close()
    assert driver.left_over == {}
    assert len(said) >= 1 + len(result["rows"])
    return result


def test_the_table_has_every_way_in_both_directions_and_the_device_is_given_back() -> None:
    driver = FakeDriver()
    result = measure(driver)
    assert {(row["direction"], row["page_bytes"], row["count"]) for row in result["rows"]} == {
        (direction, page_bytes, count)
        for direction in ("to_device", "to_host")
        for page_bytes in (4096, 65536)
        for count in (16, 40)
    }
    for row in result["rows"]:
        assert set(row["ways"]) == WAYS
        assert row["failed"] == {}
        assert all(way["ratio"] > 0 and way["spread"][0] <= way["spread"][1] for way in row["ways"].values())
    assert driver.violations == []
    assert "no GPU" in result["device"]


def test_ways_that_move_wrong_bytes_are_no_figures() -> None:
    """Tested with a kernel that does nothing."""
    driver = FakeDriver(run_kernel=lambda _table, _num_runs, _num_programs: None)
    for row in measure(driver)["rows"]:
        assert set(row["ways"]) == {"loop", "batch", "merged batch"}
        assert "wrong bytes" in row["failed"]["kernel"]


@pytest.mark.parametrize(
    ("options", "failing", "missing"),
    [
        ({"has_batch_copy": False}, None, {"batch", "merged batch"}),
        ({}, "load_kernel", {"kernel"}),
        ({}, "device_address_of", {"kernel"}),
    ],
)
def test_ways_that_the_device_lacks_are_left_out(
    options: dict[str, Any], failing: str | None, missing: set[str]
) -> None:
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
    assert all(page * count <= PLAN.largest_bytes for _, page, count in SCRIPT.BenchPlan(largest_bytes=1 << 22).cells())
    result = measure(FakeDriver(), replace(PLAN, seconds=-1))
    assert result["rows"] == []
    assert result["cells_left_out"] == len(list(PLAN.cells()))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_script_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvdepot_cuda.backend.why_unavailable", lambda: None)
    monkeypatch.setattr(SCRIPT, "CudaDriver", FakeDriver)
    small = ["--rounds", "1", "--largest", "256KiB"]
    SCRIPT.main([*small, "--json"])
    assert json.loads(capsys.readouterr().out)["device"] == FakeDriver.description
    SCRIPT.main(small)
    assert "merged batch" in capsys.readouterr().out


def test_without_a_device_the_script_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvdepot_cuda.backend.why_unavailable", lambda: "no driver is installed")
    with pytest.raises(SystemExit) as ended:
        SCRIPT.main([])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "no driver is installed\n"


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--largest", "4KiB"]])
def test_a_bench_of_nothing_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        SCRIPT.main(options)
    assert ended.value.code == 2
    assert "nothing to measure" in capsys.readouterr().err

"""Traces: the fields that are read, and errors for lines that are not requests."""

import json
from pathlib import Path

import pytest

from kvdepot_plan.trace import MAXIMUM_LINE_BYTES, TraceError, TraceRequest, read_trace


def line(**changes: object) -> str:
    fields = {"timestamp": 27, "input_length": 1100, "output_length": 30, "hash_ids": [4, 5, 9]}
    return json.dumps(fields | changes)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_requests_come_in_the_order_of_the_file(trace: Path) -> None:
    trace.write_text(f"{line()}\n\n{line(timestamp=30.5, input_length=512, hash_ids=[7], session='unknown field')}")
    assert list(read_trace(trace)) == [TraceRequest(27, 1100, 30, (4, 5, 9)), TraceRequest(30.5, 512, 30, (7,))]


def test_limit_leaves_the_rest_of_the_file_unread(trace: Path) -> None:
    trace.write_text(f"{line()}\n{line()}\nnot a request\n")
    assert len(list(read_trace(trace, limit=2))) == 2


def test_good_lines_are_given_before_a_bad_one_is_met(trace: Path) -> None:
    trace.write_text(f"{line()}\nnot a request\n")
    requests = read_trace(trace)
    assert next(requests).input_length == 1100
    with pytest.raises(TraceError, match="line 2"):
        next(requests)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "truncated"),
        ("[]", "object"),
        ("\xff", "malformed"),
        (line() + line(), "trailing"),
        ('{"x": ' + "[" * 5000, "recursion"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}', "hash_ids"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp="now"), "timestamp"),
        (line(input_length=-5, hash_ids=[]), "input_length"),
        (line(input_length=1 << 40), "input_length"),
        (line(input_length=1100.5), "input_length"),
        (line(output_length=None), "output_length"),
        (line(hash_ids=[1, "2", 3]), r"hash_ids\[1?"),
        (line(hash_ids=[1, -2, 3]), r"hash_ids\[1?"),
        (line(hash_ids=[1, 2, 1 << 70]), r"hash_ids\[2?"),
        (line(hash_ids=[1]), "1 hash_ids for an input_length of 1100"),
        (line(hash_ids=[1, 2, 3, 4]), "4 hash_ids for an input_length of 1100"),
        (line(padding="x" * MAXIMUM_LINE_BYTES), "longer than"),
    ],
)
def test_bad_line_is_named_with_file_and_reason(trace: Path, bad: str, reason: str) -> None:
    trace.write_bytes(f"{line()}\n\n{bad}\n{line()}\n".encode("latin-1"))
    with pytest.raises(TraceError, match=reason) as caught:
        list(read_trace(trace))
    assert str(caught.value).startswith(f"{trace}, line 3: ")
    assert len(str(caught.value)) < 500


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent.jsonl cannot be read: No such file"):
        next(read_trace(tmp_path / "absent.jsonl"))
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        next(read_trace(tmp_path))

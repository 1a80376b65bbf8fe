"""Draws the bars of docs/performance.md and docs/devices.md: `python benchmarks/pictures/pictures.py`.

Each picture shows one column of the table above it, so that each figure is written only once. `--check` only compares.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.bars import Bar, bars_as_svg

_DOCS: Final = Path(__file__).parents[2] / "docs"
_NUMBER: Final = re.compile(r"[\d,]+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    unit: str = ""
    others: str = "(?!)"  # a pattern: rows that match it are not kvdepot's
    page: str = "performance.md"


PICTURES: Final = {
    "serve": _Picture("Mean time to the first token, vLLM's own client", "ms", "no depot"),
    "hand-over": _Picture("Ratio to one engine's time, or to one prompt's tokens; less is better"),
    "transfers": _Picture("Stores, as a ratio to memcpy, by block, chunk, threads; more is better"),
    "lookups": _Picture("Median time of a lookup of 128k tokens", "ms"),
    "vllm-h200": _Picture(
        "Time to the first token of 10,000 tokens, vLLM on an H200, first run", "ms", "computed|vLLM's", "devices.md"
    ),
}


def draw(name: str) -> str:
    """Return the picture `name`, drawn from the first column of the last table before it."""
    page = (_DOCS / PICTURES[name].page).read_text()
    before = page[: page.index(f"(pictures/{name}.svg)")]
    rows = before[before.rindex("\n|---") :].splitlines()[2:]
    picture, bars = PICTURES[name], list[Bar]()
    for row in rows:
        if not row.startswith("|"):
            break
        label, value, *_ = (cell.strip().strip("*").replace("`", "") for cell in row.strip("|").split("|"))
        number = _NUMBER.match(value)
        assert number is not None, row
        is_ours = re.search(picture.others, label) is None
        bars.append(Bar(label, float(number[0].replace(",", "")), f"{number[0]} {picture.unit}".rstrip(), is_ours))
    return bars_as_svg(picture.title, bars)


def main() -> int:
    """Write the pictures, or print which ones differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture differs")
    is_check: bool = parser.parse_args().check
    stale: list[str] = []
    for name in PICTURES:
        file, drawn = _DOCS / "pictures" / f"{name}.svg", draw(name)
        if is_check and (not file.exists() or file.read_text() != drawn):
            stale.append(name)
        elif not is_check:
            file.write_text(drawn)
    if stale:
        print(f"not as in their tables: {', '.join(stale)}; run python benchmarks/pictures/pictures.py")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())

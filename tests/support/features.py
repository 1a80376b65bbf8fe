"""The features of depots in tests that build a `Depot` themselves.

`python -m support.features` runs the kernel's suites without any, and with each one alone.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import pytest

from kvdepot.features.blend.feature import BlendLookups
from kvdepot.features.estimates.feature import Estimates
from kvdepot.features.flights.feature import FlightTable
from kvdepot.features.routers.feature import Routers
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.prefixes import PrefixFile
from kvdepot.features.weights.feature import Generations
from kvdepot.server.feature import MakeFeature

_ALL: Final[Mapping[str, MakeFeature]] = {
    "blend": BlendLookups,
    "estimates": Estimates,
    "flights": FlightTable,
    "sessions": Agents,
    "weights": Generations,
}
_CHOSEN: Final = os.environ.get("KVDEPOT_TEST_FEATURES")  # names; unset: all of them
NAMES: Final = [*_ALL] if _CHOSEN is None else _CHOSEN.split()

_SUITES: Final = (
    "tests/core/index",
    "tests/core/server/test_depot_state_machine.py",
    "tests/core/server/test_parts.py",
)

STANDARD: Final[Sequence[MakeFeature]] = tuple(_ALL[name] for name in NAMES)
"""The features of a depot without KV events, or the chosen ones of them."""


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test if a feature is not among the chosen ones."""
    return pytest.mark.skipif(name not in NAMES, reason=f"{name} is not among the chosen features")


def features(holdings: Holdings | None = None, prefixes: PrefixFile | None = None) -> list[MakeFeature]:
    """Return the makers of `STANDARD`, with these sessions, and of routers' feature if there are holdings."""
    made: list[MakeFeature] = [partial(Agents, prefixes=prefixes) if make is Agents else make for make in STANDARD]
    return made if holdings is None else [*made, partial(Routers, holdings=holdings)]


def main() -> int:
    """Run the suites. Return 0 if all pass."""
    failed = 0
    for name in ("", *_ALL):
        environment = {**os.environ, "KVDEPOT_TEST_FEATURES": name, "PYTEST_ADDOPTS": ""}  # not the slow ones
        failed |= subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *_SUITES], env=environment, check=False
        ).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""The features of depots in tests that build a `Depot` themselves."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from kvdepot.features.blend.feature import BlendLookups
from kvdepot.features.estimates.feature import Estimates
from kvdepot.features.flights.feature import FlightTable
from kvdepot.features.routers.feature import Routers
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.weights.feature import Generations
from kvdepot.pool.prefixes import PrefixFile
from kvdepot.server.feature import MakeFeature

STANDARD: Final[Sequence[MakeFeature]] = (BlendLookups, Estimates, FlightTable, Agents, Generations)
"""Those of a depot without KV events."""


def features(holdings: Holdings | None = None, prefixes: PrefixFile | None = None) -> list[MakeFeature]:
    """Return the makers of `STANDARD`, with these sessions, and of routers' feature if there are holdings."""
    made: list[MakeFeature] = [BlendLookups, Estimates, FlightTable, partial(Agents, prefixes=prefixes), Generations]
    return made if holdings is None else [*made, partial(Routers, holdings=holdings)]

"""Features: parts of a depot that may be left out. Without one, the depot is slower or silent, never wrong.

The kernel knows no feature by name. It tells all of them what has happened, by the hooks of `Feature`, on the loop's
thread. A hook takes microseconds and does not wait: longer work goes to the background. It cannot make an answer wrong,
because the kernel alone leases and commits bytes. If it raises, the error is logged and counted, and the request goes
on.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from kvdepot.counting import Counts, depot_counter
from kvdepot.errors import ConfigError
from kvdepot.server.turns import Steps
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.status import DepotStatus

if TYPE_CHECKING:
    from kvdepot.server.contexts import Context
    from kvdepot.server.depot import Depot
    from kvdepot.server.query import Query
    from kvdepot.server.sources import Source
    from kvdepot.server.stores import Ticket
    from kvdepot.wire.operation import OperatorRequest

logger = logging.getLogger(__name__)

_HOOKS_FAILED: Final = depot_counter("hooks_failed", "Notes to a feature that failed because of a bug")

Handler: TypeAlias = "Callable[[Context, Any], frames.Reply | Steps]"
"""Answers a request of a registered worker or scheduler."""

OperationHandler: TypeAlias = "Callable[[Any], frames.Reply | Steps]"
"""Answers an operator's request."""


class Feature:
    """One feature of one depot. Override the hooks that it needs: the others cost nothing.

    Attributes:
        name: the name in `--without` and in the status.
        sources: places from which the feature can complete a match.
    """

    name: str
    sources: "Sequence[Source]" = ()

    def handlers(self) -> "Mapping[type[m.ContextRequest], Handler]":
        """Return the requests that this feature answers, if need be in place of the kernel."""
        return {}

    def operations(self) -> "Mapping[type[OperatorRequest], OperationHandler]":
        """Return the operations that this feature answers."""
        return {}

    def attached(self, context: "Context") -> None:
        """Note a new context of a worker or scheduler."""

    def detached(self, context: "Context") -> None:
        """Note that a context was removed."""

    def looked_up(self, query: "Query") -> None:
        """Note a lookup that is about to be answered."""

    def missed(self, query: "Query") -> None:
        """Note that a lookup is about to be answered without some of its chunks."""

    def stored(self, ticket: "Ticket", nodes: Sequence[int]) -> None:
        """Note that the entries of a store were committed. `nodes` has the node of each."""

    def swept(self, now: float) -> None:
        """End everything that is over. Called twice a second."""

    def restored(self) -> None:
        """Note that the entries of an earlier server are known now. Not called for a new pool."""

    def report(self, status: DepotStatus) -> None:
        """Add this feature's figures to the status."""

    def close(self) -> None:
        """Release the resources that the depot's end does not release."""


MakeFeature: TypeAlias = "Callable[[Depot], Feature | None]"
"""Makes a feature of a depot whose other parts are complete; None if the settings do not ask for it."""

ENTRY_POINT_GROUP: Final = "kvdepot.features"
"""Distributions name their `MakeFeature` here."""


def installed_features(without: Iterable[str] = ()) -> list[MakeFeature]:
    """Load the installed features, except the ones named in `without`.

    Raises:
        ConfigError: there is no feature of such a name, or one cannot be loaded.
    """
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    for name in without:
        if found.pop(name, None) is None:
            raise ConfigError(f"--without {name}: no such feature; there are {', '.join(sorted(found))}")
    makes: list[MakeFeature] = []
    for name, entry in sorted(found.items()):
        try:
            makes.append(entry.load())
        except Exception as error:  # of another distribution, which may be broken or of another version
            raise ConfigError(
                f"feature {name} cannot be loaded ({error}): mend it, or serve --without {name}"
            ) from error
    return makes


F = TypeVar("F", bound=Feature)

HOOKS: Final = ("attached", "detached", "looked_up", "missed", "stored", "swept", "restored", "report", "close")


class Features:
    """The hooks of all features of a depot, by name: each a tuple of the functions to call."""

    attached: "tuple[Callable[[Context], None], ...]" = ()
    detached: "tuple[Callable[[Context], None], ...]" = ()
    looked_up: "tuple[Callable[[Query], None], ...]" = ()
    missed: "tuple[Callable[[Query], None], ...]" = ()
    stored: "tuple[Callable[[Ticket, Sequence[int]], None], ...]" = ()
    swept: tuple[Callable[[float], None], ...] = ()
    restored: tuple[Callable[[], None], ...] = ()
    report: tuple[Callable[[DepotStatus], None], ...] = ()
    close: tuple[Callable[[], None], ...] = ()

    def __init__(self, counters: Counts) -> None:
        self.by_name: dict[str, Feature] = {}
        self._counters = counters

    def of(self, kind: type[F]) -> F:
        """Return the feature of a class.

        Raises:
            LookupError: the depot runs without it.
        """
        found = self.by_name[kind.name]
        assert isinstance(found, kind)
        return found

    def add(self, feature: Feature) -> None:
        """Call a feature's hooks from now on."""
        self.by_name[feature.name] = feature
        for name in HOOKS:
            # A hook that is not overridden does nothing: without this, each would cost a call per lookup.
            if getattr(type(feature), name) is not getattr(Feature, name):
                setattr(self, name, (*getattr(self, name), self._guarded(getattr(feature, name))))

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def guarded(*arguments: Any) -> None:
            try:
                hook(*arguments)
            except Exception:
                logger.exception("%s failed", hook.__qualname__)
                self._counters[_HOOKS_FAILED] += 1

        return guarded

"""Tracks the weights that engines compute with, and has chunks of outdated weights evicted first.

The scheduler of each engine names its weights (`Namespace.weights`): a lineage, and a generation of it. A trainer that
writes weights into running engines begins a new generation each time. A generation is **outdated** if no attached
engine uses it and a later one of its lineage has begun. Its chunks are evicted before all others of their share, like
those of ended sessions, and tiers that order their entries by use evict them first. If an engine returns to it, that is
undone.

A detached engine may be restarting, and so may all engines together with the depot. Therefore a generation becomes
outdated only `GRACE_SECONDS` after its last engine detached, but at once if that engine reported new weights. Labels
contain the names of weights, so the next server learns the generations from them, but not which one was in use:
engines may have returned to an earlier one. So nothing of a lineage is outdated before an engine of it attaches.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import require
from kvdepot.server.contexts import Context
from kvdepot.server.depot import Depot
from kvdepot.server.feature import Feature, Handler
from kvdepot.server.state import MAXIMUM_ROWS
from kvdepot.server.turns import Task
from kvdepot.wire import messages as m
from kvdepot.wire.status import DepotStatus, GenerationStatus

logger = logging.getLogger(__name__)

_OUTDATED: Final = depot_counter("generations_outdated", "Generations of weights that became outdated")

GRACE_SECONDS: Final = 60.0  # for an engine to restart or reconnect: its old chunks would be evicted first meanwhile


def lineage_of(weights: str) -> str:
    """Return the lineage of a generation."""
    return weights.partition(" ")[0]


def generation_of(weights: str) -> str:
    """Return the name of a generation; "" for the weights that the engine loaded."""
    return weights.partition(" ")[2]


@dataclass(frozen=True, slots=True)
class GenerationUse:
    """One generation: its bytes in the pool, and the number of schedulers whose engines compute with it."""

    weights: str
    models: tuple[str, ...]
    num_bytes: int
    num_schedulers: int
    is_outdated: bool


class Generations(Feature):
    """The generations in use or in the pool. Engines that name no weights have none."""

    name = "weights"

    def __init__(self, depot: Depot) -> None:
        self._state = depot.state
        self._contexts = depot.contexts
        self._turns = depot.background.queue(1)
        self._num_engines: Counter[str] = Counter()  # by weights
        self._last: dict[str, str] = {}  # the weights that engines began to use last, by lineage
        self._kept_until: dict[str, float] = {}  # the end of the grace time, by weights that engines left
        self._labels: dict[str, dict[str, list[int]]] = {}  # by lineage, then by weights
        self._num_labels = 0  # how many of the depot's labels were taken over
        self._open: dict[str, set[str]] = {}  # weights that may change state, by lineage
        self._pending: dict[int, bool] = {}  # labels whose chunks are to change, and whether they are outdated

    def handlers(self) -> Mapping[type[m.ContextRequest], Handler]:
        """See `Feature`."""
        return {m.ChangeWeights: self._change}

    def attached(self, context: Context) -> None:
        """See `Feature`."""
        self._begin(context.weights)

    def detached(self, context: Context) -> None:
        """See `Feature`. The engine may come back."""
        self._leave(context.weights, GRACE_SECONDS)

    def _change(self, context: Context, request: m.ChangeWeights) -> m.Done:
        before = context.weights
        done = self._contexts.change_weights(context, request)
        if context.weights != before:
            self._leave(before, 0.0)  # the engine will not use them again
            self._begin(context.weights)
        return done

    def _begin(self, weights: str) -> None:
        if weights:
            self._num_engines[weights] += 1
            self._last[lineage_of(weights)] = weights
            if weights in self._known(lineage_of(weights)):
                self._open[lineage_of(weights)].add(weights)
            self._review(lineage_of(weights))

    def _leave(self, weights: str, grace_seconds: float) -> None:
        if not weights:
            return
        self._num_engines[weights] -= 1
        if self._num_engines[weights]:
            return
        del self._num_engines[weights]
        lineage = lineage_of(weights)
        if weights in self._known(lineage):
            self._keep(weights, grace_seconds)
        elif not self._known(lineage) and self._last.get(lineage) == weights:
            del self._last[lineage]  # the pool has no chunk of this lineage

    def _keep(self, weights: str, grace_seconds: float) -> None:
        until = self._kept_until[weights] = self._state.clock() + grace_seconds
        if grace_seconds:
            self._state.timers.call_at(until, partial(self._review, lineage_of(weights)))

    def restored(self) -> None:
        """See `Feature`. Begins to rank. The engines of an earlier server get the grace time."""
        self._learn()
        until = self._state.clock() + GRACE_SECONDS
        for lineage, known in self._labels.items():
            for weights in known:
                self._kept_until.setdefault(weights, until)
            self._review(lineage)
            self._state.timers.call_at(until, partial(self._review, lineage))

    def report(self, status: DepotStatus) -> None:
        """See `Feature`."""
        found = [
            GenerationStatus(
                lineage=lineage_of(usage.weights),
                name=generation_of(usage.weights),
                models=list(usage.models),
                num_schedulers=usage.num_schedulers,
                used_bytes=usage.num_bytes,
                is_outdated=usage.is_outdated,
            )
            for usage in self.usage()
        ]
        status.generations = found[-MAXIMUM_ROWS:]

    def usage(self) -> Iterator[GenerationUse]:
        """Yield the generations that have bytes or engines."""
        self._learn()
        quotas, names = self._state.index.quotas, self._state.labels.names
        engines = dict(self._num_engines)
        for known in self._labels.values():
            for weights, labels in known.items():
                num_bytes, num_engines = sum(quotas.label_bytes[label] for label in labels), engines.pop(weights, 0)
                if num_bytes or num_engines:
                    is_outdated = labels[0] in self._state.index.shares.outdated
                    models = tuple(dict.fromkeys(names[label].model for label in labels))
                    yield GenerationUse(weights, models, num_bytes, num_engines, is_outdated)
        for weights, num_engines in engines.items():
            yield GenerationUse(weights, (), 0, num_engines, is_outdated=False)

    def _learn(self) -> None:
        """Take over the labels that were added since the last call."""
        names = self._state.labels.names
        for number in range(self._num_labels, len(names)):
            weights = names[number].weights
            if weights:
                self._labels.setdefault(lineage_of(weights), {}).setdefault(weights, []).append(number)
                self._open.setdefault(lineage_of(weights), set()).add(weights)
        self._num_labels = len(names)

    def _known(self, lineage: str) -> dict[str, list[int]]:
        self._learn()
        return self._labels.get(lineage, {})

    def _review(self, lineage: str) -> None:
        """Determine the outdated generations of a lineage, and end their chunks, or revoke the ends."""
        # Only the half of the entries that is there would end. `restored` reviews all lineages.
        if self._state.is_restoring:
            return
        state, outdated, now = self._state, self._state.index.shares.outdated, self._state.clock()
        known, last = self._known(lineage), self._last.get(lineage)
        if last is None:
            return  # no engine has registered since the start: any generation may be the current one
        for weights in list(self._open.get(lineage, ())):
            labels = known[weights]
            is_used = bool(self._num_engines[weights]) or weights == last
            is_outdated = not is_used and self._kept_until.get(weights, 0.0) <= now
            if is_outdated:
                self._open[lineage].discard(weights)
            changed = [label for label in labels if (label in outdated) != is_outdated]
            if not changed:
                continue
            (outdated.update if is_outdated else outdated.difference_update)(changed)
            self._pending.update(dict.fromkeys(changed, is_outdated))
            state.counters[_OUTDATED] += is_outdated
            state_text = "outdated: their chunks are evicted first" if is_outdated else "in use again"
            logger.info("weights %s are %s", weights, state_text)
            if is_outdated and state.tiering is not None:
                state.tiering.outdate()
        if self._pending:
            self._turns.add(self._change_chunks())

    def check_integrity(self) -> None:
        """Check the counts against the contexts, and that outdated chunks have ended.

        Raises:
            IntegrityError: they disagree.
        """
        named = Counter(each.weights for each in self._contexts.by_number.values() if each.weights)
        require(self._num_engines == named, "engines by weights are miscounted")
        in_use = set(map(lineage_of, self._num_engines))
        require(self._last.keys() <= self._labels.keys() | in_use, "a lineage without engines or chunks is kept")
        state, tree = self._state, self._state.index.nodes.tree
        if state.background.num_waiting or state.is_restoring:
            return
        for node, key in enumerate(tree.keys):
            is_outdated = state.index.nodes.label[node] in state.index.shares.outdated
            require(key is None or tree.ended[node] >= is_outdated, f"outdated node {node} has not ended")

    def _change_chunks(self) -> Task:
        while self._pending:
            pending, self._pending = self._pending, {}
            yield from self._state.index.shares.outdate(pending)

"""Operations on the tiers. Their changes do not outlive the server: the next one starts from its flags."""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from kvdepot.errors import ConfigError, ErrorCode
from kvdepot.operate.commandline import ask
from kvdepot.operate.operations.server import Status
from kvdepot.server.turns import Awaited, Refused, Steps
from kvdepot.tiers.url import DEADLINE_SECONDS, TierUrl
from kvdepot.wire.messages import Done
from kvdepot.wire.operation import PATIENT_SECONDS, Argument, Command, Endpoint, Group, Operation, Sender

if TYPE_CHECKING:
    from kvdepot.server.app import DepotServer
    from kvdepot.tiers.queue import TierQueue

MAXIMUM_TIERS: Final = 16  # since the start, including removed ones
_PROBE_SECONDS: Final = DEADLINE_SECONDS + 0.25  # a probe is late after the tier's deadline, and judged soon after

TIER: Final = Group(
    "tier",
    "add a tier to a running depot, remove one, remove old objects from one, or estimate its cost",
    "Add a tier to a running depot, or remove one, until the depot stops; remove old objects from a store, or estimate"
    " its cost.",
)


def _or_standard_input(text: str) -> str:
    url = sys.stdin.readline().strip() if text == "-" else text
    if not url:
        raise ConfigError("there is no URL")
    return url


def _add(options: argparse.Namespace) -> int:
    """Add a tier, and wait until its first probe may have failed.

    A wrong port fails at once, a host that does not answer at the tier's deadline.
    """
    count, name = ask(options, AddTier(options.url)).count, TierUrl.parse(options.url).name
    end = time.monotonic() + _PROBE_SECONDS
    why = ""
    while not why and time.monotonic() < end:
        time.sleep(0.05)
        why = next((tier.why_open for tier in ask(options, Status()).status.tiers if tier.name == name), "")
    print(f"tiers in use: {count}" + (f"; {name} is SUSPENDED until it answers: {why}" if why else ""))
    return 0


class AddTier(Operation[Done], tag="add_tier", frozen=True):
    """Add a tier below the others until the server ends."""

    command = Command(
        "add",
        "add a tier",
        "Add a tier below the existing ones, until the server stops. Use serve --tier to keep it.",
        run=_add,
        group=TIER,
    )
    seconds = PATIENT_SECONDS
    endpoints = (
        Endpoint(
            "POST", "/tiers/add", "Add a tier below the others, until the server stops; returns the number of tiers"
        ),
    )

    url: Annotated[
        str,
        Meta(min_length=1, max_length=4096),
        Argument("as for serve --tier; - reads it from standard input", "URL", read=_or_standard_input),
    ]

    def answer(self, server: "DepotServer", sender: Sender) -> Steps:
        """Open a tier and use it below the present ones. The reply comes when it is in use, and counts the tiers.

        Raises:
            Refused: the URL is malformed, another tier is being opened, this one is in use, or there were too many.
        """
        depot, opener = server.depot, server.opener
        try:
            name = TierUrl.parse(self.url).name
        except ConfigError as error:
            raise Refused(ErrorCode.MALFORMED, str(error)) from error
        queues = depot.state.tiering.queues if depot.state.tiering is not None else []
        if opener.is_opening:
            raise Refused(ErrorCode.DRAINING, "another tier is being opened: ask again")
        if any(queue.name == name and not queue.is_retired for queue in queues):
            raise Refused(ErrorCode.OUT_OF_RANGE, f"tier {name} is already in use: nothing was changed")
        if len(queues) >= MAXIMUM_TIERS:
            raise Refused(ErrorCode.OUT_OF_RANGE, f"{MAXIMUM_TIERS} tiers since the start: start the depot again")
        opened: Awaited[TierQueue | ConfigError] = Awaited()
        opener.begin(self.url, opened.set)
        (result,) = yield from opened.wait()
        if isinstance(result, ConfigError):
            raise Refused(ErrorCode.OUT_OF_RANGE, str(result))
        try:
            if depot.state.tiering is None:
                depot.state.tiering = server.make_tiering([])
            depot.state.tiering.add(result)
        except OSError as error:  # no memory for the table of its entries
            result.close()
            raise Refused(ErrorCode.OUT_OF_RANGE, f"tier {result.name} cannot be used: {error}") from error
        depot.note(f"tier {result.name} is in use")
        return Done(depot.state.epoch, depot.state.tiering.num_used)


class RemoveTier(Operation[Done], tag="remove_tier", frozen=True):
    """Stop using a tier, given by its name in the status. Its entries stay in storage."""

    command = Command(
        "remove",
        "stop using a tier",
        "Stop using a tier. Its entries stay in storage; writes still waiting for it are dropped.",
        lambda _, reply: f"tiers in use: {reply.count}",
        group=TIER,
    )
    endpoints = (
        Endpoint(
            "POST", "/tiers/remove", "Stop using a tier, whose entries stay in storage; returns the number of tiers"
        ),
    )

    name: Annotated[str, Meta(min_length=1, max_length=4096), Argument("as shown by 'kvdepot status'", "NAME")]

    def answer(self, server: "DepotServer", sender: Sender) -> Done:
        """Stop using a tier. The reply counts the tiers in use.

        Raises:
            Refused: no tier in use has that name.
        """
        depot, name = server.depot, self.name
        if depot.state.tiering is None or not depot.state.tiering.remove(name):
            raise Refused(ErrorCode.OUT_OF_RANGE, f"no tier {name}: 'kvdepot status' has their names")
        depot.note(f"tier {name} is not used any more")
        return Done(depot.state.epoch, depot.state.tiering.num_used)

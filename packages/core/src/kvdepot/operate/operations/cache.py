"""Operations on the chunks of the pool and the tiers: find them, clear them, and load them from the tiers.

Long operations take turns in the background, one after the other, and reply at the end.
"""

import argparse
import logging
import sys
from collections.abc import Generator, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Struct

from kvdepot.config import parse_tenant
from kvdepot.errors import ConfigError, ErrorCode, printable, reason_of, reason_of_invalid
from kvdepot.keys import Namespace, NamespaceDigest, hash_prefix, num_digests
from kvdepot.layout import MINIMUM_CHUNK_TOKENS
from kvdepot.operate.commandline import ask, show
from kvdepot.server.turns import Awaited, Steps, Wait
from kvdepot.wire.messages import Digests, Done, ErrorReply, Text
from kvdepot.wire.operation import Argument, Command, Endpoint, Operation, Reply, Sender, TenantName

if TYPE_CHECKING:
    from kvdepot.pool.names import Label
    from kvdepot.server.app import DepotServer
    from kvdepot.server.depot import Depot

logger = logging.getLogger(__name__)

_FILE: Final = "KEYS"
_FILE_HELP: Final = "file of prefixes, or - for standard input"
_KEYS_HELP: Final = (
    " The file has one prefix per line, as JSON. A prefix is either the keys of its chunks as hex strings,"
    ' {"digests": ["9f..", ..], "tenant": "default"}, or a prompt as the engine sees it, {"tokens": [1, 2, ..],'
    ' "namespace": {"model": ..}, "chunk_tokens": 64}. vLLM\'s log says which namespace and chunks an engine has. Use -'
    " for standard input."
)
_MOST_FOUND: Final = 1024  # spaces in a reply


# --- files of prefixes ----------------------------------------------------------------------------------------------


class _Keys(Struct, forbid_unknown_fields=True):
    """One line of a file: a prefix given by the keys of its chunks."""

    digests: list[str]
    tenant: TenantName = "default"

    def packed(self) -> tuple[str, bytes]:
        return self.tenant, b"".join(map(bytes.fromhex, self.digests))


class _Traced(Struct, forbid_unknown_fields=True):
    """One line of a trace: a prompt, from which the keys are computed.

    The namespace is given in full, or by its digest as a running engine logs it.
    """

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    namespace: Namespace | str
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = MINIMUM_CHUNK_TOKENS
    tenant: TenantName = "default"  # used with a digest; a namespace in full has its own tenant

    def packed(self) -> tuple[str, bytes]:
        namespace = self.namespace
        if isinstance(namespace, str):
            namespace = NamespaceDigest(bytes.fromhex(namespace), self.tenant)
        run = hash_prefix(namespace, self.chunk_tokens, self.tokens)
        return run.tenant, run.digests


def _prefixes_in(file: str) -> list[tuple[str, bytes]]:
    """Return the tenant and the packed digests of each line of a file.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed.
    """
    try:
        lines = sys.stdin.readlines() if file == "-" else Path(file).read_text().splitlines()
        found = [_prefix_of(line) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"{file}: {reason_of(error)}") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: {reason_of_invalid(error)}") from error
    # Otherwise a command that got no input would report success.
    if not found:
        raise ConfigError(f"{file}: there is no prefix in it")
    return found


def _prefix_of(line: str) -> tuple[str, bytes]:
    given = msgspec.json.decode(line)
    is_traced = isinstance(given, dict) and "tokens" in given
    return msgspec.convert(given, _Traced if is_traced else _Keys).packed()


# --- find -----------------------------------------------------------------------------------------------------------


class FoundPrefix(Struct, frozen=True, kw_only=True):
    """The part of a prefix that one space of the pool has: `num_chunks` usable leading chunks."""

    num_chunks: int
    num_tokens: int
    tenant: str
    model: str
    dtype: str
    format: str
    chunk_tokens: int
    idle_seconds: float  # since the last of the chunks was stored or used
    is_held: bool  # by a lease, a pin or a write
    num_children: int  # number of chunks that directly follow the last one


class Found(Reply, tag="found", frozen=True):
    """The result of `Find`: one item per space with a part of the prefix, longest first, at most 1,024."""

    prefixes: list[FoundPrefix]


def _find(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    lines: list[str] = []
    for number, (_, digests) in enumerate(_prefixes_in(options.digests), 1):
        count, prefixes = num_digests(digests), ask(options, Find(digests)).prefixes
        found.append({"num_chunks": count, "found": msgspec.to_builtins(prefixes)})
        if not prefixes:
            lines.append(f"{number}: nothing of {count:,} chunks")
        for here in prefixes:
            held = ", held" if here.is_held else ""
            more = f", {here.num_children} continue it" if here.num_children else ""
            lines.append(
                f"{number}: {here.num_chunks:,} of {count:,} chunks ({here.num_tokens:,} tokens), tenant {here.tenant},"
                f" model {here.model or '?'}, {here.dtype}, idle {here.idle_seconds:.0f} s{held}{more}"
            )
    show(options, found, lambda: "\n".join(map(printable, lines)))
    return 0


class Find(Operation[Found], tag="find", frozen=True):
    """Find the part of a prefix that the pool has, in every space."""

    command = Command(
        "find",
        "show how much of prefixes the pool holds",
        "Show how much of each prefix the pool holds." + _KEYS_HELP,
        run=_find,
        has_json=True,
    )
    endpoints = (
        Endpoint(
            "POST",
            "/cache/find",
            "Show how much of a prefix the pool holds",
            lambda _, reply: reply.prefixes,
            list[FoundPrefix],
        ),
    )

    digests: Annotated[Digests, Argument(_FILE_HELP, _FILE, read=str)]

    def answer(self, server: "DepotServer", sender: Sender) -> Steps:
        """Find a prefix in the pool. The reply lists at most `_MOST_FOUND` spaces, the longest prefix first.

        Raises:
            KeyFormatError: the bytes are not whole digests.
            Refused: very many commands wait.
        """
        depot = server.depot
        num_digests(self.digests)  # raises if they are not whole
        index = depot.index
        most: list[tuple[int, int, FoundPrefix]] = []  # a heap: the shortest prefix first
        yield from depot.background.operators.first()
        for space in list(index.spaces):
            match = index.visibility.match(space, self.digests)
            if match.nodes:
                last = match.nodes[-1]
                tenant, model, _ = depot.labels.names[index.nodes.label[last]]
                prefix = FoundPrefix(
                    num_chunks=match.num_chunks,
                    num_tokens=match.num_chunks * space.spec.chunk_tokens,
                    tenant=tenant,
                    model=model,
                    dtype=space.spec.dtype,
                    format=space.spec.format,
                    chunk_tokens=space.spec.chunk_tokens,
                    idle_seconds=index.nodes.idle_seconds(last),
                    is_held=bool(index.nodes.tree.holds[last]),
                    num_children=index.nodes.tree.num_children[last],
                )
                heappush(most, (match.num_chunks, -space.number, prefix))
                if len(most) > _MOST_FOUND:
                    heappop(most)
            yield depot.background.operators.again
        return Found(depot.state.epoch, [prefix for _, _, prefix in sorted(most, reverse=True)])


# --- clear ----------------------------------------------------------------------------------------------------------


def _clear(options: argparse.Namespace) -> int:
    if not (options.all or options.tenant or options.model or options.digests):
        raise ConfigError("name what to clear by --tenant, --model or --prefix, or clear everything with --all")
    if options.all and (options.tenant or options.model or options.digests):
        raise ConfigError("--all clears everything: leave --tenant, --model and --prefix out, or --all")
    prefixes = [b""]
    if options.digests != b"":  # the user named a file
        prefixes = [digests for _, digests in _prefixes_in(options.digests) if digests]
    count = 0
    for digests in prefixes:
        count += ask(options, Clear(options.tenant, options.model, digests)).count
    print(f"{count:,} {'entry' if count == 1 else 'entries'} removed")
    return 0


class Clear(Operation[Done], tag="clear", frozen=True):
    """Remove the unused chunks of one tenant and model, or of all, from the pool and the tiers.

    With `digests`, remove only from the pool, and only the chunks that no prefix but this one (from chunk 0 on) needs.
    """

    command = Command(
        "clear",
        "remove entries that are not in use",
        "Remove entries that are not in use from the pool and the tiers. With --prefix, remove only from the pool, and"
        " only entries that no other prefix needs." + _KEYS_HELP,
        run=_clear,
        options=(("all", Argument("remove everything", default=False)),),
    )
    seconds = 600.0  # for tiers with very many entries
    endpoints = (Endpoint("POST", "/cache/clear", "Remove entries that are not in use"),)
    may_mean_all = True
    needs_entries = True

    tenant: Annotated[TenantName | None, Argument("remove only entries of this tenant", read=parse_tenant)] = None
    model: Annotated[
        Text | None, Argument("remove only entries of this model, by the name that engines registered")
    ] = None
    digests: Annotated[Digests, Argument("remove only the prefixes in this file", _FILE, "--prefix", read=str)] = b""

    def answer(self, server: "DepotServer", sender: Sender) -> Steps:
        """Clear one prefix, or the pool and the tiers. The reply counts entries, and the log names the sender.

        If a tier cannot be cleared, the reply is an error, but the pool and the other tiers are cleared.

        Raises:
            KeyFormatError: the bytes are not whole digests.
            Refused: very many commands wait.
        """
        depot = server.depot
        num_digests(self.digests)  # raises if they are not whole
        asker = sender()  # now: the sender may have disconnected before the end
        yield from depot.background.operators.first()
        if self.digests:
            removed = yield from _clear_prefix(depot, self)
            _note_clear(depot, "a prefix", removed, asker)
            return Done(depot.state.epoch, removed)
        tenant, model = self.tenant, self.model
        removed, problems = yield from _clear_owner(depot, tenant, model)
        selected = ", ".join(
            f"{kind} {name}" for kind, name in (("tenant", tenant), ("model", model)) if name is not None
        )
        _note_clear(depot, printable(selected) or "everything", removed, asker)
        if not problems:
            return Done(depot.state.epoch, removed)
        text = (
            f"{removed} entries were removed, but not in every tier: {'; '.join(problems)}."
            " What is still there is served again: clear again once 'kvdepot status' says that the tier is used"
        )
        logger.error("%s", text)
        return ErrorReply(depot.state.epoch, ErrorCode.TIER_UNAVAILABLE, text)


def _note_clear(depot: "Depot", selected: str, count: int, sender: str) -> None:
    depot.note(f"cleared {selected}: {count:,} entries removed, asked by {printable(sender)}")


def clear_pool(depot: "Depot", tenant: str | None, model: str | None = None) -> Iterator[int]:
    """Remove the unused entries of a tenant and a model (None: of all). Yield the number removed in each step."""
    names = depot.labels.names
    return depot.index.evictor.clear(lambda label, _space: _is_of(names[label], tenant, model))


def _is_of(label: "Label", tenant: str | None, model: str | None) -> bool:
    return tenant in (None, label.tenant) and model in (None, label.model)


def _clear_owner(depot: "Depot", tenant: str | None, model: str | None) -> Generator[Wait, bool, tuple[int, list[str]]]:
    """Remove the entries of a tenant and a model (None: of all) from the pool and the tiers.

    Return their number, and one text per tier that cannot be cleared.
    """
    turns, removed, problems = depot.background.operators, 0, list[str]()
    for is_again in (False, True):  # again, as entries may have been written or promoted until the tiers were clear
        tiering = depot.state.tiering
        if tiering is not None:
            stopped = Awaited[()]()
            for _ in tiering.stop(tenant, model, stopped.set):
                yield turns.again
            yield from stopped.wait()
        in_pool = yield from turns.total(clear_pool(depot, tenant, model))
        removed += in_pool
        tiering = depot.state.tiering  # a tier may have been added since
        if tiering is None or (is_again and not in_pool):
            break
        cleared = Awaited[int, list[str]]()
        tiering.clear(tenant, model, cleared.set)
        in_tiers, problems = yield from cleared.wait()
        while depot.index.watchers.forget_tiers():
            yield turns.again
        removed += in_tiers
    return removed, problems


def _clear_prefix(depot: "Depot", request: Clear) -> Generator[Wait, bool, int]:
    """Remove the chunks that only this prefix needs from every space of the pool. Return the number of entries."""
    index, turns, removed = depot.index, depot.background.operators, 0
    for space in list(index.spaces):
        yield turns.again
        nodes = index.visibility.match(space, request.digests).nodes
        if not nodes:
            continue
        tenant, model, _ = depot.labels.names[index.nodes.label[nodes[-1]]]
        if request.tenant in (None, tenant) and request.model in (None, model):
            if depot.state.tiering is not None:
                depot.state.tiering.let_go(space, request.digests)
            removed += yield from turns.total(index.evictor.clear_end(nodes[-1]))
    return removed


# --- warm -----------------------------------------------------------------------------------------------------------


def _warm(options: argparse.Namespace) -> int:
    found = asked = 0
    for tenant, digests in _prefixes_in(options.digests):
        found += ask(options, Warm(tenant=tenant, digests=digests)).count
        asked += num_digests(digests)
    print(f"{found:,} of {asked:,} chunks are in the pool")
    return 0


class Warm(Operation[Done], tag="warm", frozen=True, kw_only=True):
    """Promote a prefix from tiers."""

    command = Command(
        "warm", "load prefixes from the tiers", "Load prefixes from the tiers into the pool." + _KEYS_HELP, run=_warm
    )
    seconds = 90.0  # for one prefix; the depot waits for a minute at most
    endpoints = (Endpoint("POST", "/cache/warm", "Load a prefix from the tiers"),)
    needs_entries = True

    tenant: TenantName = "default"
    digests: Annotated[Digests, Argument(_FILE_HELP, _FILE, read=str)]

    def answer(self, server: "DepotServer", sender: Sender) -> Steps:
        """Promote a prefix from the tiers, as far as they have it.

        The reply counts the chunks that are in the pool afterwards, in the space that has the most.

        Raises:
            KeyFormatError: the bytes are not whole digests.
            Refused: very many commands wait.
        """
        depot = server.depot
        yield from depot.background.operators.first()
        yield from depot.tiers.bring_up(self.tenant, self.digests)
        most = 0
        for space in list(depot.index.spaces):
            yield depot.background.operators.again
            most = max(most, depot.index.visibility.match(space, self.digests).num_chunks)
        return Done(depot.state.epoch, most)

"""Collects the status of a depot from its parts and its features."""

import os
import time
from collections import Counter

import msgspec.structs

from kvdepot.counting import depot_counter, tier_counter
from kvdepot.index.evictor import CHUNKS_EVICTED, CHUNKS_EVICTED_LEASED
from kvdepot.index.index import ENTRIES_OVERLAPPING, STORE_ENTRIES_NOT_READY, STORE_ENTRIES_OVER_SHARE
from kvdepot.index.leases import LEASES_EXPIRED
from kvdepot.layout import GroupKind, Part, blocks_per_chunk
from kvdepot.operate.operations.server import log_level
from kvdepot.server.app import DepotServer
from kvdepot.server.contexts import Context
from kvdepot.server.depot import Depot
from kvdepot.server.state import MAXIMUM_ROWS, OTHERS, DepotState
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.status import ContextStatus, DepotStatus, DeviceStatus, GroupStatus, TenantStatus


def status_of_server(server: DepotServer) -> DepotStatus:
    """Return the status of a depot and its server."""
    status, turns = status_of(server.depot), server.loop.turns
    status.server_version, status.protocol_version = server.version, m.PROTOCOL_VERSION
    status.epoch, status.pid = server.epoch, os.getpid()
    status.uptime_seconds = time.monotonic() - server.started_at
    status.policy, status.log_level = server.config.policy, log_level()
    status.num_sessions = len(server.sockets.sessions)
    status.loop_longest_seconds, status.loop_slow_turns = turns.longest, turns.num_above
    for kind, histogram in server.requests.latencies.items():
        if any(histogram.counts):
            status.latencies[frames.operation_of(kind)] = histogram.status()
    status.latencies["store"] = server.depot.state.usage.store_seconds.status()
    status.latencies["loop_turn"] = turns.status()
    return status


def status_of(depot: Depot) -> DepotStatus:
    """Return the status of a depot, without the server's part."""
    state, index, usage = depot.state, depot.index, depot.state.usage
    tiering, movers = state.tiering, state.movers
    status = DepotStatus(
        features=list(depot.features.by_name),
        num_entries=index.entries.num_sealed,
        num_chunks=len(index.nodes),
        max_entries=index.table.num_records,
        pool_size_bytes=index.extents.capacity_bytes,
        pool_ready_bytes=index.extents.ready_bytes,
        pool_used_bytes=index.extents.used_bytes,
        quarantined_bytes=depot.quarantine.num_bytes + depot.stores.num_late_bytes,
        num_leases=len(state.leases),
        recovering=state.is_restoring,
        draining=state.is_draining,
        verify=state.verify,
        num_tickets=len(depot.stores.tickets),
        num_unwritten=tiering.num_unwritten if tiering else 0,
        prefill_seconds_saved=usage.saved_seconds,
        contexts=_contexts_status(depot),
        tenants=_tenants_status(state),
        tiers=tiering.status() if tiering else [],
        counter_texts=depot_counter.texts,
        tier_counter_texts=tier_counter.texts,
        counters={
            **dict.fromkeys(depot_counter.texts, 0),
            **state.counters,
            **(tiering.counters if tiering else {}),
            **(movers.counters if movers else {}),
            CHUNKS_EVICTED: index.evictor.num_evicted,
            CHUNKS_EVICTED_LEASED: index.evictor.num_leased_evicted,
            STORE_ENTRIES_OVER_SHARE: index.num_over_share,
            STORE_ENTRIES_NOT_READY: index.num_not_ready,
            ENTRIES_OVERLAPPING: index.num_overlapping,
            LEASES_EXPIRED: state.leases.num_expired,
        },
        devices={
            name: DeviceStatus(stored_bytes=stored, retrieved_bytes=retrieved)
            for name, (stored, retrieved) in usage.moved_bytes.items()
        },
        eviction_ages=index.evictor.eviction_ages.status(),
        pool_regions=list(index.extents.region_bytes),
        events=[(state.clock() - at, text) for at, text in state.events],
    )
    for report in depot.features.report:
        report(status)
    return status


def _tenants_status(state: DepotState) -> dict[str, TenantStatus]:
    quotas = state.index.quotas
    tenants = {name: TenantStatus(used_bytes=used) for name, used in quotas.first_tenants(MAXIMUM_ROWS)}
    for name, (_, quota, used) in quotas.usage().items():
        tenants[name] = TenantStatus(used_bytes=used, quota_bytes=quota)
    rest = sum(quotas.used_bytes) - sum([tenant.used_bytes for tenant in tenants.values()])
    if rest:
        tenants[OTHERS] = TenantStatus(used_bytes=rest)
    for name, (asked, in_pool, in_tiers) in state.usage.tenant_tokens.items():
        tenant = tenants.setdefault(name, TenantStatus(used_bytes=0))
        tenant.lookup_tokens, tenant.pool_hit_tokens, tenant.tier_hit_tokens = asked, in_pool, in_tiers
    return tenants


def _contexts_status(depot: Depot) -> list[ContextStatus]:
    tickets = Counter(ticket.context for ticket in depot.stores.tickets.values())
    return [
        _context_status(depot.state, context, tickets.get(context.number, 0))
        for context in depot.contexts.by_number.values()
    ]


def _context_status(depot: DepotState, context: Context, num_tickets: int) -> ContextStatus:
    """Return the cached status if nothing has changed, as there may be a thousand contexts."""
    state, pid, why = ("", 0, "") if depot.movers is None else depot.movers.status(context.number)
    num_leases = depot.leases.count_of(context.number)
    last = context.status or _registered_status(context)
    if (last.num_leases, last.num_tickets, last.mover, last.mover_pid, last.why_no_mover) != (
        num_leases,
        num_tickets,
        state,
        pid,
        why,
    ):
        last = msgspec.structs.replace(
            last, num_leases=num_leases, num_tickets=num_tickets, mover=state, mover_pid=pid, why_no_mover=why
        )
    context.status = last
    return last


def _registered_status(context: Context) -> ContextStatus:
    spec, registration = context.space.spec, context.registration
    common = ContextStatus(
        context=context.number,
        role="scheduler",
        instance=context.instance,
        model=context.model,
        pid=context.writer.pid,
        chunk_tokens=spec.chunk_tokens,
        dtype=spec.dtype,
        format=spec.format,
        num_leases=0,
        num_tickets=0,
        groups=[],
    )
    if registration is None:
        return msgspec.structs.replace(common, remark=context.remark, weights=context.weights.partition(" ")[2])
    groups = [
        _group_status(shape, detail, spec.chunk_tokens)
        for shape, detail in zip(spec.groups, registration.details, strict=True)
    ]
    return msgspec.structs.replace(
        common,
        role="worker",
        fallback=registration.fallback,
        rank=registration.rank,
        world_size=registration.world_size,
        device=registration.device,
        transfer_mode=registration.transfer_mode,
        groups=groups,
        bytes_per_token=sum(group.bytes_per_token for group in groups),
    )


def _group_status(shape: m.GroupShape, detail: m.GroupDetail, chunk_tokens: int) -> GroupStatus:
    block_tokens, block_size_bytes = shape.row_tokens * detail.rows, sum(detail.page_sizes_bytes)
    kept = block_size_bytes * blocks_per_chunk(shape.kind, block_tokens, shape.window_tokens, chunk_tokens)
    return GroupStatus(
        kind=shape.kind,
        block_tokens=block_tokens,
        window_tokens=shape.window_tokens,
        num_parts=shape.layers * shape.heads // Part.of(detail.part).num_cells,
        part=_describe_part(shape, Part.of(detail.part)),
        num_layers=detail.num_layers or len(detail.page_sizes_bytes),
        num_blocks=detail.num_blocks,
        physical_block_tokens=detail.physical_block_tokens or block_tokens,
        compress_ratio=detail.compress_ratio,
        hidden_dims=detail.hidden_dims,
        dtype=detail.dtype,
        is_mla=detail.is_mla,
        shape=detail.shape,
        attention_backend=detail.attention_backend,
        block_size_bytes=block_size_bytes,
        bytes_per_token=0.0 if shape.kind is GroupKind.RECURRENT else kept / chunk_tokens,
    )


def _describe_part(shape: m.GroupShape, part: Part) -> str:
    """Describe the part of a group's plane that a worker holds; "" if it holds all of it."""
    rows = "layers" if shape.heads > 1 or part.num_layers > 1 else "ranks"  # opaque pages have one row per rank
    texts: list[str] = []
    for name, first, count, total in (
        (rows, part.first_layer, part.num_layers, shape.layers),
        ("heads", part.first_head, part.num_heads, shape.heads),
    ):
        if count < total:
            texts.append(
                f"{name} {first} to {first + count - 1} of {total}" if count > 1 else f"{name[:-1]} {first} of {total}"
            )
    return ", ".join(texts)

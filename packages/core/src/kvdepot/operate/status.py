"""`kvdepot status` and `kvdepot top`: print a depot's status as text or JSON."""

import argparse
from typing import Any, Final

import msgspec

from kvdepot.client.operator import ask_depot
from kvdepot.config import counted, format_size
from kvdepot.counting import Counts
from kvdepot.errors import ConfigError, printable
from kvdepot.layout import GroupKind
from kvdepot.operate import operations as o
from kvdepot.operate.commandline import count_argument, named_depot, number_argument, show
from kvdepot.wire.status import ContextStatus, DepotStatus, GenerationStatus, GroupStatus, TierStatus, figures_of

_MINIMUM_SAMPLE_CHUNKS: Final = 10_000  # estimates of fewer looked-up chunks are too rough to show
_PROMPT_TOKENS: Final = 8_000  # prompt length for the pool's capacity: a recurrent state counts once per prompt


def add_status(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add `status` and `top` to the subparsers of `kvdepot`.

    Args:
        commands: the result of `add_subparsers`.
        common: has `--log-level`, and `--dir` to name a depot.
        json_output: has `--json`.
    """
    status = commands.add_parser(
        "status",
        parents=[common, json_output],
        help="show a depot's contents and engines",
        description="Show a depot's contents, its tiers, and the engines that are attached.",
    )
    status.add_argument(
        "--verbose", action="store_true", help="show the layout of each engine's KV cache and all figures, too"
    )
    status.set_defaults(run=_status)

    top = commands.add_parser(
        "top",
        parents=[common],
        help="watch a depot at work",
        description="Watch hit rates, engines, tenants and tiers of a depot, once a second.",
    )
    top.set_defaults(run=_top)
    top.add_argument(
        "--interval", type=number_argument, default=1.0, metavar="SECONDS", help="time between frames (default 1)"
    )
    top.add_argument(
        "--frames", type=count_argument, metavar="N", help="stop after N frames (default: 1 without a terminal)"
    )


def _status(options: argparse.Namespace) -> int:
    status = ask_depot(o.Status(), named_depot(options)).status
    show(options, msgspec.to_builtins(status), lambda: describe_status(status, verbose=options.verbose))
    return 0


def _top(options: argparse.Namespace) -> int:
    try:
        from kvdepot.operate.top import run_top
    except ImportError as error:
        raise ConfigError(f"kvdepot top needs {error.name}: pip install 'kvdepot[cli]'") from error

    def ask() -> DepotStatus:
        return ask_depot(o.Status(), named_depot(options)).status

    run_top(ask, interval_seconds=max(0.1, options.interval), num_frames=options.frames)
    return 0


def describe_status(status: DepotStatus, *, verbose: bool = False) -> str:
    """Return the status as text; if `verbose`, with the layout of each engine's KV cache and all figures."""
    counters, size = Counts(status.counters), status.pool_size_bytes
    asked, hit = counters["lookup_chunks"], counters["lookup_chunks_hit"]
    used = status.pool_used_bytes / max(1, size)
    ready = f", {format_size(status.pool_ready_bytes)} ready" if status.pool_ready_bytes < size else ""
    held = f", {format_size(status.quarantined_bytes)} in quarantine" if status.quarantined_bytes else ""
    rate = f" ({hit / asked:.1%})" if asked else ""
    retrieved = sum(moved.retrieved_bytes for moved in status.devices.values())
    lines = [
        f"kvdepot {status.server_version}, pid {status.pid}, up {status.uptime_seconds:.0f} s, epoch {status.epoch}",
        f"pool     {format_size(status.pool_used_bytes)} of {format_size(size)} used ({used:.0%}){ready}{held}",
        f"entries  {status.num_entries:,} of at most {status.max_entries:,}; policy {status.policy},"
        + f" {counters['chunks_evicted']:,} chunks evicted",
        f"lookups  {counters['lookups']:,}; {hit:,} of {asked:,} chunks found{rate}",
        f"reads    {counted(counters['retrieves'], 'retrieve')}; {counted(counters['retrieve_chunks_hit'], 'chunk')},"
        + f" {format_size(retrieved)}",
        f"leases   {status.num_leases:,} in {counted(status.num_sessions, 'session')};"
        + f" {counted(status.num_tickets, 'store')} in progress",
    ]
    if counters["blend_lookups"]:
        asked, found = counters["blend_segments_asked"], counters["blend_segments_found"]
        lines.append(
            f"blends   {counters['blend_lookups']:,}; {found:,} of {asked:,} segments found,"
            f" {counters['blend_tokens_found']:,} tokens in {counted(counters['blend_runs'], 'run')}"
        )
    if counters["blends"]:
        reused, again = counters["blend_reused_tokens"], counters["blend_recomputed_tokens"]
        lines.append(
            f"blended  {counted(counters['blends'], 'prompt')}; {reused:,} tokens reused, {again:,} computed again"
        )
    if status.prefill_seconds_saved:
        lines.append(f"saved    about {status.prefill_seconds_saved:,.1f} s of computing prompts")
    slow = f"; {status.loop_slow_turns:,} of more than 20 ms" if status.loop_slow_turns else ""
    lines.append(f"loop     longest turn {status.loop_longest_seconds * 1e3:.1f} ms{slow}")
    if status.estimated_chunks >= _MINIMUM_SAMPLE_CHUNKS:
        rates = [f"{e.hit_chunks / status.estimated_chunks:.0%} with {e.scale:g}x" for e in status.estimates]
        lines.append(f"sizing   hit rate of the pool alone, without tiers, by its size: about {', '.join(rates)}")
    if status.draining:
        lines.append("draining: stores are declined; end that with 'kvdepot drain --resume'")
    if status.recovering:
        lines.append("reading back the entries of an earlier server")
    for name, usage in sorted(status.tenants.items()):
        quota = f" of a quota of {format_size(usage.quota_bytes)}" if usage.quota_bytes else ""
        lines.append(f"tenant   {name}: {format_size(usage.used_bytes)}{quota}")
    lines += _describe_generations(status.generations)
    lines += [_describe_tier(tier) for tier in status.tiers]
    for context in status.contexts:
        lines += ["", *_describe_context(context, status.pool_size_bytes, verbose=verbose)]
    if verbose:
        named = [(each, getattr(status, each.field)) for each in figures_of(DepotStatus)]
        lines += ["", *(f"{each.metric:26} {round(value, 3):<12,}  {each.text}" for each, value in named)]
    return "\n".join(map(printable, lines))


def _describe_generations(generations: list[GenerationStatus]) -> list[str]:
    """Return one line per generation of weights, for the lineages that a trainer has updated."""
    updated = {each.lineage for each in generations if each.name}
    lines: list[str] = []
    for each in generations:
        if each.lineage in updated:
            models = f" of {', '.join(each.models)}" if any(each.models) else ""
            text = f"weights  {each.name or 'as loaded'}{models}: {format_size(each.used_bytes)}"
            text += f", {counted(each.num_schedulers, 'engine')}" if each.num_schedulers else ""
            lines.append(text + (", outdated: evicted first" if each.is_outdated else ""))
    return lines


def _describe_context(context: ContextStatus, pool_bytes: int, *, verbose: bool) -> list[str]:
    title = f"[{context.context}] {context.instance}"
    model = f", model {context.model}" if context.model and context.model not in context.instance else ""
    if context.role == "scheduler":
        scheduler = f"{title}, scheduler, pid {context.pid}{model}, {counted(context.num_leases, 'lease')}"
        scheduler += f", weights {context.weights}" if context.weights else ""
        return [scheduler, f"    {context.remark}"] if context.remark else [scheduler]
    rank = f"rank {context.rank} of {context.world_size}" if context.world_size > 1 else "worker"
    lines = [f"{title}, {rank} on {context.device}, pid {context.pid}{model}"]
    if context.mover:
        why = f"; the one before: {context.why_no_mover}" if context.mover_pid else f": {context.why_no_mover}"
        process = f", pid {context.mover_pid}" if context.mover_pid else ""
        lines.append(f"    mover {context.mover}{process}{why if context.why_no_mover else ''}")
    if context.fallback:
        lines.append(f"    copies by itself: {context.fallback}")
    lines.append(
        f"    {context.dtype}, chunks of {context.chunk_tokens} tokens, {_describe_sizes(context, pool_bytes)}"
    )
    if not verbose:
        return lines
    lines.append(f"    copies: {context.transfer_mode}" + (f"; format {context.format}" if context.format else ""))
    return lines + [f"    {_describe_group(number, group)}" for number, group in enumerate(context.groups)]


def _describe_sizes(context: ContextStatus, pool_bytes: int) -> str:
    """Return this worker's bytes per token and per state, and the pool's capacity in prompts of all workers."""
    states = [group for group in context.groups if group.kind is GroupKind.RECURRENT]
    text = f"{format_size(context.bytes_per_token)} a token"
    if states:
        text += f", {format_size(sum(group.block_size_bytes for group in states))} a state"
    prompt = sum(group.num_parts * group.bytes_per_token * _PROMPT_TOKENS for group in context.groups)
    prompt += sum(group.num_parts * group.block_size_bytes for group in states)
    if not prompt:
        return text
    return f"{text}; the pool holds about {counted(int(pool_bytes // prompt), 'prompt')} of {_PROMPT_TOKENS:,} tokens"


def describe_tier_size(tier: TierStatus) -> str:
    """Return the bytes that a tier holds, and its capacity. Object stores and Valkey do not tell theirs."""
    if not tier.used_bytes and not tier.capacity_bytes:
        return "size not known"
    return format_size(tier.used_bytes) + (f" of {format_size(tier.capacity_bytes)}" if tier.capacity_bytes else "")


def _describe_tier(tier: TierStatus) -> str:
    counters = Counts(tier.counters)
    entries = f" in {tier.num_entries:,} entries" if tier.num_entries else ""
    parts = [
        f"tier     {tier.name}: {describe_tier_size(tier)}{entries}",
        f"{format_size(counters['written_bytes'])} written",
        f"{format_size(counters['read_bytes'])} read",
    ]
    if tier.queued_write_bytes:
        parts.append(f"{format_size(tier.queued_write_bytes)} wait to be written")
    if counters["corrupt"]:
        parts.append(f"{counters['corrupt']:,} were damaged")
    if tier.num_hung_calls:
        parts.append(f"{counted(tier.num_hung_calls, 'call')} hung")
    if tier.why_open:
        parts.append(f"SUSPENDED: {tier.why_open}")
    return "; ".join(parts)


def _describe_group(number: int, group: GroupStatus) -> str:
    parts = [
        f"group {number}: {group.kind.replace('_', ' ')}",
        counted(group.num_layers, "layer"),
        f"{group.num_blocks:,} blocks of {group.block_tokens} tokens ({format_size(group.block_size_bytes)})",
    ]
    if group.physical_block_tokens != group.block_tokens:
        parts.append(f"physical blocks of {group.physical_block_tokens}")
    if group.window_tokens:
        parts.append(f"window {group.window_tokens}")
    if group.part:
        parts.append(group.part)
    if group.is_mla:
        parts.append("MLA")
    if group.compress_ratio > 1:
        parts.append(f"compressed {group.compress_ratio}:1")
    if group.hidden_dims:
        parts.append(f"hidden {'+'.join(map(str, group.hidden_dims))}")
    if group.shape:
        parts.append(f"tensors {'x'.join(map(str, group.shape))}")
    if group.attention_backend:
        parts.append(group.attention_backend)
    return ", ".join(parts)

"""`kvdepot tier gc`: removes objects from the store of a tier while depots use it."""

import argparse
import time
from typing import Any, Final

from kvdepot.config import format_size, parse_duration
from kvdepot.errors import ConfigError, reason_of
from kvdepot.ops.settings import as_argument, size_argument
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.url import TierUrl, open_tier

_FORMATS: Final = ("runs", "entries")
_ENOUGH: Final = 1.05  # share of the capacity: the command ends when the store has no more than this
_MOST_ROUNDS: Final = 8  # otherwise depots that write faster than the command removes would keep it running for ever


def add_tier_gc(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `gc` to the subparsers of `kvdepot tier`; `common` has `--log-level`."""
    parser = commands.add_parser(
        "gc",
        parents=[common],
        help="remove old objects from an object store",
        description=(
            "Remove objects from the store of a tier (s3, gs, az, file), the oldest first, and print what is there by"
            " format. It is safe beside depots that use the store: they see misses. Without an option it only counts."
        ),
    )
    parser.add_argument("url", help="the tier, as in serve --tier")
    parser.add_argument(
        "--capacity", type=size_argument, default=0, metavar="SIZE", help="remove the oldest objects beyond this size"
    )
    parser.add_argument(
        "--older-than",
        type=as_argument(parse_duration),
        default=0.0,
        metavar="TIME",
        help="remove objects that were written longer ago than this, e.g. 7d",
    )
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default="",
        help="remove all objects of this format, which no depot reads any more",
    )
    parser.add_argument(
        "--model",
        default="",
        help="with --keep: remove this model's objects of all other weights; a name as in 'kvdepot status'",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="WEIGHTS",
        help="weights that a trainer wrote and engines still use, as 'kvdepot status' names them; repeatable",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    url = TierUrl.parse(options.url)
    if url.scheme not in ("s3", "gs", "az", "file"):
        raise ConfigError(
            f"{url.name}: only tiers in object stores and shared files need this; other tiers evict by themselves"
        )
    if bool(options.model) != bool(options.keep) or "" in options.keep:
        raise ConfigError(
            "--model and --keep go together: the first names the model whose objects are removed, the"
            " second the weights to keep"
        )
    url.options.setdefault("deadline", "60")
    tier: Any = open_tier(url, TierPool(-1, memoryview(bytearray())))
    from kvdepot.tiers.collecting import (  # imports obstore, which is installed if the tier could be opened
        Collected,
        collect,
    )

    def once() -> Collected:
        return collect(
            tier.patient,
            time.time(),
            capacity_bytes=options.capacity,
            older_than_seconds=options.older_than,
            format_name=options.format,
            model=options.model,
            kept_generations=options.keep,
        )

    try:
        done = last = once()
        for _ in range(_MOST_ROUNDS - 1):
            if not options.capacity or last.num_bytes.total() <= _ENOUGH * options.capacity:
                break
            last = once()  # depots wrote while objects were removed
            done.num_removed += last.num_removed
            done.removed_bytes += last.removed_bytes
    except Exception as error:
        raise ConfigError(f"{url.name}: {reason_of(error)}") from error
    finally:
        tier.close()
    for name in sorted(done.num_objects):
        print(f"{name}: {done.num_objects[name]:,} objects, {format_size(done.num_bytes[name])}")
    print(f"removed: {done.num_removed:,} objects, {format_size(done.removed_bytes)}")
    return 0

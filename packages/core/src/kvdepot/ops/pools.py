"""`kvdepot pools`: lists the pools on this machine, and removes those that no depot serves any more."""

import argparse
import pwd
import sys
import time
from pathlib import Path
from typing import Any, Final

from kvdepot.config import format_size
from kvdepot.errors import PoolError, printable
from kvdepot.ops.terminal import show
from kvdepot.pool.inventory import SHARED_MEMORY, FoundPool, find_pools, look_at, remove_pool

# The longest time that a restarting depot is away: Kubernetes' back-off ends at 5 minutes, and a node that pulls a new
# image takes about as long. A pool that the user names is removed whatever its age.
_RESTART_SECONDS: Final = 600.0

_UNITS: Final = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))


def add_commands(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add `pools` to the subparsers of `kvdepot`; `common` has `--dir`, `json_output` has `--json`."""
    pools = commands.add_parser(
        "pools",
        parents=[common, json_output],
        help="list the pools on this machine and free their memory",
        description="List the pools on this machine: their memory, their depot, and whether it is running. A pool"
        " outlives its depot, so that the next one finds the cache; 'kvdepot pools --remove' gives the memory back.",
    )
    pools.set_defaults(run=_pools)
    pools.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="only these (default: all of /dev/shm, or with --dir that of one depot)",
    )
    pools.add_argument("--remove", action="store_true", help="remove the pools at PATH; a running depot keeps its own")
    pools.add_argument(
        "--stopped",
        action="store_true",
        help="only pools whose depot is not running; --remove without PATH keeps those used in the last"
        f" {_RESTART_SECONDS // 60:.0f} minutes, as their depot may be restarting",
    )


def _pools(options: argparse.Namespace) -> int:
    if options.remove and not (options.paths or options.stopped):
        raise PoolError("--remove needs the PATH of a pool, or --stopped for all that no depot serves")
    found = [look_at(path) for path in options.paths] or find_pools()
    if "directory" in options:
        server = f"the depot of --dir {options.directory.absolute()} "
        found = [pool for pool in found if pool.server.startswith(server)]
    if options.stopped:
        found = [pool for pool in found if not pool.is_served]
    if options.remove:
        if not options.paths:
            found = _without_recent(found, time.time())
        return _remove(found)
    nothing = f"no pools{' without a depot' if options.stopped else ''} in {SHARED_MEMORY}"
    described = "\n".join(describe(pool, time.time()) for pool in found)
    show(options, [_as_dict(pool) for pool in found], lambda: described or nothing)
    return 0


def _without_recent(pools: list[FoundPool], now: float) -> list[FoundPool]:
    """Return the pools that were unused for longer than a restart takes. Print the others."""
    recent = [pool for pool in pools if now - pool.used_at < _RESTART_SECONDS]
    for pool in recent:
        age = _ago(now - pool.used_at)
        print(
            printable(f"kept {pool.directory}: last used {age} ago, so its depot may be restarting; name it to remove")
        )
    return [pool for pool in pools if pool not in recent]


def _remove(pools: list[FoundPool]) -> int:
    freed = failed = 0
    for pool in pools:
        try:
            freed += remove_pool(pool.directory)
        except (PoolError, OSError) as error:
            print(printable(f"kvdepot: {error}"), file=sys.stderr)
            failed += 1
        else:
            print(printable(f"removed {pool.directory}"))
    print(f"{format_size(freed)} freed")
    return 1 if failed else 0


def describe(pool: FoundPool, now: float) -> str:
    """Describe one pool in two lines."""
    try:
        owner = pwd.getpwuid(pool.uid).pw_name
    except KeyError:
        owner = str(pool.uid)
    state = "served by" if pool.is_served else f"stopped, last used {_ago(now - pool.used_at)} ago, by"
    title = f"{pool.directory}: {format_size(pool.allocated_bytes)} of {owner}"
    return f"{printable(title)}\n  {printable(f'{state} {pool.server}')}"


def _ago(seconds: float) -> str:
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= 2 * length), (1, "seconds"))
    return f"{max(seconds, 0) // length:.0f} {unit}"


def _as_dict(pool: FoundPool) -> dict[str, Any]:
    return {
        "path": str(pool.directory),
        "allocated_bytes": pool.allocated_bytes,
        "uid": pool.uid,
        "used_at": pool.used_at,
        "server": pool.server,
        "is_served": pool.is_served,
    }

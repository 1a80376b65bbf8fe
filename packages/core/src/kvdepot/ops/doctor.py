"""`kvdepot doctor`: checks a machine for problems that a depot would have there, and advises how to fix them.

`read_facts` looks at the machine and `diagnose` judges the facts. Nothing is changed and nothing leaves the machine.
"""

import contextlib
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from kvdepot.backends import BackendStatus, list_backends
from kvdepot.client.operator import ask_depot
from kvdepot.config import ServerConfig, counted, format_size
from kvdepot.errors import KVDepotError, printable
from kvdepot.pool.files import ENLARGE_TMPFS
from kvdepot.pool.inventory import find_pools
from kvdepot.pool.size import MEMORY_FILE_SYSTEMS, SHARE_OF_FREE_MEMORY, available_memory_bytes, file_system_of
from kvdepot.processes import reserve_of
from kvdepot.wire import operations as o
from kvdepot.wire.status import DepotStatus

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"  # PCI class of GPUs, with or without a screen


@dataclass(frozen=True, slots=True)
class NumaNodes:
    """The NUMA nodes that decide the speed of copies between GPUs and the pool."""

    gpus: tuple[int, ...] = ()  # one for each GPU whose node is known
    cores: tuple[int, ...] = ()  # nodes whose cores a process started here may use, in order
    policy: str = "default"  # for memory of such a process, as in numa_maps(5): default, interleave:0-1, ...

    def pool(self) -> tuple[int, ...]:
        """Return the nodes that the pool may come from. By default it comes from one of them."""
        return parse_list(self.policy.partition(":")[2]) or self.cores


def read_nodes(root: Path = Path("/")) -> NumaNodes:
    """Return the nodes of this machine; empty if Linux does not report them."""
    gpus: list[int] = []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY):
            with contextlib.suppress(ValueError):
                gpus.append(int(_read(device / "numa_node")))
    cores = os.sched_getaffinity(0)
    near: list[int] = []
    for node in root.glob("sys/devices/system/node/node[0-9]*"):
        if cores & set(parse_list(_read(node / "cpulist"))):
            near.append(int(node.name[4:]))
    maps = _read(root / "proc/self/numa_maps").splitlines()
    policy = maps[0].split()[1] if maps and len(maps[0].split()) > 1 else "default"
    return NumaNodes(tuple(node for node in gpus if node >= 0), tuple(sorted(near)), policy)


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in the kernel's notation: `0-3,8` is 0, 1, 2, 3, 8. The list may be empty."""
    numbers: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


KERNEL_POPULATE: Final = (5, 14)  # MADV_POPULATE_WRITE
LEAST_DESCRIPTORS: Final = 4096  # enough for 350 engines of one worker
DESCRIPTORS_OF_SCHEDULER: Final = 3  # session, pidfd, connection
DESCRIPTORS_OF_WORKER: Final = 7  # session, pidfd, two connections, a temporary one, two for its mover
DESCRIPTORS_OF_DEPOT: Final = 64  # the pool's files and those of tiers
_PACKAGES: Final = (
    "kvdepot", "kvdepot-cpu", "kvdepot-cuda", "kvdepot-hpu", "kvdepot-mooncake", "kvdepot-plan", "kvdepot-vllm",
    "kvdepot-sglang", "vllm", "sglang", "torch", "pyzmq",
)  # fmt: skip


class Verdict(StrEnum):
    """The severity of a finding."""

    FINE = "fine"
    SLOWER = "slower"  # it works, but less well
    BROKEN = "broken"  # it does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check in words, with advice if something should change."""

    verdict: Verdict
    subject: str
    text: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a machine that decide whether a depot works there. Sizes are in bytes, None if unknown."""

    kernel: tuple[int, int]
    pool_path: Path
    pool_file_system: str  # type, as in /proc/mounts
    pool_free_bytes: int
    pool_bytes: int | None  # configured; None: a quarter of the free memory
    available_bytes: int
    cgroup_limit_bytes: int | None
    swap_bytes: int
    locked_memory_bytes: int | None  # None: unlimited
    descriptors: int
    directory: Path
    directory_is_writable: bool
    has_compiler: bool
    depot: DepotStatus | None = None  # of the depot that answers in `directory`
    num_stopped_pools: int = 0  # other pools, whose depots are not running
    stopped_pool_bytes: int = 0
    backends: tuple[BackendStatus, ...] = ()
    packages: dict[str, str] = field(default_factory=dict[str, str])
    nodes: NumaNodes = field(default_factory=NumaNodes)


def read_facts(config: ServerConfig) -> Facts:
    """Return the facts about this machine for a depot with these settings."""
    place = next(place for place in (config.pool_path, *config.pool_path.absolute().parents) if place.exists())
    stat = os.statvfs(place)
    stopped = [pool for pool in find_pools() if not pool.is_served and pool.directory != config.pool_path]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Facts(
        kernel=_kernel(platform.release()),
        pool_path=config.pool_path,
        pool_file_system=file_system_of(place),
        pool_free_bytes=stat.f_bavail * stat.f_frsize,
        pool_bytes=config.pool_size_bytes,
        available_bytes=available_memory_bytes(),
        cgroup_limit_bytes=_cgroup_limit(),
        swap_bytes=_swap_in_use(),
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        directory=config.directory,
        directory_is_writable=_is_writable(config.directory),
        depot=_status(config.directory),
        has_compiler=any(map(shutil.which, ("cc", "gcc", "clang"))),
        num_stopped_pools=len(stopped),
        stopped_pool_bytes=sum(pool.allocated_bytes for pool in stopped),
        backends=tuple(list_backends()),
        packages=_versions(),
        nodes=read_nodes(),
    )


def diagnose(facts: Facts) -> list[Finding]:
    """Return the findings, in the order in which to fix them."""
    return [
        *_judge_pool(facts),
        *_judge_kernel(facts),
        *_judge_limits(facts),
        *_judge_nodes(facts.nodes),
        *_judge_place(facts),
        *_judge_backends(facts),
    ]


def _fine(subject: str, text: str) -> Finding:
    return Finding(Verdict.FINE, subject, text)


def _slower(subject: str, text: str, way_out: str) -> Finding:
    return Finding(Verdict.SLOWER, subject, text, way_out)


def _broken(subject: str, text: str, way_out: str) -> Finding:
    return Finding(Verdict.BROKEN, subject, text, way_out)


def _judge_pool(facts: Facts) -> Iterator[Finding]:
    if facts.pool_file_system not in MEMORY_FILE_SYSTEMS:
        yield _slower(
            "pool",
            f"{facts.pool_path} is on {facts.pool_file_system}: its pages go to disk",
            "set --pool-dir to a folder on tmpfs, for example below /dev/shm",
        )
    limits = {"the free memory": facts.available_bytes, f"the free space of {facts.pool_path}": facts.pool_free_bytes}
    if facts.cgroup_limit_bytes is not None:
        limits["the memory limit of this container or service"] = facts.cgroup_limit_bytes
    what, least = min(limits.items(), key=lambda item: item[1])
    wanted = facts.pool_bytes
    if wanted is None and facts.pool_free_bytes < facts.available_bytes * SHARE_OF_FREE_MEMORY:
        yield _slower(
            "pool",
            f"{facts.pool_path} has room for {format_size(facts.pool_free_bytes)}, less than a quarter of the"
            f" free memory ({format_size(facts.available_bytes)})",
            ENLARGE_TMPFS,
        )
    elif wanted is None:
        yield _fine("pool", f"at most {format_size(least)}, limited by {what}")
    elif wanted > least:
        yield _broken(
            "pool",
            f"--pool-size {format_size(wanted)} is more than {what}, {format_size(least)}",
            f"lower --pool-size; or raise the memory limit and {ENLARGE_TMPFS}",
        )
    else:
        yield _fine("pool", f"{format_size(wanted)} fit: {what} is {format_size(least)}")
    if facts.num_stopped_pools:
        yield Finding(
            Verdict.FINE,
            "other pools",
            f"{format_size(facts.stopped_pool_bytes)} of memory are kept by"
            f" {counted(facts.num_stopped_pools, 'pool')} of depots that stopped",
            "'kvdepot pools --stopped' lists them, 'kvdepot pools --remove PATH' frees one",
        )
    if facts.swap_bytes > 1 << 30:
        yield _slower(
            "swap",
            f"{format_size(facts.swap_bytes)} are swapped out; parts of a pool on tmpfs may be, too",
            "add memory until pool and engines fit, or turn swap off",
        )


def _judge_kernel(facts: Facts) -> Iterator[Finding]:
    name = ".".join(map(str, facts.kernel))
    if facts.kernel < KERNEL_POPULATE:
        text = f"Linux {name} cannot populate a pool's pages in advance: first copies are slow"
        yield _slower("kernel", text, "use Linux 5.14 or newer")
    else:
        yield _fine("kernel", f"Linux {name}")


def _judge_limits(facts: Facts) -> Iterator[Finding]:
    per_engine = DESCRIPTORS_OF_SCHEDULER + DESCRIPTORS_OF_WORKER
    own = DESCRIPTORS_OF_DEPOT + reserve_of(facts.descriptors)
    text = (
        f"the limit is {facts.descriptors}, enough for {max(0, facts.descriptors - own) // per_engine} engines with"
        f" one worker each: an engine takes {per_engine}, each further worker {DESCRIPTORS_OF_WORKER}, the depot {own}"
    )
    if facts.descriptors >= LEAST_DESCRIPTORS:
        yield _fine("descriptors", text)
    else:
        yield _slower("descriptors", text, "set ulimit -Hn 65536, or LimitNOFILE=65536 in a systemd unit")
    is_cuda = any(backend.name == "cuda" and not backend.why_unavailable for backend in facts.backends)
    if facts.locked_memory_bytes is not None and is_cuda:
        yield _slower(
            "locked memory",
            f"workers on CUDA may lock {format_size(facts.locked_memory_bytes)}",
            "set ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 in Docker",
        )


def _judge_nodes(nodes: NumaNodes) -> Iterator[Finding]:
    """Compare the NUMA nodes of the GPUs with those of the pool of a depot that is started like this command."""
    gpus, pool = sorted(set(nodes.gpus)), nodes.pool()
    if not gpus or not pool or (len(pool) == 1 and gpus == list(pool)):
        if gpus and pool:
            yield _fine("numa", f"the GPUs and the pool are on node {gpus[0]}")
        return
    of_gpus, of_pool = (" and ".join(map(str, numbers)) for numbers in (gpus, pool))
    if set(gpus) <= set(pool) and nodes.policy.startswith(("interleave", "weighted")):
        yield _fine("numa", f"GPUs on node {of_gpus}, the pool is spread over nodes {of_pool}")
    elif len(gpus) == 1:
        yield _slower(
            "numa",
            f"the GPUs are on node {of_gpus}, and the pool comes from node {of_pool.replace('and', 'or')}",
            f"start the depot beside them: numactl --cpunodebind={gpus[0]} --preferred={gpus[0]} kvdepot serve",
        )
    else:
        yield _slower(
            "numa",
            f"GPUs are on nodes {of_gpus}, and the pool comes from node {of_pool.replace('and', 'or')} alone",
            f"spread the pool over their nodes: numactl --interleave={','.join(map(str, gpus))} kvdepot serve",
        )


def _judge_place(facts: Facts) -> Iterator[Finding]:
    if not facts.directory_is_writable:
        yield _broken(
            "sockets",
            f"no files can be made in {facts.directory}",
            "choose another folder with --dir, or change the owner of this one",
        )
    depot = facts.depot
    if depot is None:
        yield _fine("depot", f"no depot answers in {facts.directory}")
        return
    yield _fine("depot", f"kvdepot {depot.server_version}, process {depot.pid}")
    for engine, text in sorted((each.instance, each.blend) for each in depot.contexts if each.blend):
        if text.startswith("blend is off"):
            yield _slower(
                f"engine {printable(engine)}",
                printable(text),
                "remove kvdepot.blend from its settings, or see docs/blend.md, Limits; it serves all requests exactly",
            )
        else:
            yield _fine(f"engine {printable(engine)}", printable(text))


def _judge_backends(facts: Facts) -> Iterator[Finding]:
    for backend in facts.backends:
        subject = f"backend {backend.name}"
        if not backend.distribution:
            continue
        if backend.why_unavailable is not None:
            yield _fine(subject, f"not usable here: {backend.why_unavailable}")
        elif backend.name == "cpu" and "compiled_copy" not in backend.capabilities:
            yield _slower(
                subject,
                f"{backend.distribution} has no compiled copy",
                "pip install --force-reinstall --no-cache-dir --no-deps kvdepot-cpu"
                + ("" if facts.has_compiler else ", after installing a C compiler"),
            )
        else:
            yield _fine(subject, f"{backend.distribution} works")
    if not any(backend.distribution and backend.why_unavailable is None for backend in facts.backends):
        yield _broken("backends", "no accelerator can attach from here", "pip install 'kvdepot[cpu]'")
    yield _fine("versions", ", ".join(f"{name} {number}" for name, number in facts.packages.items()))
    ours = {number for name, number in facts.packages.items() if name.startswith("kvdepot")}
    if len(ours) > 1:
        yield _broken(
            "versions",
            f"kvdepot packages have different versions: {', '.join(sorted(ours))}",
            "install the same version of each",
        )


# --- reading --------------------------------------------------------------------------------------------------------


def _kernel(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _cgroup_limit() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].rpartition(":")[2].lstrip("/")
        limits: list[int] = []
        folder = Path("/sys/fs/cgroup") / own
        while folder != Path("/sys/fs"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / "memory.max").read_text()))
            folder = folder.parent
        return min(limits, default=None)
    return None


def _swap_in_use() -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return (int(fields["SwapTotal"].split()[0]) - int(fields["SwapFree"].split()[0])) * 1024
    return 0


def _is_writable(directory: Path) -> bool:
    place = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    try:
        # As root, every cheaper check passes, even in /proc.
        Path(tempfile.mkdtemp(prefix=".kvdepot-", dir=place)).rmdir()
    except OSError:
        return False
    return True


def _status(directory: Path) -> DepotStatus | None:
    with contextlib.suppress(KVDepotError):
        return ask_depot(o.Status(), str(directory), 1.0).status
    return None


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found

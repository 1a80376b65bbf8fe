"""`kvdepot doctor`: checks a machine for problems that a depot would have there, and advises how to fix them.

`read_facts` looks at the machine and `diagnose` judges the facts. Nothing is changed and nothing leaves the machine.
"""

import contextlib
import os
import platform
import re
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from kvdepot.backends import BackendStatus, list_backends
from kvdepot.client.operator import ask_depot
from kvdepot.config import ServerConfig, format_size
from kvdepot.errors import KVDepotError
from kvdepot.installing import install_line
from kvdepot.operate import operations as o
from kvdepot.pool.files import ENLARGE_TMPFS
from kvdepot.pool.inventory import name_others
from kvdepot.pool.size import MEMORY_FILE_SYSTEMS, SHARE_OF_FREE_MEMORY, available_memory_bytes, file_system_of
from kvdepot.processes import reserve_of
from kvdepot.wire.status import DepotStatus

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"  # PCI class of GPUs, with or without a screen
KERNEL_POPULATE: Final = (5, 14)  # MADV_POPULATE_WRITE
LEAST_DESCRIPTORS: Final = 4096  # enough for 350 engines of one worker
DESCRIPTORS_OF_SCHEDULER: Final = 3  # session, pidfd, connection
DESCRIPTORS_OF_WORKER: Final = 7  # session, pidfd, two connections, a temporary one, two for its mover
DESCRIPTORS_OF_DEPOT: Final = 64  # files of the pool and of tiers
_OTHER_PACKAGES: Final = frozenset({"vllm", "sglang", "torch", "pyzmq"})


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
    devices = sorted(root.glob("sys/bus/pci/devices/*"))
    gpus = [
        each for each in devices if _read(each / "vendor") == _NVIDIA and _read(each / "class").startswith(_DISPLAY)
    ]
    of_gpus = [_read(gpu / "numa_node") for gpu in gpus]
    cores, nodes = os.sched_getaffinity(0), root.glob("sys/devices/system/node/node[0-9]*")
    near = sorted(int(node.name[4:]) for node in nodes if cores & set(parse_list(_read(node / "cpulist"))))
    policy = [*_read(root / "proc/self/numa_maps").split()[:2], "default", "default"][1]
    return NumaNodes(tuple(int(node) for node in of_gpus if node.isdigit()), tuple(near), policy)  # "-1" is unknown


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in the kernel's notation: `0-3,8` is 0, 1, 2, 3, 8. The list may be empty."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return tuple(number for first, last in ranges for number in range(int(first), int(last or first) + 1))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


class Verdict(StrEnum):
    """The severity of a finding."""

    FINE = "fine"
    SLOWER = "slower"  # it works, but less well
    BROKEN = "broken"  # it does not work


FINE, SLOWER, BROKEN = Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check in words, with advice if something should change."""

    verdict: Verdict
    subject: str
    text: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a machine that decide whether a depot works there. Sizes are in bytes."""

    config: ServerConfig
    kernel: tuple[int, int]
    pool_file_system: str  # type, as in /proc/mounts
    pool_free_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None  # None: no limit
    locked_memory_bytes: int  # resource.RLIM_INFINITY: unlimited
    descriptors: int
    directory_is_writable: bool
    depot: DepotStatus | None = None  # of the depot that answers in the directory
    other_depots: str = ""  # as `name_others` names them
    backends: tuple[BackendStatus, ...] = ()
    packages: dict[str, str] = field(default_factory=dict[str, str])
    nodes: NumaNodes = field(default_factory=NumaNodes)


def read_facts(config: ServerConfig) -> Facts:
    """Return the facts about this machine for a depot with these settings."""
    place = _existing(config.pool_path)
    stat = os.statvfs(place)
    major, minor = re.findall(r"\d+", platform.release() + " 0 0")[:2]
    depot = None
    with contextlib.suppress(KVDepotError):
        depot = ask_depot(o.Status(), str(config.directory), 1.0).status
    ours = [each for each in distributions() if each.name.startswith("kvdepot") or each.name in _OTHER_PACKAGES]
    return Facts(
        config=config,
        kernel=(int(major), int(minor)),
        pool_file_system=file_system_of(place),
        pool_free_bytes=stat.f_bavail * stat.f_frsize,
        available_bytes=available_memory_bytes(),
        cgroup_limit_bytes=_cgroup_limit(),
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        directory_is_writable=_is_writable(config.directory),
        depot=depot,
        other_depots=name_others(config.directory),
        backends=tuple(list_backends()),
        packages={each.name: each.version for each in sorted(ours, key=lambda each: each.name)},
        nodes=read_nodes(),
    )


def diagnose(facts: Facts) -> list[Finding]:
    """Return the findings, in the order in which to fix them."""
    judges = (_judge_pool, _judge_machine, _judge_nodes, _judge_place, _judge_backends)
    return [finding for judge in judges for finding in judge(facts)]


def _judge_pool(facts: Facts) -> Iterator[Finding]:
    path, wanted, free = facts.config.pool_path, facts.config.pool_size_bytes, format_size(facts.pool_free_bytes)
    if facts.pool_file_system not in MEMORY_FILE_SYSTEMS:
        text = f"{path} is on {facts.pool_file_system}: its pages go to disk"
        yield Finding(SLOWER, "pool", text, "set --pool-dir to a folder on tmpfs, for example below /dev/shm")
    limits = {"the free memory": facts.available_bytes, f"the free space of {path}": facts.pool_free_bytes}
    if facts.cgroup_limit_bytes is not None:
        limits["the memory limit of this container or service"] = facts.cgroup_limit_bytes
    limit, least = min(limits.items(), key=lambda item: item[1])
    if wanted is None and facts.pool_free_bytes < facts.available_bytes * SHARE_OF_FREE_MEMORY:
        memory = format_size(facts.available_bytes)
        text = f"{path} has room for {free}, less than a quarter of the free memory ({memory})"
        yield Finding(SLOWER, "pool", text, ENLARGE_TMPFS)
    elif wanted is None:
        yield Finding(FINE, "pool", f"at most {format_size(least)}, limited by {limit}")
    elif wanted > least:
        text = f"--pool-size {format_size(wanted)} is more than {limit}, {format_size(least)}"
        yield Finding(BROKEN, "pool", text, f"lower --pool-size; or raise the memory limit and {ENLARGE_TMPFS}")
    else:
        yield Finding(FINE, "pool", f"{format_size(wanted)} fit: {limit} is {format_size(least)}")


def _judge_machine(facts: Facts) -> Iterator[Finding]:
    kernel = "Linux " + ".".join(map(str, facts.kernel))
    if facts.kernel < KERNEL_POPULATE:
        kernel += " cannot populate a pool's pages in advance: first copies are slow"
        yield Finding(SLOWER, "kernel", kernel, "use Linux 5.14 or newer")
    else:
        yield Finding(FINE, "kernel", kernel)
    per_engine = DESCRIPTORS_OF_SCHEDULER + DESCRIPTORS_OF_WORKER
    own = DESCRIPTORS_OF_DEPOT + reserve_of(facts.descriptors)
    text = (
        f"the limit is {facts.descriptors}, enough for {max(0, facts.descriptors - own) // per_engine} engines with"
        f" one worker each: an engine takes {per_engine}, each further worker {DESCRIPTORS_OF_WORKER}, the depot {own}"
    )
    is_enough = facts.descriptors >= LEAST_DESCRIPTORS
    way_out = "" if is_enough else "set ulimit -Hn 65536, or LimitNOFILE=65536 in a systemd unit"
    yield Finding(FINE if is_enough else SLOWER, "descriptors", text, way_out)
    is_cuda = any(backend.name == "cuda" and not backend.why_unavailable for backend in facts.backends)
    if is_cuda and facts.locked_memory_bytes != resource.RLIM_INFINITY:
        text = f"workers on CUDA may lock {format_size(facts.locked_memory_bytes)}"
        way_out = "set ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 in Docker"
        yield Finding(SLOWER, "locked memory", text, way_out)


def _judge_nodes(facts: Facts) -> Iterator[Finding]:
    """Compare the NUMA nodes of the GPUs with the pool's, for a depot that is started like this command."""
    gpus, pool = sorted(set(facts.nodes.gpus)), facts.nodes.pool()
    if not gpus or not pool:
        return
    is_spread = facts.nodes.policy.startswith(("interleave", "weighted"))
    of_gpus, of_pool = " and ".join(map(str, gpus)), (" and " if is_spread else " or ").join(map(str, pool))
    text = f"the GPUs are on node {of_gpus}, and the pool comes from node {of_pool}"
    if (len(gpus) == 1 and gpus == list(pool)) or (is_spread and set(gpus) <= set(pool)):
        yield Finding(FINE, "numa", text)
        return
    nodes = ",".join(map(str, gpus))
    options = f"--interleave={nodes}" if len(gpus) > 1 else f"--cpunodebind={nodes} --preferred={nodes}"
    yield Finding(SLOWER, "numa", text, f"start the depot beside them: numactl {options} kvdepot serve")


def _judge_place(facts: Facts) -> Iterator[Finding]:
    folder = facts.config.directory
    if not facts.directory_is_writable:
        way_out = "choose another folder with --dir, or change the owner of this one"
        yield Finding(BROKEN, "sockets", f"no files can be made in {folder}", way_out)
    depot = facts.depot
    text = f"kvdepot {depot.server_version}, process {depot.pid}" if depot else f"no depot answers in {folder}"
    way_out = "engines and commands find a depot elsewhere if you name its --dir" if facts.other_depots else ""
    yield Finding(FINE, "depot", text + facts.other_depots, way_out)


def _judge_backends(facts: Facts) -> Iterator[Finding]:
    installed = [backend for backend in facts.backends if backend.distribution]
    for backend in installed:
        subject = f"backend {backend.name}"
        why = backend.why_unavailable
        if backend.name == "cpu" and why is None and "compiled_copy" not in backend.capabilities:
            way_out = f"install a C compiler, then {install_line('cpu')} --force-reinstall --no-cache-dir --no-deps"
            yield Finding(SLOWER, subject, f"{backend.distribution} has no compiled copy", way_out)
        else:
            yield Finding(FINE, subject, f"not usable here: {why}" if why else f"{backend.distribution} works")
    if all(backend.why_unavailable is not None for backend in installed):
        yield Finding(BROKEN, "backends", "no accelerator can attach from here", install_line("cpu"))
    yield Finding(FINE, "versions", ", ".join(map(" ".join, facts.packages.items())))
    ours = {number for name, number in facts.packages.items() if name.startswith("kvdepot")}
    if len(ours) > 1:
        text = f"kvdepot packages have different versions: {', '.join(sorted(ours))}"
        yield Finding(BROKEN, "versions", text, "install the same version of each")


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _cgroup_limit() -> int | None:
    own = Path("/sys/fs/cgroup" + _read(Path("/proc/self/cgroup")).rpartition(":")[2])
    limits = [_read(folder / "memory.max") for folder in (own, *own.parents)]
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def _is_writable(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        # As root, every cheaper check passes, even in /proc.
        Path(tempfile.mkdtemp(prefix=".kvdepot-", dir=_existing(directory))).rmdir()
        return True
    return False

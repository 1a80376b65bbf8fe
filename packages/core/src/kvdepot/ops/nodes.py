"""Reads the NUMA nodes of a machine's GPUs, and the nodes that a depot started here takes its pool from.

It reads sysfs and procfs and needs no GPU driver.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"  # PCI class of GPUs, with or without a screen


@dataclass(frozen=True, slots=True)
class Nodes:
    """The NUMA nodes that decide the speed of copies between GPUs and the pool."""

    gpus: tuple[int, ...] = ()  # one for each GPU whose node is known
    cores: tuple[int, ...] = ()  # nodes whose cores a process started here may use, in order
    policy: str = "default"  # for memory of such a process, as in numa_maps(5): default, interleave:0-1, ...

    def pool(self) -> tuple[int, ...]:
        """Return the nodes that the pool may come from. By default it comes from one of them."""
        return parse_list(self.policy.partition(":")[2]) or self.cores


def read_nodes(root: Path = Path("/")) -> Nodes:
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
    return Nodes(tuple(node for node in gpus if node >= 0), tuple(sorted(near)), policy)


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

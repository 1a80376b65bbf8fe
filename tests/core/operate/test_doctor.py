"""The doctor finds problems and says what to do about them. On a sound machine it reports none."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from kvdepot.backends import BackendStatus
from kvdepot.config import ServerConfig
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate.doctor import DESCRIPTORS_OF_SCHEDULER, Facts, NumaNodes, Verdict, diagnose, read_facts, read_nodes
from kvdepot.wire import messages as m
from support.peer import SPEC, Peer, prompt

GIB = 1 << 30
CPU = BackendStatus("cpu", "kvdepot-cpu 0.1.0", "cpu", ("compiled_copy",), None)
CONFIG = ServerConfig(directory=Path("/run/kvdepot"), pool_directory=Path("/dev/shm/kvdepot"), pool_size_bytes=32 * GIB)
SOUND = Facts(
    config=CONFIG,
    kernel=(6, 8),
    pool_file_system="tmpfs",
    pool_free_bytes=64 * GIB,
    available_bytes=100 * GIB,
    cgroup_limit_bytes=None,
    locked_memory_bytes=resource.RLIM_INFINITY,
    descriptors=65536,
    directory_is_writable=True,
    backends=(CPU,),
    packages={"kvdepot": "0.1.0"},
)


def troubles(facts: Facts) -> dict[str, str]:
    found = [finding for finding in diagnose(facts) if finding.verdict is not Verdict.FINE]
    assert all(finding.way_out for finding in found), "each trouble has a way out"
    return {finding.subject: f"{finding.verdict}: {finding.text}" for finding in found}


def test_a_sound_machine_has_no_troubles() -> None:
    assert troubles(SOUND) == {}


@pytest.mark.parametrize(
    ("change", "subject", "words"),
    [
        ({"pool_file_system": "ext4"}, "pool", "slower: /dev/shm/kvdepot is on ext4"),
        (
            {"config": replace(CONFIG, pool_size_bytes=None), "pool_free_bytes": 64 << 20},
            "pool",
            "slower: /dev/shm/kvdepot has room for 64.0 MiB, less than a quarter of the free memory (100.0 GiB)",
        ),
        ({"pool_free_bytes": 16 * GIB}, "pool", "broken: --pool-size 32.0 GiB is more than the free space"),
        ({"available_bytes": 16 * GIB}, "pool", "broken: --pool-size 32.0 GiB is more than the free memory"),
        ({"cgroup_limit_bytes": 8 * GIB}, "pool", "broken: --pool-size 32.0 GiB is more than the memory limit"),
        ({"kernel": (5, 4)}, "kernel", "slower: Linux 5.4 cannot populate"),
        ({"descriptors": 1024}, "descriptors", "slower: the limit is 1024"),
        ({"directory_is_writable": False}, "sockets", "broken: no files can be made in /run/kvdepot"),
        ({"backends": ()}, "backends", "broken: no accelerator can attach"),
        ({"backends": (replace(CPU, capabilities=()),)}, "backend cpu", "slower: kvdepot-cpu 0.1.0 has no compiled"),
        ({"packages": {"kvdepot": "0.1.0", "kvdepot-cpu": "0.2.0"}}, "versions", "broken: kvdepot packages have"),
    ],
)
def test_each_trouble_is_named(change: dict[str, object], subject: str, words: str) -> None:
    found = troubles(replace(SOUND, **change))  # type: ignore[arg-type]
    assert list(found) == [subject]
    assert found[subject].startswith(words)


def test_limits_of_locked_memory_matter_on_cuda_alone() -> None:
    cuda = replace(CPU, name="cuda", distribution="kvdepot-cuda 0.1.0")
    limited = replace(SOUND, locked_memory_bytes=8 << 20)
    assert troubles(limited) == {}
    assert troubles(replace(limited, backends=(CPU, cuda))) == {
        "locked memory": "slower: workers on CUDA may lock 8.0 MiB"
    }


@pytest.mark.parametrize(
    ("nodes", "words", "way_out"),
    [
        (NumaNodes((1, 1), (0, 1)), "the GPUs are on node 1, and the pool comes from node 0 or 1", "--cpunodebind=1"),
        (NumaNodes((1,), (0,)), "the GPUs are on node 1, and the pool comes from node 0", "--cpunodebind=1"),
        (
            NumaNodes((0, 1), (0, 1)),
            "the GPUs are on node 0 and 1, and the pool comes from node 0 or 1",
            "--interleave=0,1",
        ),
        (
            NumaNodes((0, 1), (0,), "bind:0"),
            "the GPUs are on node 0 and 1, and the pool comes from node 0",
            "--interleave=0,1",
        ),
        (
            NumaNodes((0, 1), (0, 1), "interleave:0-1"),
            "the GPUs are on node 0 and 1, and the pool comes from node 0 and 1",
            "",
        ),
        (NumaNodes((1,), (0, 1), "prefer:1"), "the GPUs are on node 1, and the pool comes from node 1", ""),
        (NumaNodes((0,), (0,)), "the GPUs are on node 0, and the pool comes from node 0", ""),
        (NumaNodes((), (0, 1)), "", ""),
    ],
)
def test_a_pool_away_from_its_gpus_is_named(nodes: NumaNodes, words: str, way_out: str) -> None:
    found = [finding for finding in diagnose(replace(SOUND, nodes=nodes)) if finding.subject == "numa"]
    assert [finding.text.startswith(words) for finding in found] == [True] * bool(words)
    assert [way_out in finding.way_out for finding in found] == [True] * bool(words)
    assert [finding.verdict is Verdict.SLOWER for finding in found] == [bool(way_out)] * bool(words)


def test_nodes_are_read_from_linux(tmp_path: Path) -> None:
    """Only the nodes of GPUs, and of cores that this process may use, count."""
    core = min(os.sched_getaffinity(0))
    files = {
        "sys/bus/pci/devices/0000:17:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:17:00.0/class": "0x030200",
        "sys/bus/pci/devices/0000:17:00.0/numa_node": "1",
        "sys/bus/pci/devices/0000:18:00.0/vendor": "0x8086",
        "sys/bus/pci/devices/0000:18:00.0/class": "0x030000",
        "sys/bus/pci/devices/0000:18:00.0/numa_node": "0",
        "sys/bus/pci/devices/0000:19:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:19:00.0/class": "0x030000",
        "sys/bus/pci/devices/0000:19:00.0/numa_node": "-1",
        "sys/devices/system/node/node0/cpulist": "4000-4003",
        "sys/devices/system/node/node2/cpulist": f"{core},5000",
        "proc/self/numa_maps": "556a4af6a000 interleave:0,2 file=/usr/bin/kvdepot mapped=2 N0=2",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert read_nodes(tmp_path) == NumaNodes((1,), (2,), "interleave:0,2")
    assert read_nodes(tmp_path).pool() == (0, 2)


def test_it_says_how_many_engines_the_descriptors_are_enough_for(depot: DepotProcess) -> None:
    (text,) = [
        finding.text for finding in diagnose(replace(SOUND, descriptors=4096)) if finding.subject == "descriptors"
    ]
    assert text.startswith("the limit is 4096, enough for 377 engines with one worker each: an engine takes 10")
    before = len(os.listdir(f"/proc/{depot.pid}/fd"))
    scheduler = Peer(depot, m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", SPEC))
    wait_until(lambda: len(os.listdir(f"/proc/{depot.pid}/fd")) <= before + 2)  # registration's connection is closed
    scheduler.find(prompt(1))
    assert len(os.listdir(f"/proc/{depot.pid}/fd")) <= before + DESCRIPTORS_OF_SCHEDULER
    scheduler.close()


def test_this_machine_is_looked_at(depot: DepotProcess) -> None:
    facts = read_facts(ServerConfig(directory=depot.directory, pool_directory=depot.pool_directory))
    assert facts.kernel > (3, 0)
    assert facts.pool_file_system == "tmpfs"
    assert facts.pool_free_bytes > 0
    assert facts.depot is not None
    assert facts.depot.pid == depot.pid
    assert facts.directory_is_writable
    assert facts.packages["kvdepot"]
    assert {"pool", "kernel", "depot", "versions"} <= {finding.subject for finding in diagnose(facts)}

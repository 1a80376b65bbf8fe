"""The doctor finds what stands in the way, says what to do, and leaves a sound machine alone."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvdepot.backends import BackendStatus
from kvdepot.config import ServerConfig
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.ops.doctor import DESCRIPTORS_OF_SCHEDULER, Facts, Verdict, diagnose, read_facts
from kvdepot.wire import messages as m
from support.peer import SPEC, Peer, prompt

GIB = 1 << 30
CPU = BackendStatus("cpu", "kvdepot-cpu 0.1.0", "cpu", ("compiled_copy",), None)
SOUND = Facts(
    kernel=(6, 8), pool_path=Path("/dev/shm/kvdepot"), pool_file_system="tmpfs", pool_free_bytes=64 * GIB,
    pool_bytes=32 * GIB, available_bytes=100 * GIB, cgroup_limit_bytes=None, swap_bytes=0, shared_huge_pages="never",
    locked_memory_bytes=None, descriptors=65536, is_container=False, cores=32, directory=Path("/run/kvdepot"),
    directory_is_writable=True, depot="", has_compiler=True, backends=(CPU,), packages={"kvdepot": "0.1.0"},
)  # fmt: skip


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
        ({"pool_free_bytes": 16 * GIB}, "pool", "broken: --pool-size 32.0 GiB is more than the free space"),
        ({"available_bytes": 16 * GIB}, "pool", "broken: --pool-size 32.0 GiB is more than the free memory"),
        ({"cgroup_limit_bytes": 8 * GIB}, "pool", "broken: --pool-size 32.0 GiB is more than the memory limit"),
        ({"swap_bytes": 4 * GIB}, "swap", "slower: 4.0 GiB are swapped out"),
        ({"kernel": (5, 4)}, "kernel", "slower: Linux 5.4 cannot populate"),
        ({"descriptors": 1024}, "descriptors", "slower: the limit is 1024"),
        ({"directory_is_writable": False}, "sockets", "broken: /run/kvdepot is not writable"),
        ({"backends": ()}, "backends", "broken: no accelerator can attach"),
        ({"backends": (replace(CPU, capabilities=()),)}, "backend cpu", "slower: kvdepot-cpu 0.1.0 has no compiled"),
        ({"packages": {"kvdepot": "0.1.0", "kvdepot-cpu": "0.2.0"}}, "versions", "broken: kvdepot packages have"),
    ],
)
def test_each_trouble_is_named(change: dict[str, object], subject: str, words: str) -> None:
    found = troubles(replace(SOUND, **change))  # type: ignore[arg-type]
    assert list(found) == [subject]
    assert found[subject].startswith(words)


def test_it_says_how_many_engines_the_descriptors_are_enough_for(depot: DepotProcess) -> None:
    (text,) = [
        finding.text for finding in diagnose(replace(SOUND, descriptors=4096)) if finding.subject == "descriptors"
    ]
    assert text.startswith("the limit is 4096, enough for 377 engines with one worker each: an engine takes 10")
    before = len(os.listdir(f"/proc/{depot.pid}/fd"))
    scheduler = Peer(depot, m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", SPEC))
    wait_until(lambda: len(os.listdir(f"/proc/{depot.pid}/fd")) <= before + 2)  # that which registered is closed
    scheduler.find(prompt(1))
    assert len(os.listdir(f"/proc/{depot.pid}/fd")) <= before + DESCRIPTORS_OF_SCHEDULER
    scheduler.close()


def test_this_machine_is_looked_at(depot: DepotProcess) -> None:
    facts = read_facts(ServerConfig(directory=depot.directory, pool_directory=depot.pool_directory))
    assert facts.kernel > (3, 0)
    assert facts.pool_file_system == "tmpfs"
    assert facts.pool_free_bytes > 0
    assert f"process {depot.pid}" in facts.depot
    assert facts.directory_is_writable
    assert facts.packages["kvdepot"]
    assert {"pool", "kernel", "depot", "versions"} <= {finding.subject for finding in diagnose(facts)}

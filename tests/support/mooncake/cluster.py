"""A real Mooncake cluster on loopback: a master and nodes, each in its own process."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from kvdepot.lab.processes import wait_until
from support.tools import tool_is_missing

NODE: Final = Path(__file__).with_name("node.py")


def need_sdk() -> None:
    """Skip the test if Mooncake's SDK is not installed. In CI, an SDK that does not load fails the test."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs Mooncake's SDK: uv sync --group mooncake")
    if _why_it_does_not_load():
        tool_is_missing(f"{_why_it_does_not_load()} (Debian: libibverbs1 libnuma1 libcurl4)")


@cache
def _why_it_does_not_load() -> str:
    """Return why the SDK cannot be imported, "" if it can. Another process tries it."""
    done = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2]


def program(name: str) -> str:
    """Return the path of a program that comes with the SDK."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / name)


class Master:
    """A real master on loopback that can be killed and started again at the same address."""

    def __init__(self) -> None:
        for _ in range(10):  # another process may take the free port in the meantime: then the master ends
            with socket.socket() as one, socket.socket() as two:
                one.bind(("127.0.0.1", 0))
                two.bind(("127.0.0.1", 0))
                self.port, self._metrics_port = one.getsockname()[1], two.getsockname()[1]
            if self.start():
                return
        raise AssertionError("no master after ten attempts")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> bool:
        command = [
            program("mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--rpc_thread_num=2",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            "--client_ttl=2",
            "--minloglevel=2",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: self._process.poll() is not None or (self._answers() and self._listens()), what="a master")
        return self._process.poll() is None

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.5).close()
        except OSError:
            return False
        return True

    def _listens(self) -> bool:
        """Return whether this master, not another process, listens on the port."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A" and line[1].endswith(f":{self.port:04X}")}
        for path in Path(f"/proc/{self._process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile, after another connection was answered
                if os.readlink(path) in inodes:
                    return True
        return False

    def has_room(self) -> bool:
        """Return whether any node provides memory."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return any(line.startswith("master_total_capacity_bytes ") and float(line.split()[1]) > 0 for line in lines)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Client:
    """Mooncake's own client, which provides memory that belongs to no depot."""

    def __init__(self, master: Master, segment_bytes: int) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self._process = subprocess.Popen(
            [
                program("mooncake_client"),
                f"--master_server_address={master.address}",
                f"--global_segment_size={segment_bytes}",
                "--host=127.0.0.1",
                f"--port={port}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: self._process.poll() is not None or master.has_room(), what="room in the cluster")
        assert self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Node:
    """Another node of the cluster."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(NODE), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.child_pid: int = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

"""A tier that cannot work is told at the start of the depot, once and with the reason."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from kvdepot.lab.processes import wait_until
from support.commands import KVDEPOT, run_kvdepot
from support.tiers.servers import listening


def refuse(connection: socket.socket) -> None:
    """Answer one request as an object store, or the metadata service of a machine, that grants nothing."""
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "credentials", "reason"),
    [
        ("valkey://127.0.0.1:{closed}", {}, "Connection refused"),
        ("s3://bucket/?endpoint=http://127.0.0.1:{refusing}", {}, "/latest/api/token"),  # asks for those of the machine
        (
            "s3://bucket/?endpoint=http://127.0.0.1:{refusing}",
            {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "wrong"},
            "403 Forbidden",
        ),
    ],
    ids=["closed port", "no credentials", "wrong credentials"],
)
def test_a_tier_that_cannot_work_is_told_at_the_start_in_one_line(
    tmp_path: Path, tier: str, credentials: dict[str, str], reason: str
) -> None:
    folder, log = str(tmp_path / "d"), tmp_path / "log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with socket.socket() as closed, listening(refuse) as refusing, log.open("w") as written:
        closed.bind(("127.0.0.1", 0))  # no socket listens on the port
        machine = {"AWS_METADATA_ENDPOINT": f"http://127.0.0.1:{refusing}", "NO_PROXY": "127.0.0.1"}
        address = tier.format(closed=closed.getsockname()[1], refusing=refusing)
        command = [*KVDEPOT, "serve", "--ephemeral", "--dir", folder, "--pool-size", "4MiB", "--tier", address]
        with subprocess.Popen(command, stderr=written, env={**inherited, **machine, **credentials}) as process:
            try:
                wait_until(lambda: "serving" in log.read_text())
                wait_until(lambda: "SUSPENDED" in run_kvdepot("status", "--url", folder).stdout)
            finally:
                process.terminate()
    (line,) = [line for line in log.read_text().splitlines() if f"tier {address.partition('?')[0]}" in line]
    assert ("WARNING" in line, "is suspended" in line, reason in line) == (True, True, True), line

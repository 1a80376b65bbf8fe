"""The options of a Mooncake tier's URL, and the connection test to its master."""

import re
import socket
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from kvdepot.config import parse_size
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.tiers.url import TierUrl
from kvdepot_mooncake import messages as m

DEFAULT_PORT: Final = 50051  # of Mooncake's master
_LOOK_SECONDS: Final = 0.5  # limit to reach the master by TCP


class MooncakeUnavailable(KVDepotError):
    """The cluster, its master or the child process does not answer."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """The parsed URL."""

    masters: tuple[tuple[str, int], ...]  # or the hosts of etcd, which knows the present master
    setup: m.Join  # for the child, without the size of the pool
    timeout_seconds: float  # a longer call makes the depot kill the child
    start_seconds: float
    num_threads: int  # concurrent calls, in addition to probes

    def setup_for(self, pool_bytes: int, reached_from: str) -> m.Join:
        """Return the setup message for the child. `reached_from` is this node's address as the master sees it."""
        local = self.setup.local or (f"[{reached_from}]" if ":" in reached_from else reached_from)
        return structs.replace(self.setup, pool_bytes=pool_bytes, local=local)

    def look_for_master(self) -> str:
        """Connect to the master. Return this node's address on that connection.

        Raises:
            MooncakeUnavailable: the master cannot be reached.
        """
        errors: list[str] = []
        for address in self.masters:
            try:
                with socket.create_connection(address, _LOOK_SECONDS) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                errors.append(f"{address[0]}:{address[1]}: {error}")
        raise MooncakeUnavailable(f"no master at {', '.join(errors)}")


def parse_options(url: TierUrl) -> MooncakeOptions:
    """Take the Mooncake options out of a URL.

    Raises:
        ConfigError: an option is invalid.
    """
    ha, prefix = url.take("ha", ""), url.take("prefix", "kvdepot")
    if ha not in ("", "etcd"):
        raise ConfigError(f"--tier {url.name}: ha={ha}: only etcd, or leave it out")
    if not re.fullmatch("[A-Za-z0-9_]{1,64}", prefix):
        raise ConfigError(f"--tier {url.name}: prefix={prefix}: letters, digits and _, 64 at most")
    hosts = url.location.partition("://")[2].partition("/")[0].split(",")
    if len(hosts) > 1 and not ha:
        raise ConfigError(f"--tier {url.name}: several hosts are those of etcd: add ha=etcd")
    default_port = 2379 if ha else DEFAULT_PORT
    masters = tuple(_host_and_port(host, default_port, url) for host in hosts)
    master = ";".join(f"{host}:{port}" for host, port in masters)
    setup = m.Join(
        pool_bytes=0,
        prefix=prefix,
        local=url.take("local", ""),
        metadata=url.take("metadata", "P2PHANDSHAKE"),
        segment_bytes=url.take_size("segment", parse_size("4GiB")),
        buffer_bytes=url.take_size("buffer", parse_size("16MiB")),
        protocol=url.take("protocol", "tcp"),
        device=url.take("device", ""),
        master=f"{ha}://{master}" if ha else master,
        replicas=int(url.take_number("replicas", 1, 1)),
    )
    return MooncakeOptions(
        masters,
        setup,
        timeout_seconds=url.take_number("timeout", 10.0, 0.1),
        start_seconds=url.take_number("start", 60.0, 0.1),
        num_threads=url.num_threads,
    )


def _host_and_port(text: str, default_port: int, url: TierUrl) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?", text)
    if match is None:
        raise ConfigError(f"--tier {url.name}: write mooncake://HOST:PORT, the master's")
    return match[1].strip("[]"), int(match[2] or default_port)

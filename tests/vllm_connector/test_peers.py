"""Prefixes from the depot of another node, which a request names: the same tokens without a shared tier."""

import secrets
import socket
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, MakeModel, cached, connector, generate_until_stored, prompts, tokens

PROMPTS = prompts(2, 1500)
NUM_CHUNKS = 2 * (1500 // 128)  # blocks of vLLM on CPU have 128 tokens


@pytest.mark.parametrize("name", ["gqa", "windows"])
def test_an_engine_reads_what_the_engine_of_another_depot_computed(name: str, model: MakeModel, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(16))
    with (
        DepotProcess("--peers", address, "--peer-token", str(token), pool_size="512MiB") as one,
        DepotProcess("--peer-hints", address, "--peer-token", str(token), pool_size="512MiB") as two,
        Engine(model(name), connector(one.url), reference=PROMPTS, max_tokens=4) as first,
        Engine(model(name), connector(two.url), max_tokens=4) as second,
    ):
        assert tokens(generate_until_stored(first, PROMPTS, one, NUM_CHUNKS)[0]) == first.reference
        wait_until(lambda: len(two.status().contexts) == 2, 60)
        warm = second.generate(PROMPTS, together=False, params={"remote_kv_source": address})
        assert tokens(warm) == first.reference
        assert cached(warm) == [1408, 1408]
        assert one.status().counters["peer_reads"] > 0
        assert two.status().counters["entries_promoted"] == one.status().counters["peer_reads"]

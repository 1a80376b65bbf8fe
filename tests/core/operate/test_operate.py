"""Operators' commands against a real depot: their output and exit status."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.features.sessions.messages import Hint
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate.cli import main
from kvdepot.wire import messages as m
from support.peer import Peer, prompt

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(depot: DepotProcess, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in this process. Return its exit status and its output."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--url", depot.url])
        done = capsys.readouterr()
        return int(ended.value.code or 0), done.out, done.err

    return run


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with a stored prefix of three chunks and one that is not stored."""
    digests = [prompt(5, "a").digests[n * 32 : n * 32 + 32].hex() for n in range(5)]
    lines = [{"digests": digests}, {"tokens": [1] * 64, "namespace": {"model": "other"}}]
    (tmp_path / "keys").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "keys")


def test_find_says_what_is_here(run: Run, peer: Peer, keys: str) -> None:
    peer.store(prompt(3, "a"))
    code, out, _ = run("find", keys)
    assert code == 0
    assert "1: 3 of 5 chunks (192 tokens), tenant default, model model" in out
    assert "2: nothing of 1 chunks" in out
    found = json.loads(run("find", keys, "--json")[1])
    assert [len(prefix["found"]) for prefix in found] == [1, 0]


def test_a_prompt_is_found_by_the_digest_of_its_namespace(run: Run, peer: Peer, tmp_path: Path) -> None:
    namespace, tokens = Namespace("model", tenant="acme", tenant_salt="secret"), list(range(200))
    peer.store(hash_prefix(namespace, 64, tokens))
    named = {"namespace": namespace.digest(64).hex(), "chunk_tokens": 64, "tenant": "acme"}
    file = tmp_path / "prompts"
    file.write_text(json.dumps({"tokens": tokens, **named}))
    assert "1: 3 of 3 chunks (192 tokens), tenant acme" in run("find", str(file))[1]
    assert run("warm", str(file))[1] == "3 of 3 chunks are in the pool\n"
    file.write_text(json.dumps({"tokens": tokens, **named, "namespace": "9f"}))
    code, _, error = run("find", str(file))
    assert (code, "a namespace's digest of 1 bytes: it has 32" in error) == (1, True)


def test_a_prefix_is_cleared(run: Run, peer: Peer, keys: str, depot: DepotProcess) -> None:
    peer.store(prompt(3, "a"))
    peer.store(prompt(2, "b"))
    assert run("clear", "--prefix", keys)[1] == "3 entries removed\n"
    assert depot.status().num_entries == 2
    assert run("clear", "--all")[1] == "2 entries removed\n"


def test_everything_is_cleared_only_on_request(run: Run, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(3, "a"))
    for arguments in ([], ["--all", "--tenant", "default"]):
        code, _, err = run("clear", *arguments)
        assert (code, "--all" in err) == (1, True)
    assert depot.status().num_entries == 3
    assert run("clear", "--tenant", "default")[1] == "3 entries removed\n"
    (_, said) = depot.status().events[-1]
    assert said == f"cleared tenant default: 3 entries removed, asked by process {os.getpid()} of user {os.getuid()}"


def test_a_file_that_is_damaged_clears_nothing(run: Run, peer: Peer, tmp_path: Path, depot: DepotProcess) -> None:
    peer.store(prompt(3, "a"))
    (tmp_path / "bad").write_text('{"digests": ["zz"]}')
    code, _, err = run("clear", "--prefix", str(tmp_path / "bad"))
    assert (code, "Traceback" in err) == (1, False)
    (tmp_path / "empty").write_text('{"digests": []}')
    assert run("clear", "--prefix", str(tmp_path / "empty"))[1] == "0 entries removed\n"
    assert depot.status().num_entries == 3


@pytest.mark.parametrize(
    ("tenant", "said"),
    [
        ("", "tenant: give at least 1 character\n"),
        ("x", "0 of 1 chunks are in the pool\n"),
        ("x" * 256, "0 of 1 chunks are in the pool\n"),
        ("x" * 257, "tenant: give at most 256 characters\n"),
    ],
    ids=["empty", "short", "longest", "long"],
)
def test_a_prefix_of_a_tenant_that_no_engine_can_have_is_refused(
    tenant: str, said: str, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "prompts"
    file.write_text(json.dumps({"digests": ["00" * 32], "tenant": tenant}))
    code, out, error = run("warm", str(file))
    assert (code, (out + error).endswith(said)) == (int("give" in said), True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["session", "retain", "", "600"], "kvdepot: retain: session: give at least 1 character"),
        (["session", "retain", "s", "1e9"], "kvdepot: retain: retain_seconds: give at most 2,592,000"),
        (["find", "-"], "kvdepot: -: there is no prefix in it"),
        (["tier", "add", ""], "argument URL: there is no URL"),
        (["drain", "--wait", "-1"], "argument --wait: -1 is in the past: give 0 or more seconds"),
    ],
)
def test_a_wrong_value_is_refused_in_words(
    arguments: list[str], reason: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, error = run(*arguments)
    assert (bool(code), out, reason in error) == (True, "", True), error


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it ends before its JSON does"),
        ('{"digests": ["zz"]}', "digests and keys are pairs of hexadecimal digits"),
        ('{"tokens": "x"}', "tokens: Expected `array`, got `str`"),
    ],
)
def test_a_malformed_file_of_prefixes_is_refused_in_words(line: str, reason: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(line)
    assert f"{tmp_path}/keys: {reason}" in run("find", str(tmp_path / "keys"))[2]


def test_a_quota_of_nothing_is_refused_as_0_means_none(run: Run, depot: DepotProcess) -> None:
    code, _, error = run("quota", "acme", "0")
    assert (code, "'0' is no quota: give at least 1 byte, or none" in error) == (2, True)
    assert "acme" not in depot.status().tenants


def test_a_tier_that_does_not_answer_is_added_as_suspended(run: Run) -> None:
    code, out, _ = run("tier", "add", "valkey://127.0.0.1:1")
    assert (code, out.partition(" until")[0]) == (0, "tiers in use: 1; valkey://127.0.0.1:1 is SUSPENDED")
    assert out.count("\n") == 1
    assert "tier     valkey://127.0.0.1:1: size not known; 0 B written" in run("status")[1]


def test_a_quota_comes_and_goes(run: Run, peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(3, "a"))
    assert run("quota", "acme", "1MiB")[0] == 0
    assert depot.status().tenants["acme"].quota_bytes == 1 << 20, "before it stores"
    assert "tenant   acme: 0 B of a quota of 1.0 MiB" in run("status")[1]
    assert "now 1.0 MiB; existing chunks that count against it: 3" in run("quota", "default", "1MiB")[1]
    assert depot.status().tenants["default"].quota_bytes == 1 << 20
    assert "now none; existing chunks that no longer count against it: 3" in run("quota", "default", "none")[1]
    code, _, err = run("quota", "default", "1TiB")
    assert code == 1
    assert "a quota of 1.0 TiB" in err


def test_tiers_come_and_go(run: Run, peer: Peer, depot: DepotProcess) -> None:
    assert run("tier", "add", "memory://one?capacity=8MiB")[:2] == (0, "tiers in use: 1\n")
    peer.store(prompt(3, "a"))
    wait_until(lambda: depot.status().tiers[0].num_entries == 3)
    assert run("tier", "add", "memory://two?capacity=8MiB")[:2] == (0, "tiers in use: 2\n")
    for url, why in (
        ("memory://two", "already in use"),
        ("tape://x", "no tier 'tape'"),
        ("memory://three?size=1", "unknown option"),
        ("x", "write a URL"),
    ):
        code, _, err = run("tier", "add", url)
        assert code
        assert why in err
    assert "memory://two" in json.loads(run("config", "--json")[1])["tier"]
    assert run("tier", "remove", "memory://one")[:2] == (0, "tiers in use: 1\n")
    assert [tier.name for tier in depot.status().tiers] == ["memory://two"]
    assert "no tier memory://one" in run("tier", "remove", "memory://one")[2]
    assert run("tier", "add", "memory://one?capacity=8MiB")[0] == 0, "another one of that name"


def test_drain_ends_when_nothing_is_under_way(run: Run, peer: Peer, depot: DepotProcess) -> None:
    ticket = peer.prepare(prompt(3, "a")).ticket
    code, _, err = run("drain", "--wait", "0.1")
    assert code == 1
    assert "1 store in progress" in err
    peer.ask(m.CommitStore(peer.context, ticket))
    assert run("drain")[0] == 0
    assert depot.status().draining
    assert "draining" in run("status")[1]
    run("drain", "--resume")
    assert not depot.status().draining


def test_settings_and_log_level(run: Run, depot: DepotProcess) -> None:
    assert json.loads(run("config", "--json")[1])["pool_size"] == 64 << 20
    assert "lease_seconds" in run("config")[1]
    assert "debug" in run("loglevel", "debug")[1]
    assert depot.status().log_level == "debug"


def test_keys_come_by_standard_input_too(run: Run, peer: Peer, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.store(prompt(5, "a"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path(keys).read_text()))
    assert run("warm", "-")[1] == "5 of 6 chunks are in the pool\n"


def test_a_session_by_its_name(run: Run, peer: Peer) -> None:
    peer.store(prompt(2, "a"))
    peer.ask(Hint(peer.context, "default", prompt(2, "a").digests, session="agent"))
    assert run("session", "retain", "agent", "60")[1] == "2 chunks of agent are in the pool and stay for 60 s\n"
    assert run("session", "retain", "agent", "0")[1] == "2 chunks of agent are in the pool\n"
    kept = "2 chunks of agent are in the pool and stay for 5 s\n"
    assert run("session", "prefetch", "agent", "--retain", "5")[1] == kept
    code, _, error = run("session", "demote", "agent")
    assert (code, "no tier is in use" in error) == (1, True)
    code, _, error = run("session", "prefetch", "agent", "--tenant", "another")
    assert (code, "tenant another has no session agent" in error) == (1, True)
    assert run("session", "forget", "agent")[1] == "agent is forgotten; 2 chunks will be evicted first\n"
    assert run("session", "forget", "agent")[0] == 1
    peer.ask(Hint(peer.context, "default", prompt(2, "a").digests, session="agent"))
    assert run("session", "forget", "agent", "--now")[1] == "agent is forgotten; entries removed: 2\n"

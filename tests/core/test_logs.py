"""Names that clients choose cannot forge lines of a log or control a terminal."""

import json
import logging
import re
import subprocess
import sys
from contextlib import closing

import msgspec
import pytest

from kvdepot.client.connection import Connection
from kvdepot.errors import RemoteError, printable
from kvdepot.lab.processes import DepotProcess
from kvdepot.logs import TextFormatter
from kvdepot.operate.cli import main
from kvdepot.wire import messages as m
from support.peer import DETAIL, SPEC, prompt

FORGED = "x\n2026-01-01 00:00:00,000 INFO kvdepot: all is well\r\x1b]0;title\x07\x1b[2J\x9b31m\u202e\u2028y"
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ kvdepot[.\w]*: ")


def assert_plain(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n")), "a terminal would do something"
    assert not any(line.startswith("2026-01-01") for line in text.split("\n")), "a line was forged"


@pytest.mark.parametrize("text", ["", "plain", "Größe 4 GiB, 令牌", "C:\\path"])
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_unprintable_characters_are_escaped() -> None:
    assert printable("a\n\x1b[0m\x9b\u202e\udcff") == r"a\n\x1b[0m\x9b\u202e\udcff"


def test_characters_are_escaped_in_a_process_without_descriptors() -> None:
    code = "import resource as r, kvdepot.errors as e; r.setrlimit(r.RLIMIT_NOFILE, (3, 3)); print(e.printable('\\n'))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout == "\\n\n"


def test_an_exception_cannot_look_like_a_record() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        record = logging.LogRecord("kvdepot", logging.ERROR, "", 1, "it %s", (FORGED,), sys.exc_info())
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s").format(record)
    assert_plain(text)
    first, *more = text.split("\n")
    assert LOG_LINE.match(first)
    assert len(more) > 3
    assert all(line.startswith("  ") for line in more)


def test_a_client_forges_no_line_of_log_or_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    spec = msgspec.structs.replace(SPEC, dtype=FORGED, format=FORGED)
    request = m.RegisterKVCache(m.PROTOCOL_VERSION, FORGED, 0, 1, FORGED, FORGED, FORGED, spec, (DETAIL,))
    run, log = prompt(2, "a"), ""
    with DepotProcess(log_level="info") as depot, closing(Connection(depot.url, FORGED, request, maps_pool=False)) as c:
        session = c.wait_until_open(10)
        with closing(c.channel(session)) as channel:
            plan = channel.call(m.PrepareStore(session.context, FORGED, FORGED, run.digests, 0, run.parent, (2,)), 5.0)
            assert isinstance(plan, m.StorePlan)
            channel.call(m.CommitStore(session.context, plan.ticket), 5.0)
            with pytest.raises(RemoteError, match="all is well") as caught:
                channel.call(msgspec.structs.replace(request, details=(m.GroupDetail((4096,), 8),)), 5.0)
            assert_plain(str(caught.value))
        keys = {"digests": [run.digests[:32].hex(), run.digests[32:].hex()]}
        (depot.directory / "keys").write_text(json.dumps(keys))
        for command in (["status"], ["status", "--json"], ["find", str(depot.directory / "keys")]):
            log += capfd.readouterr().err
            with pytest.raises(SystemExit) as ended:
                main([*command, "--url", depot.url])
            out, err = capfd.readouterr()
            log += err
            assert (ended.value.code, "all is well" in out) == (0, True)
            assert_plain(out)
        depot.terminate()
    log += capfd.readouterr().err
    assert log.count("all is well") >= 3, "who connected, who registered and who left"
    assert_plain(log)
    assert all(LOG_LINE.match(line) for line in log.splitlines())


def test_a_tenant_s_name_stays_one_label_of_the_metrics() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install 'kvdepot[http]'")
    from kvdepot.operate.metrics import render_metrics

    request = m.RegisterKVCache(m.PROTOCOL_VERSION, "e", 0, 1, "cpu", "direct", "m", SPEC, (DETAIL,))
    with DepotProcess() as depot, closing(Connection(depot.url, "e", request, maps_pool=False)) as connection:
        run, session = prompt(2, "a"), connection.wait_until_open(10)
        with closing(connection.channel(session)) as channel:
            plan = channel.call(m.PrepareStore(session.context, "r", FORGED, run.digests, 0, run.parent, (2,)), 5.0)
            assert isinstance(plan, m.StorePlan)
            channel.call(m.CommitStore(session.context, plan.ticket), 5.0)
        families = parser.text_string_to_metric_families(render_metrics(depot.status()).decode())
    tenants = next(family for family in families if family.name == "kvdepot_tenant_used_bytes").samples
    assert [sample.labels["tenant"] for sample in tenants] == [FORGED]

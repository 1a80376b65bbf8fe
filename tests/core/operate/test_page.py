"""The page at `/` is self-contained: a real browser shows it without the internet."""

import json
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess
from support.peer import Peer, prompt, registration

pytest.importorskip("uvicorn", reason="pip install 'kvdepot[http]'")

from support.http import TOKEN, Http
from support.tools import tool_is_missing

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "headless_shell")
EVIL = "<img src=x onerror=\"document.title='taken'\">"


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        tool_is_missing(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: chromium-headless-shell)")
    return found


def browse(url: str, *flags: str) -> str:
    """Return a browser's document after 7 s of its virtual time. The browser resolves no names."""
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--virtual-time-budget=7000",
        *flags,
        url,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture
def http() -> Iterator[Http]:
    """The HTTP server of a depot with contents to show."""
    with DepotProcess("--tier", "memory://?capacity=1MiB", "--quota", "default=1MiB") as depot:
        http = Http(depot)
        peer = Peer(depot, registration(instance="engine-7"))
        peer.store(prompt(3, "a"))
        peer.find(prompt(4, "a"))
        peer.store(hash_prefix(Namespace("model", tenant=EVIL), 64, range(64)))
        yield http
        peer.close()
        http.server.close()


def test_the_page_names_no_other_host_and_may_ask_none(http: Http) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{http.server.port}/", timeout=10) as reply:
        page, policy = reply.read().decode(), reply.headers["content-security-policy"]
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    assert "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy


def test_a_browser_shows_what_the_depot_holds(http: Http) -> None:
    document = browse(f"http://127.0.0.1:{http.server.port}/#token={TOKEN}", "--dump-dom")
    assert ">serving<" in document
    assert "engine-7" in document
    assert "memory://" in document
    assert "75.0 %" in document, "three of four chunks were found"
    assert len(re.findall(r"--fill: ?\d+%", document)) == 96
    assert "registered" in document


def test_a_browser_without_the_token_asks_for_it(http: Http) -> None:
    document = browse(f"http://127.0.0.1:{http.server.port}/", "--dump-dom")
    assert 'class="shown"' in document
    assert "engine-7" not in document


def test_names_of_tenants_are_text(http: Http) -> None:
    document = browse(f"http://127.0.0.1:{http.server.port}/#token={TOKEN}", "--dump-dom")
    assert "<title>kvdepot</title>" in document
    assert "<img" not in document
    assert "&lt;img src=x" in document


# Adds to the page the names of its parts that are wider than their place.
_MEASURE = b"""<script>setTimeout(() => {
  const parts = [...document.querySelectorAll("section, .tile, html")];
  const cut = parts.filter((each) => each.scrollWidth > each.clientWidth);
  document.title = "cut: " + cut.map((each) => each.textContent.slice(0, 20));
}, 4000)</script>"""


@pytest.mark.parametrize("width", [390, 800, 1280, 2200])
def test_no_column_is_cut_off_at_any_width(http: Http, width: int) -> None:
    class Measured(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urllib.request.Request(f"http://127.0.0.1:{http.server.port}{self.path}")
            asked.add_header("authorization", f"Bearer {TOKEN}")
            with urllib.request.urlopen(asked, timeout=10) as reply:
                body, kind = reply.read(), reply.headers["content-type"]
            if self.path == "/status":
                status = json.loads(body)
                (tier,) = status["tiers"]
                tier |= {"name": "s3://" + "a-bucket/" * 8, "state": "open", "why_open": "a read took too long " * 4}
                status["contexts"][0]["model"] = "/models/" + "a-long-name-" * 9
                body = json.dumps(status).encode()
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body + (_MEASURE if self.path == "/" else b""))

    with ThreadingHTTPServer(("127.0.0.1", 0), Measured) as wrapper:
        threading.Thread(target=wrapper.serve_forever, daemon=True).start()
        document = browse(f"http://127.0.0.1:{wrapper.server_port}/", "--dump-dom", f"--window-size={width},900")
        wrapper.shutdown()
    assert "a-bucket" in document
    assert "<title>cut: </title>" in document


def test_a_picture_of_it_is_taken(http: Http, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    browse(f"http://127.0.0.1:{http.server.port}/#token={TOKEN}", f"--screenshot={path}", "--window-size=1180,860")
    assert path.read_bytes().startswith(b"\x89PNG")

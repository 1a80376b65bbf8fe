"""Takes the picture of the live view: `python benchmarks/pictures/live_view.py docs/live-view.png`.

Three engines serve conversations from one depot with a disk tier. As in the demo, pauses replace the model.
"""

import http.server
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from kvdepot.lab.demo import make_conversations
from kvdepot.lab.engine_model import GEOMETRY_8B, Geometry
from kvdepot.lab.fleet import EngineStart, FleetEngine, Prompt, start_engines
from kvdepot.lab.processes import DepotProcess

_GEOMETRY = Geometry("8B GQA, 2 of 32 layers", 2, GEOMETRY_8B.num_kv_heads, GEOMETRY_8B.head_dim)
_WARM_UP_SECONDS, _SECONDS_OF_THE_PAGE = 15, 95  # enough for the estimates, and for the page's curves
_POOL_SIZE = "3GiB"  # so that it is about two thirds full then
_BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")


def drive(engine: FleetEngine, number: int, end: threading.Event) -> None:
    """Serve prompts until `end`."""
    rng, conversations, count = random.Random(number), make_conversations(60), 0
    while not end.is_set():
        prompt = rng.choice(rng.choice(conversations))
        count += 1
        engine.serve(Prompt(f"{number}-{count}", prompt.segments))


class _Wrapper(http.server.BaseHTTPRequestHandler):
    """Forwards the depot's HTTP. It delays the end of the page, at which the browser takes its picture."""

    depot = ""

    def do_GET(self) -> None:
        if self.path == "/late":
            time.sleep(_SECONDS_OF_THE_PAGE)
            self.send_error(404)
            return
        headers = {"authorization": self.headers["authorization"]} if "authorization" in self.headers else {}
        request = urllib.request.Request(self.depot + self.path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                body, kind = reply.read(), reply.headers["content-type"]
        except urllib.error.HTTPError as error:
            self.send_error(error.code)
            return
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body + (b"<img src=/late width=0 height=0>" if self.path == "/" else b""))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # named by the base class
        """Log nothing."""


def main() -> None:
    """Take the picture."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"install one of {', '.join(_BROWSERS)}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        tier = f"disk://{folder}/tier?capacity=1GiB"
        depot = DepotProcess("--http", f"127.0.0.1:{port}", "--tier", tier, pool_size=_POOL_SIZE)
        with depot:
            num_blocks = (64 << 20) // _GEOMETRY.block_size_bytes
            engines = start_engines(
                EngineStart(f"engine-{number}", depot.url, _GEOMETRY, num_blocks, tokens_per_second=20_000.0)
                for number in range(3)
            )
            end = threading.Event()
            threads = [threading.Thread(target=drive, args=(each, n, end)) for n, each in enumerate(engines)]
            for thread in threads:
                thread.start()
            time.sleep(_WARM_UP_SECONDS)
            token = (depot.directory / "http.token").read_text().strip()
            _Wrapper.depot = f"http://127.0.0.1:{port}"
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Wrapper)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1180,930"]
            flags += [f"--user-data-dir={folder}/browser", f"--screenshot={Path(sys.argv[1]).absolute()}"]
            url = f"http://127.0.0.1:{server.server_port}/#token={token}"
            subprocess.run([browser, *flags, url], check=True, capture_output=True, timeout=200)
            server.shutdown()
            end.set()
            for thread in threads:
                thread.join()
            for engine in engines:
                engine.close()


if __name__ == "__main__":
    main()

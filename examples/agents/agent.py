"""An agent's loop over the OpenAI API. Its tools take seconds, and a depot keeps its session.

    python agent.py MODEL --api http://127.0.0.1:8000 --depot DIR [--tool-seconds 2 20]

Before a short tool, the request itself retains the session. Before a long one, the session leaves the pool, and it
returns from the tier before the tool ends. Each line says how much of the prompt was not computed again.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
import uuid
from typing import Any

LONG_SECONDS = 3.0  # over a longer tool, the session leaves its space in the pool to others
LEAD_SECONDS = 1.0  # start of the prefetch before the tool ends: as long as a promotion takes


class Agent:
    """A conversation. The depot knows it by the name of its session."""

    def __init__(self, model: str, api: str, depot: str) -> None:
        self.session = f"agent-{uuid.uuid4()}"  # unguessable, as anyone who knows the name may move the session
        self.context = " ".join(f"t{number}" for number in range(1, 700))
        self._model = model
        self._api = api
        self._depot = depot

    def turn(self, *, retain_seconds: float) -> None:
        """Ask for the next step. Retain the session for the tool that follows."""
        body = {
            "model": self._model,
            "prompt": self.context,
            "max_tokens": 8,
            "temperature": 0,
            "kv_transfer_params": {"kvdepot": {"retain_seconds": retain_seconds}},
        }
        headers = {"Content-Type": "application/json", "X-Session-ID": self.session}
        request = urllib.request.Request(f"{self._api}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            reply: dict[str, Any] = json.load(answer)
        usage = reply["usage"]
        details: dict[str, int] = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens", 0)
        print(f"turn: {cached} of {usage['prompt_tokens']} prompt tokens were not computed again", flush=True)
        self.context += reply["choices"][0]["text"]

    def tell_depot(self, operation: str, *arguments: str) -> None:
        """Run `kvdepot session`. The depot may still be waiting for the last request's stores."""
        command = ["kvdepot", "session", operation, self.session, *arguments, "--url", self._depot]
        error = ""
        for _ in range(20):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                print(f"depot: {done.stdout.strip()}", flush=True)
                return
            error = done.stderr
            time.sleep(0.2)
        sys.exit(f"{' '.join(command)} failed: {error}")

    def use_tool(self, seconds: float) -> None:
        """Wait for a tool, and append its output to the conversation."""
        if seconds <= LONG_SECONDS:
            time.sleep(seconds)
        else:
            self.tell_depot("demote")
            time.sleep(seconds - LEAD_SECONDS)
            self.tell_depot("prefetch", "--retain", "30")
            time.sleep(LEAD_SECONDS)
        self.context += " " + " ".join(f"t{number}" for number in range(1, 65))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--api", default="http://127.0.0.1:8000")
    parser.add_argument("--depot", required=True, metavar="DIR", help="directory of the depot's sockets")
    parser.add_argument("--tool-seconds", type=float, nargs="+", default=[2.0, 20.0])
    options = parser.parse_args()
    agent = Agent(options.model, options.api, options.depot)
    for seconds in options.tool_seconds:
        agent.turn(retain_seconds=seconds + 30.0)
        agent.use_tool(seconds)
    agent.turn(retain_seconds=0)
    agent.tell_depot("forget")


if __name__ == "__main__":
    main()

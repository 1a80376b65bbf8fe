"""Retrieval with blend over vLLM's OpenAI API: `python rag.py MODEL DOCUMENT...`.

`serve.sh` beside this file starts the depot and vLLM. The first question stores the documents. The next two have the
same documents in other orders, as a retriever ranks them for other questions: one is computed, one blended. Prints the
time to the first token of each and the number of reused tokens. Fails if no tokens were reused.
"""

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def ask(url: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the time to the only token and the answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    return time.perf_counter() - began, answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("documents", nargs="+", type=Path, help="text files, at least three")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--characters", type=int, default=6000, help="of each document")
    arguments = parser.parse_args()
    documents = [path.read_text(errors="replace")[: arguments.characters] for path in arguments.documents]
    rounds = [
        ("first", documents, False),
        ("computed", documents[::-1], False),
        ("blended", documents[1:] + documents[:1], True),
    ]
    reused: dict[str, Any] | None = None
    for name, ranked, blend in rounds:
        prompt = "\n\n".join(["Answer from the documents.", *ranked, f"Question: what do they say of {name}?\nAnswer:"])
        params = {"kvdepot": {"blend": blend}}
        body = {"model": arguments.model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
        seconds, answer = ask(arguments.url, body)
        reused = ((answer.get("kv_transfer_params") or {}).get("kvdepot") or {}).get("blend")
        print(f"{name:9} first token after {1000 * seconds:6.0f} ms  {reused or ''}")
    return 0 if reused else 1


if __name__ == "__main__":
    sys.exit(main())

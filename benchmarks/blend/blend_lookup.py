"""Times naming and looking up the segments of a long prompt: `python benchmarks/blend/blend_lookup.py`.

The depot has the same documents of 1,024 tokens in another order. No segment of them is at a multiple of a chunk. For
comparison, the prompt's chunks are hashed and looked up, too.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import numpy as np

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.features.blend.client import BlendRun, note_contents, submit_blend_lookup
from kvdepot.features.blend.segments import SegmentNamer
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.bench import IndexFiller, describe_machine, filler_spec
from kvdepot.lab.processes import DepotProcess, wait_until

_CHUNK_TOKENS = 64


def measure(num_tokens: int, rounds: int) -> None:
    """Print medians of all rounds."""
    namespace, rng = Namespace("bench"), np.random.default_rng(0)
    documents = rng.integers(0, 128_000, (num_tokens // 1024, 1024), dtype=np.uint32)
    source, prompt = documents.reshape(-1).tolist(), [1] * 7 + rng.permutation(documents).reshape(-1).tolist()
    namer, key = SegmentNamer(namespace), hash_prefix(namespace, _CHUNK_TOKENS, source)
    runs: Sequence[BlendRun] = ()
    times: dict[str, list[float]] = {"hash": [], "lookup": [], "name": [], "blend lookup": []}
    with DepotProcess(pool_size="512MiB") as depot:
        filler = IndexFiller(depot.url, chunk_tokens=_CHUNK_TOKENS)
        filler.store(key)
        with SchedulerClient(filler_spec(_CHUNK_TOKENS), "bench", url=depot.url, deadline_seconds=30) as client:
            client.wait_until_connected(10)
            note_contents(client, key, namer.name(source))
            segments = namer.name(prompt)
            # The depot takes notes in the background.
            wait_until(lambda: submit_blend_lookup(client, "warm-up", segments, min_run_tokens=64).result().runs)
            for _ in range(rounds):
                moments = [time.perf_counter()]
                hash_prefix(namespace, _CHUNK_TOKENS, prompt)
                moments.append(time.perf_counter())
                client.lookup("request", key)
                moments.append(time.perf_counter())
                namer.name(prompt)
                moments.append(time.perf_counter())
                runs = submit_blend_lookup(client, "request", segments, min_run_tokens=64).result().runs
                moments.append(time.perf_counter())
                client.end_request("request")
                for name, (began, ended) in zip(times, itertools.pairwise(moments), strict=True):
                    times[name].append(ended - began)
        longest = depot.status().loop_longest_seconds
        filler.close()
    ms = {name: f"{statistics.median(seconds) * 1e3:.2f} ms" for name, seconds in times.items()}
    found = sum(run.length for run in runs) / num_tokens
    print(
        f"{len(prompt):,} tokens: {len(segments):,} segments named in {ms['name']} (chunks hashed in {ms['hash']}),"
        f" looked up in {ms['blend lookup']} (chunks in {ms['lookup']}); {found:.0%} found in {len(runs):,} runs;"
        f" longest turn of the server {longest * 1e3:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args()
    print(describe_machine())
    measure(options.tokens, options.rounds)


if __name__ == "__main__":
    main()

"""One vLLM with a depot: a long prompt is computed, then loaded from the depot.

Start a depot first (`kvdepot serve`), then: python one_engine.py MODEL [--options '{"tensor_parallel_size": 2}']
"""

import argparse
import json
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--url", help="directory of the depot, if it is not the default one")
    parser.add_argument("--options", type=json.loads, default={}, help="of vllm.LLM, as JSON")
    arguments = parser.parse_args()
    transfer = KVTransferConfig(
        kv_connector="KVDepotConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvdepot.url": arguments.url} if arguments.url else {},
    )
    # without vLLM's own prefix cache, so that reused tokens come from the depot
    llm = LLM(model=arguments.model, kv_transfer_config=transfer, enable_prefix_caching=False, **arguments.options)
    prompt = " ".join(f"t{number * number % 1000}" for number in range(1000))
    for title in ("first", "again"):
        started = time.perf_counter()
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        seconds = time.perf_counter() - started
        total = len(output.prompt_token_ids or [])
        print(f"{title}: {output.num_cached_tokens} of {total} tokens reused, {1e3 * seconds:.0f} ms", flush=True)
        time.sleep(2)  # the store runs in the background


if __name__ == "__main__":
    main()

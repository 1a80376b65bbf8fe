# pyright: basic, reportMissingImports=false
"""vLLM's API server. It forks vLLM's own processes, as importing everything again would take most of a test.

vLLM's workers wait in a loop of `sched_yield`. Under other load, Linux 6.18 then left runnable threads of other
processes without a core for up to 60 s, so here the workers sleep instead.
"""

import multiprocessing
import os
import runpy
import time

from support.leftovers import take_own_names

if __name__ == "__main__":
    take_own_names()
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: fork
    os.sched_yield = lambda: time.sleep(1e-4)  # noqa: TID251  # vLLM sleeps, not a test
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

# pyright: basic, reportMissingImports=false
"""vLLM's API server. vLLM's own processes are forked here, as importing everything again would take most of a test."""

import multiprocessing
import runpy

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: fork
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

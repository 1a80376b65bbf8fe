"""kvdepot's connector for vLLM: planned, not built yet. Importing it does not load vLLM."""


def why_unavailable() -> str:
    """Return why vLLM cannot use a depot with this version."""
    return "the vLLM connector is not built yet in this version of kvdepot-vllm: vLLM runs without a depot"

"""What vLLM calls in every process at start (`vllm.general_plugins`). Imports nothing of vLLM and never raises."""


def register() -> None:
    """Say that there is no connector to register yet."""
    import logging

    from kvdepot_vllm import why_unavailable

    logging.getLogger(__name__).warning("%s", why_unavailable())

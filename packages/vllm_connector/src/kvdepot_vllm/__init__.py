"""The connector that keeps vLLM's KV cache in a kvdepot server.

The entry point is `register` (`vllm.general_plugins`), which vLLM calls in every process at start. An exception there
would stop vLLM, so it raises none. This module imports nothing of vLLM.
"""


def register() -> None:
    """Register `"kv_connector": "KVDepotConnector"` with vLLM. Idempotent."""
    import importlib
    import logging
    from typing import Any

    try:
        factory: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        factory.KVConnectorFactory.register_connector("KVDepotConnector", "kvdepot_vllm.connector", "KVDepotConnector")
    except Exception as error:
        if "already registered" not in str(error):
            logging.getLogger(__name__).warning(
                "the KVDepotConnector of kvdepot-vllm could not be registered with this vLLM: %s; give"
                ' "kv_connector_module_path": "kvdepot_vllm.connector" in --kv-transfer-config',
                error,
            )

"""What vLLM calls in every process at start (`vllm.general_plugins`). Imports nothing of vLLM at module level.

An exception in `register` would stop vLLM, so there is none.
"""


def register() -> None:
    """Make `"kv_connector": "KVDepotConnector"` known to vLLM. More than once is harmless."""
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

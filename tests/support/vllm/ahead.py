"""Does once, before the fork, what each engine would do again.

The search of all modules for kernels takes a third of a second, the settings of all loggers a tenth. An engine with
other settings for its log still makes them itself.
"""

import importlib

_platform = importlib.import_module("vllm.platforms").current_platform
_platform.register_triton_kernel_overrides()
type(_platform).register_triton_kernel_overrides = classmethod(lambda _cls: None)
importlib.import_module("vllm.logger").configure_logging(importlib.import_module("vllm.config.logging").LoggingConfig())

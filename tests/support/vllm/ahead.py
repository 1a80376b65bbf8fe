"""Does once, before the fork, what each engine would do again.

The search of all modules for kernels takes a third of a second, the settings of all loggers and the search for plugins
a tenth each. An engine with other settings for its log still makes them itself.
"""

import functools
import importlib
from typing import Any

_platform = importlib.import_module("vllm.platforms").current_platform
_platform.register_triton_kernel_overrides()
type(_platform).register_triton_kernel_overrides = classmethod(lambda _cls: None)
importlib.import_module("vllm.logger").configure_logging(importlib.import_module("vllm.config.logging").LoggingConfig())

_metadata: Any = importlib.import_module("importlib.metadata")
_metadata.entry_points = functools.cache(_metadata.entry_points)
for _group in ("vllm.general_plugins", "vllm.logits_processors"):
    _metadata.entry_points(group=_group)

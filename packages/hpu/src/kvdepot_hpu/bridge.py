"""Loads the functions of Habana's bridge that the backend calls, when a context is created."""

import importlib
from typing import Any

from kvdepot.copying.staged.bridge import Bridge


def load_bridge() -> Bridge:
    """Import the bridge.

    `mark_step` launches the work that lazy mode has accumulated, and does nothing in eager mode.
    """
    importlib.import_module("habana_frameworks.torch")  # registers torch.hpu
    core = importlib.import_module("habana_frameworks.torch.core")
    torch: Any = importlib.import_module("torch")
    return Bridge(torch, "hpu", torch.hpu, getattr(core, "mark_step", lambda: None), compiles_shapes=True)

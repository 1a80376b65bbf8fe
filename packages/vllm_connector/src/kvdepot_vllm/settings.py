"""The user's settings: `kv_connector_extra_config`, parsed once at start."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from kvdepot.backends import Backend, Capability
from kvdepot.engines.settings import EngineSettings
from kvdepot.errors import ConfigError

logger = logging.getLogger(__name__)

_ASK_VLLM: Final = "auto"
_LEAVE_IT_TO_VLLM: Final = "engine"
_BLOCK_OUTERMOST: Final = "BLNHC"  # in memory: block, layer, token, head, content
_HEADS_BEFORE_TOKENS: Final = "BLHNC"  # block, layer, head, token, content: some attention backends take nothing else
_BLACKWELL: Final = 10  # major compute capability
_LARGEST_KERNEL_BLOCK: Final = 64  # tokens that kernels of every attention backend take in one block
BLEND_POLICIES: Final = ("none", "heads", "deviation", "query", "mixkq")


@dataclass(frozen=True, slots=True)
class Settings(EngineSettings):
    """Each setting is an optional `kvdepot.NAME` in `kv_connector_extra_config`.

    `store` selects the stored tokens: "all" (prompt and output), "prompt" or "none". `load` switches loads on or off.
    With `wait_for_others`, a request waits for chunks that another request or engine is computing, if they come sooner
    that way. `blend` reuses KV that is not a prefix, which changes outputs: "off", "request" (for requests that ask for
    it) or "always". `max_pinned_share` limits the share of the engine's blocks that stores under way may hold.
    `kv_cache_layout` is the layout requested from vLLM: "auto" (on CUDA all layers of a block in one place), "engine"
    (vLLM's own choice) or one of vLLM's names.
    """

    SOURCE: ClassVar[str] = "kv_connector_extra_config"
    PREFIX: ClassVar[str] = "kvdepot."

    chunk_tokens: int | None = None  # None: see `engine_cache`
    store: str = "all"
    load: bool = True
    wait_for_others: bool = True
    blend: str = "off"
    blend_policy: str = "mixkq"
    blend_ratio: float = 0.15  # share of the reused tokens to recompute
    blend_min_tokens: int = 256  # a blend that reuses fewer is not worth its fixed cost
    blend_step_tokens: int = 1024  # tokens recomputed in one step, beside those that vLLM schedules
    max_pinned_share: float = 0.5  # the other half stays free for requests
    kv_cache_layout: str = _ASK_VLLM
    synchronous: bool | None = None  # transfer on the engine's thread; None: as the backend needs it
    keep_load_failure_policy: bool = False  # True: do not change vLLM's kv_load_failure_policy

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)  # `super()` refers to the class that `slots` has replaced
        if self.store not in ("all", "prompt", "none"):
            raise ConfigError(f'kvdepot.store is "all", "prompt" or "none", not {self.store!r}')
        if self.blend not in ("off", "request", "always"):
            raise ConfigError(f'kvdepot.blend is "off", "request" or "always", not {self.blend!r}')
        if self.blend_policy not in BLEND_POLICIES:
            raise ConfigError(f"kvdepot.blend_policy is one of {', '.join(BLEND_POLICIES)}, not {self.blend_policy!r}")
        if not 0 <= self.blend_ratio <= 1:
            raise ConfigError(f"kvdepot.blend_ratio is {self.blend_ratio}: give a share from 0 to 1")
        if not 0 < self.max_pinned_share <= 1:
            raise ConfigError(f"kvdepot.max_pinned_share is {self.max_pinned_share}: give a share above 0, at most 1")
        self.check_at_least_one("blend_min_tokens", "blend_step_tokens", "chunk_tokens")

    def is_synchronous(self, backend: Backend) -> bool:
        """Return whether transfers run on the engine's thread: by default, if the backend supports no other way."""
        return Capability.ASYNCHRONOUS not in backend.capabilities if self.synchronous is None else self.synchronous

    @classmethod
    def parse(cls, extra: Mapping[str, Any], role: str | None = None) -> "Settings":
        """Return the settings in `kv_connector_extra_config`. Keys of other connectors are ignored.

        With the role "kv_producer", only prompts are stored, unless `kvdepot.store` says otherwise.

        Raises:
            ConfigError: an unknown `kvdepot.` key, or a value of the wrong type.
        """
        return cls.read(extra, **({"store": "prompt"} if role == "kv_producer" else {}))


def requested_layout(
    setting: str, *, is_cuda: bool, block_tokens: int | None, capability: int | None = None
) -> str | None:
    """Return the KV cache layout to request from vLLM, None to leave the choice to vLLM.

    With the block outermost, a block is one contiguous run of all layers instead of one run per layer. A copy engine
    moves such runs close to the bus's limit. vLLM refuses these layouts if its kernels use smaller blocks than its
    block table, so nothing is requested for large blocks.

    Args:
        setting: `Settings.kv_cache_layout`.
        is_cuda: whether the device is NVIDIA's.
        block_tokens: tokens of the engine's blocks, None if not yet decided.
        capability: the major number of the device's compute capability, None if it is not known. From Blackwell on,
            FlashInfer takes only layouts with the heads before the tokens, and the other backends take those, too.
    """
    if setting == _LEAVE_IT_TO_VLLM:
        return None
    if setting != _ASK_VLLM:
        return setting
    if not is_cuda or (block_tokens or 0) > _LARGEST_KERNEL_BLOCK:
        return None
    return _HEADS_BEFORE_TOKENS if (capability or 0) >= _BLACKWELL else _BLOCK_OUTERMOST


def set_failure_policy(transfer: Any, *, keep: bool) -> None:
    """Set vLLM's `kv_load_failure_policy` to "recompute", with a warning, unless the user keeps another one.

    Args:
        transfer: vLLM's `KVTransferConfig`.
        keep: `Settings.keep_load_failure_policy`.
    """
    policy = transfer.kv_load_failure_policy
    if policy == "recompute":
        return
    if keep:
        logger.warning(
            "kv_load_failure_policy is %r: a request whose load from the depot fails ends with an error. Set"
            ' "kv_load_failure_policy": "recompute" in --kv-transfer-config to recompute it instead.',
            policy,
        )
        return
    logger.warning(
        "kv_load_failure_policy was %r (vLLM's default) and is now 'recompute': a failed load costs time, not the"
        " request. Set it yourself in --kv-transfer-config, or keep vLLM's with"
        ' "kvdepot.keep_load_failure_policy": true.',
        policy,
    )
    transfer.kv_load_failure_policy = "recompute"

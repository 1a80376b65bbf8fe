"""Reads how a request is to be blended: `kv_transfer_params={"kvdepot": {"blend": true | false | {...}}}`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from kvdepot_vllm.settings import BLEND_POLICIES, Settings

logger = logging.getLogger(__name__)

EVERYTHING: Final = "all"  # recomputes all tokens: slower than no reuse, for tests


@dataclass(frozen=True, slots=True)
class BlendParams:
    """How to blend one request.

    Attributes:
        policy: selects the reused tokens to recompute.
        ratio: share of the reused tokens to recompute, 0 to 1.
        borders: token positions where documents begin or end, ascending.
    """

    policy: str
    ratio: float
    borders: tuple[int, ...] = ()

    @classmethod
    def parse(cls, settings: Settings, params: Mapping[str, Any]) -> "BlendParams | None":
        """Return how to blend a request, None if not at all.

        A wrong value is ignored with a log line; no request fails because of it.
        """
        given = params.get("blend")
        if settings.blend == "off" or given is False or (given is None and settings.blend != "always"):
            return None
        default = cls(settings.blend_policy, settings.blend_ratio)
        if given is None or given is True:
            return default
        if not isinstance(given, dict):
            _warn("blend", given, "true, false or an object")
            return None
        return default._changed(cast("dict[str, Any]", given))

    def _changed(self, given: Mapping[str, Any]) -> "BlendParams":
        result = self
        policy, ratio, segments = given.get("policy"), given.get("ratio"), given.get("segments")
        if policy in (*BLEND_POLICIES, EVERYTHING):
            result = replace(result, policy=policy)
        elif policy is not None:
            _warn("blend.policy", policy, "one of " + ", ".join(BLEND_POLICIES))
        if type(ratio) in (int, float) and 0 <= cast("float", ratio) <= 1:
            result = replace(result, ratio=float(cast("float", ratio)))
        elif ratio is not None:
            _warn("blend.ratio", ratio, "a share from 0 to 1")
        borders = _borders(segments)
        if borders is not None:
            result = replace(result, borders=borders)
        elif segments is not None:
            _warn("blend.segments", segments, "a list of [first token, end] pairs")
        return result


def _borders(segments: Any) -> tuple[int, ...] | None:
    if not isinstance(segments, list | tuple):
        return None
    found: set[int] = set()
    for pair in cast("Sequence[Any]", segments):
        if not isinstance(pair, list | tuple) or [type(item) for item in cast("Sequence[Any]", pair)] != [int, int]:
            return None
        first, end = cast("Sequence[int]", pair)
        if not 0 <= first < end:
            return None
        found |= {first, end}
    return tuple(sorted(found))


def _warn(name: str, value: Any, expected: str) -> None:
    logger.warning("kvdepot.%s of a request is %.64r and ignored: give %s", name, value, expected)

"""Each supported version of vLLM has everything that the connector uses, with the expected signatures.

`cd tests; python -m support.vllm.contract TREE_OR_WHEEL` prints a version's `vllm-VERSION.json`.
"""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.vllm import contract
from support.vllm.slots import slots_of_v1, slots_of_v2

VERSIONS = {path.stem.removeprefix("vllm-"): path for path in sorted(Path(__file__).parent.glob("vllm-*.json"))}


@pytest.fixture(params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(VERSIONS[request.param].read_text())


def test_two_versions_are_compared() -> None:
    assert [*VERSIONS] == ["0.32", "0.33"]


def test_everything_that_is_imported_is_there(vllm: dict[str, Any]) -> None:
    expected = {f"{module}.{name}" for module, names in contract.touched().items() for name in names}
    assert {name for name, is_there in vllm["imports"].items() if is_there} == expected


def test_everything_that_is_read_of_its_objects_is_there(vllm: dict[str, Any]) -> None:
    expected = {name: dict.fromkeys(each, True) for name, each in contract.attributes().items()}
    assert vllm["attributes"] == expected


def test_every_hook_takes_the_parameters_that_it_is_called_with(vllm: dict[str, Any]) -> None:
    ours = contract.overrides()
    for name, theirs in vllm["methods"].items():
        takes_more = any(each.startswith("**") for each in ours[name])
        missing = [each for each in theirs if each.rstrip("=") not in {own.rstrip("=") for own in ours[name]}]
        required = [each for each in ours[name] if not each.endswith("=") and not each.startswith("*")]
        assert name == "__init__" or takes_more or not missing, f"{name} lacks {missing}"
        assert all(each in theirs or f"{each}=" in theirs for each in required), f"{name} requires {required}"


def test_every_public_method_is_a_hook_of_some_version() -> None:
    """A hook that vLLM renamed would never be called."""
    known = {name for path in VERSIONS.values() for name in json.loads(path.read_text())["methods"]}
    assert {name for name in contract.overrides() if not name.startswith("_")} <= known


def test_sleep_takes_the_memory_only_between_the_connector_s_hooks() -> None:
    """0.32 has no hooks. `support.vllm.sleeper` repeats 0.33's calls on CPU."""
    steps = json.loads(VERSIONS["0.33"].read_text())["sleep"]
    core, worker = "vllm.v1.engine.core.EngineCore", "vllm.v1.worker.gpu_worker.Worker"
    assert steps[f"{worker}.sleep"][:2] == ["unregister_kv_caches", "suspend"]
    assert steps[f"{worker}.wake_up"] == ["resume", "restore_kv_caches"]
    assert steps[f"{worker}.discard"] == ["unregister_kv_caches", "discard"]
    assert steps[f"{core}.sleep"][:2] == ["pause_scheduler", "sleep"]  # pausing resets the caches
    assert steps[f"{core}.wake_up"] == ["wake_up", "_set_kv_connector_handshake_metadata", "resume_scheduler"]
    assert steps[f"{core}.release_kv_cache_memory"] == ["_reset_caches", "discard"]


@pytest.mark.parametrize(("kernel", "slots_of"), [("v1", slots_of_v1), ("v2", slots_of_v2)])
def test_each_token_is_where_the_format_says(vllm: dict[str, Any], kernel: str, slots_of: Callable[..., Any]) -> None:
    """With context parallelism, shard `token // interleave % shards` has the token, its own tokens in their order.

    This place among the tokens of a shard does not depend on the block size. Both kernels are interpreted.
    """
    table = [5, 2, 7, 0, 3, 1, 4, 6]
    for page, shards, interleave in ((16, 1, 1), (16, 2, 1), (16, 4, 16), (32, 8, 4), (16, 8, 16), (64, 2, 64)):
        arguments = (vllm["kernels"][kernel], table, 3 * page * shards - 5, page, shards)
        ranks = [slots_of(*arguments, shard, interleave) for shard in range(shards)]
        for token, slots in enumerate(zip(*ranks, strict=True)):
            turn, shard = divmod(token // interleave, shards)
            place = turn * interleave + token % interleave
            expected = [-1] * shards
            expected[shard] = table[place // page] * page + place % page
            assert list(slots) == expected, (page, shards, interleave, token)


def test_a_block_spans_the_tokens_of_all_shards_of_a_divided_group(vllm: dict[str, Any]) -> None:
    scope: dict[str, Any] = {}
    exec(vllm["span"], scope)  # noqa: S102  # vLLM's own function
    for is_divided, expected in ((True, 128), (False, 16)):
        assert scope["resolve_dcp_kv_block_size"](SimpleNamespace(block_size=16, dcp_sharded=is_divided), 8) == expected


def test_the_installed_vllm_is_one_of_them() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    version = re.search(r"__version__ = .*'(\d+\.\d+)", Path(spec.origin).with_name("_version.py").read_text())
    assert version is not None
    tree = Path(spec.origin).parents[1]
    assert contract.describe(contract.reader(tree)) == json.loads(VERSIONS[version[1]].read_text())

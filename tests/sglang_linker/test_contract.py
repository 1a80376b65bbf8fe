"""SGLang has everything that the linker uses, with the parameters of its calls."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.sglang import contract


@pytest.fixture
def read() -> contract.Read:
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    return contract.reader(Path(spec.origin).parents[1])


def test_the_installed_sglang_has_all_that_is_used(read: contract.Read) -> None:
    assert not contract.problems(read)


@pytest.mark.parametrize(
    ("path", "before", "after", "problem"),
    [
        (contract.LINKER, ", session_id: Optional[str]=None", "", "UnifiedCacheLinker.offload has"),
        (contract.LINKER, "def finish_layer_wise_loading(self, counter_index", "def a(self, x", "finish_layer_wise"),
        (contract.LINKER, "def match(self, key", "def match(self, prompt", "UnifiedCacheLinkerWrapper.match"),
        (contract.LINKER, "self.inflight_load_rids.append(req.rid)", "", "the request owns the slots of a load"),
        (contract.POLICY, "if loaded is None", "if loaded", "a load is tried again"),
        (contract.POLICY, "NO_TOKEN = auto()", "", "AddReqResult lacks NO_TOKEN"),
        ("mem_cache/unified_cache/linker_factory.py", "forward_stream=forward_stream", "", "are constructed so"),
        ("mem_cache/memory_pool.py", "k_buffer", "keys", "MHATokenToKVPool lacks k_buffer"),
        (contract.UPDATER, "def begin_weight_update", "def update_weights_from_moon", "and no hook is around it"),
        ("mem_cache/unified_radix_cache.py", "def path_device_indices", "def path_indices", "path_device_indices"),
    ],
)  # fmt: skip
def test_a_change_of_sglang_is_noticed(path: str, before: str, after: str, problem: str, read: contract.Read) -> None:
    """0.5.22 differs from 0.5.23 in the first of these lines."""
    changed = _plain(read(path)).replace(before, after)
    assert changed != _plain(read(path))
    found = contract.problems(lambda name: changed if name == path else read(name))
    assert any(problem in each for each in found)


def _plain(source: str) -> str:
    """Return the source as `ast` formats it, without comments and line breaks."""
    return ast.unparse(ast.parse(source))

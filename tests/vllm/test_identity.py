"""Two engines that differ in anything that decides the KV never share; two that agree always do."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.keys import PrefixHasher
from kvdepot.testing.processes import DepotProcess
from kvdepot_vllm.identity import RequestIdentity, engine_namespace, fingerprint
from kvdepot_vllm.settings import Settings
from tests.vllm.conftest import MakeModel
from tests.vllm.engines import Engine, cached, connector, prompts, tokens


class Config:
    """A model configuration as transformers has it."""

    _commit_hash = None

    def __init__(self, **values: Any) -> None:
        self.values = {
            "hidden_size": 256,
            "rope_parameters": {"rope_theta": 1e4},
            "transformers_version": "5.0",
            **values,
        }

    def to_dict(self) -> dict[str, Any]:
        return self.values


def vllm_config(model: Path | str, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model": str(model), "revision": None, "code_revision": None, "dtype": "torch.bfloat16", "quantization": None,
        "seed": 0, "hf_config": Config(**changes.pop("config", {})),
    }  # fmt: skip
    cache_dtype, load_format = changes.pop("cache_dtype", "auto"), changes.pop("load_format", "auto")
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**fields, **changes}),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        load_config=SimpleNamespace(load_format=load_format),
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with a large file of weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 8192)
    (path / "README.md").write_text("a model")
    return path


def digest(model: Path | str, settings: Settings | None = None, **changes: Any) -> bytes:
    return engine_namespace(vllm_config(model, **changes), settings or Settings()).digest(64)


CHANGES: dict[str, dict[str, Any]] = {
    "revision": {"revision": "v2"},
    "dtype": {"dtype": "torch.float16"},
    "quantization": {"quantization": "awq"},
    "KV dtype": {"cache_dtype": "fp8"},
    "code": {"code_revision": "abc"},
    "rope": {"config": {"rope_parameters": {"rope_theta": 1e6}}},
    "random weights": {"load_format": "dummy"},
    "other random weights": {"load_format": "dummy", "seed": 1},
    "tenant": {"settings": Settings(tenant="other")},
    "tenant's salt": {"settings": Settings(tenant_salt="secret")},
    "namespace": {"settings": Settings(namespace="canary")},
    "name of the weights": {"settings": Settings(weights="v1")},
}


@pytest.mark.promise(19)
def test_engines_that_differ_never_share(weights: Path) -> None:
    found = {name: digest(weights, **changes) for name, changes in CHANGES.items()}
    found["unchanged"] = digest(weights)
    found["another path"] = digest("some/model")
    assert len(set(found.values())) == len(found)


def test_what_does_not_decide_the_kv_does_not_matter(weights: Path) -> None:
    before = digest(weights)
    (weights / "README.md").write_text("a better text")
    (weights / "model.safetensors").touch()
    assert digest(weights, config={"transformers_version": "5.1", "_name_or_path": "elsewhere"}) == before


@pytest.mark.parametrize("place", [0, 1 << 20, (2 << 20) - 1])
@pytest.mark.promise(19)
def test_weights_that_changed_in_place_are_others(place: int, weights: Path) -> None:
    before = digest(weights)
    content = bytearray((weights / "model.safetensors").read_bytes())
    content[place : place + 65536] = bytes(len(content[place : place + 65536]))
    (weights / "model.safetensors").write_bytes(content)
    assert digest(weights) != before


def test_a_copy_of_the_weights_has_the_same_fingerprint(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes())
    assert fingerprint(copy) == fingerprint(weights)


@pytest.mark.parametrize("seed", ["0", "1", "random"])
@pytest.mark.promise(19)
def test_processes_agree_without_a_hash_seed(seed: str, weights: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.vllm.test_identity import digest\n"
        "print(digest(Path(sys.argv[1])).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(weights)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == digest(weights).hex()


# --- requests -------------------------------------------------------------------------------------------------------


def request(**changes: Any) -> Any:
    nothing: dict[str, Any] = {"lora_request": None, "cache_salt": None, "prompt_embeds": None, "mm_features": []}
    return SimpleNamespace(**{**nothing, **changes})


def adapter(path: Path, name: str = "a") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), load_inplace=False)


def item(identifier: str, offset: int, modality: str = "image") -> Any:
    return SimpleNamespace(
        identifier=identifier, modality=modality, mm_position=SimpleNamespace(offset=offset, length=40)
    )


def keys_of(weights: Path, **changes: Any) -> bytes:
    hasher = PrefixHasher(
        engine_namespace(vllm_config(weights), Settings()), 16, RequestIdentity().extra_keys(request(**changes))
    )
    hasher.extend(range(160))
    return hasher.run().digests


@pytest.mark.promise(19)
def test_requests_that_differ_never_share(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_model.safetensors").write_bytes(b"weights")
    found: dict[str, bytes] = {
        "plain": keys_of(weights),
        "adapter": keys_of(weights, lora_request=adapter(weights)),
        "adapter under another name": keys_of(weights, lora_request=adapter(weights, "b")),
        "another adapter": keys_of(weights, lora_request=adapter(tmp_path / "other")),
        "salt": keys_of(weights, cache_salt="a"),
        "another salt": keys_of(weights, cache_salt="b"),
        "image": keys_of(weights, mm_features=[item("x", 0)]),
        "another image": keys_of(weights, mm_features=[item("y", 0)]),
        "video": keys_of(weights, mm_features=[item("x", 0, "video")]),
    }
    first = {name: digests[:32] for name, digests in found.items()}
    assert len(set(first.values())) == len(first), "already the first chunk differs"


def test_an_image_matters_from_where_it_begins(weights: Path) -> None:
    plain, early, late = (keys_of(weights, mm_features=items) for items in ([], [item("x", 40)], [item("x", 47)]))
    assert plain[:64] == early[:64] == late[:64]
    assert len({plain[64:96], early[64:96], late[64:96]}) == 3, "the same image, one place further"


def test_an_adapter_whose_files_changed_is_another(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    before = RequestIdentity().extra_keys(request(lora_request=adapter(tmp_path)))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"others!")
    assert RequestIdentity().extra_keys(request(lora_request=adapter(tmp_path))) != before


def test_prompt_embeddings_are_told_by_their_content() -> None:
    torch = pytest.importorskip("torch")
    one, same, other = torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8) * 2
    found = [RequestIdentity().extra_keys(request(prompt_embeds=tensor)) for tensor in (one, same, other)]
    assert found[0] == found[1] != found[2]


def test_real_multimodal_requests_have_what_is_read(weights: Path) -> None:
    # the attributes are vLLM's: a new version that renames them must fail here
    inputs: Any = pytest.importorskip("vllm.multimodal.inputs")
    feature = inputs.MultiModalFeatureSpec(
        data=None, modality="image", identifier="x", mm_position=inputs.PlaceholderRange(offset=40, length=40)
    )
    assert keys_of(weights, mm_features=[feature]) == keys_of(weights, mm_features=[item("x", 40)])


# --- real engines ---------------------------------------------------------------------------------------------------

PROMPTS = prompts(2, 500, seed=30)


@pytest.mark.promise(19, 22)
def test_salts_and_adapters_share_with_nobody_but_themselves(
    depot: DepotProcess, model: MakeModel, make_adapter: Callable[[Path, int], Path]
) -> None:
    path = model("gqa")
    adapters = [["one", str(make_adapter(path, 1)), "1"], ["two", str(make_adapter(path, 2)), "2"]]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prefix_caching": False}
    with Engine(path, connector(depot.url), **options) as engine:
        ways: list[dict[str, Any]] = [
            {},
            {"salt": "a"},
            {"salt": "b"},
            {"adapter": adapters[0]},
            {"adapter": adapters[1]},
        ]
        private = {"kvdepot": {"load": False, "store": False}}
        expected = [tokens(engine.generate(PROMPTS, params=private, **way)) for way in ways]
        assert expected[0] == expected[1] == expected[2]
        assert len({json.dumps(output) for output in expected}) == 3, (
            "the adapters change nothing: the test shows nothing"
        )
        for way, wanted in zip(ways, expected, strict=True):
            cold = engine.generate(PROMPTS, **way)
            assert (tokens(cold), cached(cold)) == (wanted, [0, 0]), way
        for way, wanted in zip(ways, expected, strict=True):
            warm = engine.generate(PROMPTS, **way)
            assert (tokens(warm), cached(warm)) == (wanted, [384, 384]), way


@pytest.mark.promise(19)
def test_another_engine_with_other_weights_or_dtype_finds_nothing(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(model("gqa"), connector(depot.url)) as engine:
        engine.generate(PROMPTS)
        engine.reset()
        assert cached(engine.generate(PROMPTS)) == [384, 384]
    with Engine(model("gqa", 1), connector(depot.url), reference=PROMPTS) as other:
        outputs = other.generate(PROMPTS)
        assert (tokens(outputs), cached(outputs)) == (other.reference, [0, 0])
    with Engine(model("gqa"), connector(depot.url), dtype="bfloat16") as other:
        assert cached(other.generate(PROMPTS)) == [0, 0]


@pytest.mark.promise(58)
def test_a_reset_with_the_connector_is_one_engine_s_own(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(model("gqa"), connector(depot.url)) as engine:
        engine.generate(PROMPTS)
        engine.reset(connector=True)
        assert cached(engine.generate(PROMPTS)) == [0, 0], "its weights may have changed"
        engine.reset()
        assert cached(engine.generate(PROMPTS)) == [384, 384], "the new generation has its own"
        with Engine(model("gqa"), connector(depot.url)) as other:
            assert cached(other.generate(PROMPTS)) == [384, 384], "nobody else lost anything"

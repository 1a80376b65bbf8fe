"""Two engines that differ in anything that determines the KV never share. Two that agree always do."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.config import format_size
from kvdepot.engines.identity import fingerprint
from kvdepot.keys import PrefixHasher
from kvdepot.lab.processes import DepotProcess
from kvdepot_vllm.contents import EngineContents
from kvdepot_vllm.identity import engine_namespace, extra_keys
from kvdepot_vllm.params import SharedHead
from kvdepot_vllm.settings import Settings
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens
from support.vllm.identity import Config, digest, vllm_config
from support.weights import model_tensors, safetensors


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with a file of weights."""
    safetensors(tmp_path / "model" / "model.safetensors", model_tensors())
    (tmp_path / "model" / "README.md").write_text("a model")
    return tmp_path / "model"


CHANGES: dict[str, dict[str, Any]] = {
    "revision": {"revision": "v2"},
    "dtype": {"dtype": "torch.float16"},
    "quantization": {"quantization": "awq"},
    "KV dtype": {"cache_dtype": "fp8"},
    "states' dtype": {"cache": {"mamba_cache_dtype": "float16"}},
    "dtype of the SSM's states": {"cache": {"mamba_ssm_cache_dtype": "float16"}},
    "layers left in full precision": {"cache": {"kv_cache_dtype_skip_layers": ["0", "1"]}},
    "other layers left": {"cache": {"kv_cache_dtype_skip_layers": ["0", "2"]}},
    "code": {"code_revision": "abc"},
    "rope": {"config": {"rope_parameters": {"rope_theta": 1e6}}},
    "random weights": {"load_format": "dummy"},
    "other random weights": {"load_format": "dummy", "seed": 1},
    "random weights of each rank": {"load_format": "dummy", "ranks": 2},
    "equal bits wanted": {"is_batch_invariant": True},
    "equal bits wanted of two ranks": {"is_batch_invariant": True, "ranks": 2},
    "tenant": {"settings": Settings(tenant="other")},
    "tenant's salt": {"settings": Settings(tenant_salt="secret")},
    "namespace": {"settings": Settings(namespace="canary")},
    "where a loader finds them": {"load_format": "tensorizer", "load": {"model_loader_extra_config": {"uri": "a"}}},
    "where else": {"load_format": "tensorizer", "load": {"model_loader_extra_config": {"uri": "b"}}},
    "name of the weights": {"settings": Settings(weights="v1")},
}


@pytest.mark.promise(19)
def test_engines_that_differ_never_share(weights: Path) -> None:
    found = {name: digest(weights, **changes) for name, changes in CHANGES.items()}
    found["unchanged"] = digest(weights)
    found["weights that are not here"] = digest("some/model")
    found["others that are not here"] = digest("other/model")
    assert len(set(found.values())) == len(found)


def test_settings_that_do_not_decide_the_kv_do_not_matter(weights: Path) -> None:
    before = digest(weights)
    (weights / "README.md").write_text("a better text")
    (weights / "model.safetensors").touch()
    assert digest(weights, config={"transformers_version": "5.1", "_name_or_path": "elsewhere"}) == before


@pytest.mark.promise(69)
def test_the_log_says_how_many_bytes_may_change_unnoticed_and_more_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Regression: 204 neighbouring rows of an embedding were zeroed without a new fingerprint and without a log line.
    rows, row_bytes = 2048, 1024
    embedding = random.Random(6).randbytes(rows * row_bytes)

    def known(first: int, count: int) -> bytes:
        zeroed = embedding[:first] + bytes(count) + embedding[first + count :]
        safetensors(tmp_path / "model" / "model.safetensors", {"embedding": zeroed, "norm": bytes(64)})
        return digest(tmp_path / "model")

    caplog.set_level("INFO")
    before, unseen = known(0, 0), fingerprint(tmp_path / "model").unseen_bytes
    assert f"up to {format_size(unseen)} in a row" in caplog.text
    assert 0 < unseen < 204 * row_bytes
    assert before not in {known(first, unseen + 1) for first in range(0, len(embedding) - unseen, 97_003)}
    assert known(1024, unseen - 1) == before  # after the first sample; gaps differ by a byte
    assert known(50 * row_bytes, 204 * row_bytes) != before
    (tmp_path / "small").mkdir()
    caplog.clear()
    safetensors(tmp_path / "small" / "model.safetensors", {"embedding": embedding[:32_000]})
    digest(tmp_path / "small")
    assert "in a row" not in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
@pytest.mark.promise(69)
def test_files_whose_tensors_cannot_be_told_apart_are_named_in_the_log(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / name).write_bytes(b"\x80\x02" + random.Random(1).randbytes(2 << 20))
    first, second = (digest(folder) for folder in folders)
    assert first != second, "what the samples do not see, the path still tells apart"
    assert f"{folders[0]}: of {name} only even samples are in the fingerprint" in caplog.text
    assert "setting `weights`" in caplog.text
    (folders[0] / name).write_bytes(bytes(2 << 20))
    assert digest(folders[0]) != first


@pytest.mark.parametrize(
    ("load_format", "commit", "text"),
    [
        ("auto", None, "by that name and nothing else"),
        ("auto", "c0ffee", "the commit c0ffee"),
        ("tensorizer", None, "load format tensorizer"),
    ],
)
@pytest.mark.promise(69)
def test_weights_without_a_fingerprint_are_named_in_the_log(
    load_format: str, commit: str | None, text: str, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = Config()
    vars(config).update(_commit_hash=commit)
    engine_namespace(
        vllm_config(
            weights if load_format == "tensorizer" else "some/model", load_format=load_format, hf_config=config
        ),
        Settings(),
    )
    assert text in caplog.text


def test_a_folder_without_weights_is_known_by_its_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hf_quant_config.json").write_text("{}")
    assert digest(tmp_path / "a") != digest(tmp_path / "b")
    assert "no file of a known kind" in caplog.text


def test_weights_in_an_object_store_are_known_by_its_address() -> None:
    """VLLM loads the configuration into a folder with a new name every time."""
    first, same, other = (
        digest(folder, model_weights=address)
        for folder, address in (("/tmp/a", "s3://models/m"), ("/tmp/b", "s3://models/m"), ("/tmp/a", "s3://models/n"))
    )
    assert first == same != other


def test_the_number_of_ranks_does_not_count_unless_equal_bits_are_wanted(weights: Path) -> None:
    assert digest(weights, ranks=2) == digest(weights)


@pytest.mark.promise(69)
def test_equal_weights_under_two_paths_share(weights: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(weights, tmp_path / "copy"))
    assert fingerprint(copy) == fingerprint(weights)
    assert digest(copy) == digest(weights)
    assert digest(copy, load_format="dummy") != digest(weights, load_format="dummy"), "made up: the files say nothing"
    named = Settings(weights="v1")
    assert digest(copy, named) != digest(weights, named), "a name says less than the content"


# --- the part of the configuration that counts ----------------------------------------------------------------------

LONG: dict[str, Any] = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}
NESTED: dict[str, Any] = {"text_config": {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}}
LLAMA4: dict[str, Any] = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}


@pytest.mark.parametrize(
    ("config", "within", "above"), [(LONG, 4096, 4097), (NESTED, 512, 131072), (LLAMA4, 8192, 1 << 20)]
)
@pytest.mark.promise(70)
def test_lengths_on_either_side_of_a_switch_never_share(
    config: dict[str, Any], within: int, above: int, weights: Path
) -> None:
    """`max_model_len` alone changes the factors by which LongRoPE rotates keys, and Llama 4's tuning of attention."""
    shorter, short, long, longer, fitted = (
        digest(weights, config=config, max_model_len=tokens, original_max_model_len=asked)
        for tokens, asked in ((within - 1, None), (within, None), (above, None), (above + 1, None), (within, -1))
    )
    assert shorter == short != long == longer
    assert fitted not in (short, long), "vLLM built the model for more than it then had memory for"


def test_other_models_share_whatever_their_longest_request(weights: Path) -> None:
    assert digest(weights, max_model_len=4096) == digest(weights, max_model_len=131072)


def drafter(model: Path | str, method: str = "eagle3", **changes: Any) -> Any:
    draft = vllm_config(model, **changes)
    return SimpleNamespace(
        method=method,
        draft_model_config=draft.model_config,
        draft_load_config=None,
        kv_cache_dtype=None,
        uses_draft_kv_cache=lambda: method != "medusa",
    )


@pytest.mark.promise(70)
def test_drafters_that_differ_never_share(weights: Path, tmp_path: Path) -> None:
    """A drafter's layers are part of every chunk, like the model's."""
    one = safetensors(tmp_path / "one" / "model.safetensors", {"fc": b"1" * 5000}).parent
    two = safetensors(tmp_path / "two" / "model.safetensors", {"fc": b"2" * 5000}).parent
    found = [
        digest(weights, speculative=speculative)
        for speculative in (
            None,
            drafter(one),
            drafter(two),
            drafter(one, "draft_model"),
            drafter("hub/drafter"),
            drafter("hub/drafter", revision="v2"),
            drafter(one, config={"hidden_size": 128}),
            drafter(weights, "mtp"),
        )
    ]
    assert len(set(found)) == len(found)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    assert digest(weights, speculative=drafter(copy)) == found[1]
    assert digest(weights, speculative=drafter(one, "medusa")) == found[0], "it has no KV cache"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
@pytest.mark.promise(19)
def test_processes_agree_without_a_hash_seed(seed: str, weights: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from support.vllm.identity import digest\n"
        "print(digest(Path(sys.argv[1])).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(weights)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == digest(weights).hex()


# --- requests -------------------------------------------------------------------------------------------------------


def request(**changes: Any) -> Any:
    nothing: dict[str, Any] = {
        "lora_request": None,
        "cache_salt": None,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "mm_features": [],
    }
    return SimpleNamespace(**{**nothing, **changes})


def adapter(path: Path, name: str = "a", number: int = 1) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=False)


def item(identifier: str, offset: int, modality: str = "image") -> Any:
    return SimpleNamespace(
        identifier=identifier, modality=modality, mm_position=SimpleNamespace(offset=offset, length=40)
    )


def keys_of(weights: Path, head: SharedHead | None = None, **changes: Any) -> bytes:
    asked = request(**changes)
    extra = extra_keys(asked, EngineContents(lambda: None, keeps_names=False).of(asked).adapter, head)
    hasher = PrefixHasher(engine_namespace(vllm_config(weights), Settings()), 16, extra)
    hasher.extend(range(160))
    return hasher.run().digests


@pytest.mark.promise(19)
def test_requests_that_differ_never_share(weights: Path, tmp_path: Path) -> None:
    make_adapter_files(tmp_path / "other", b"2")
    found: dict[str, bytes] = {
        "plain": keys_of(weights),
        "adapter": keys_of(weights, lora_request=adapter(weights)),
        "another adapter": keys_of(weights, lora_request=adapter(tmp_path / "other")),
        "salt": keys_of(weights, cache_salt="a"),
        "another salt": keys_of(weights, cache_salt="b"),
        "image": keys_of(weights, mm_features=[item("x", 0)]),
        "another image": keys_of(weights, mm_features=[item("y", 0)]),
        "video": keys_of(weights, mm_features=[item("x", 0, "video")]),
    }
    first = {name: digests[:32] for name, digests in found.items()}
    assert len(set(first.values())) == len(first), "already the first chunk differs"


@pytest.mark.promise(19)
def test_users_with_salts_of_their_own_share_the_head_that_they_name_and_nothing_behind_it(weights: Path) -> None:
    head = SharedHead(70)
    plain = keys_of(weights)
    a, b = (keys_of(weights, head, cache_salt=salt) for salt in "ab")
    assert a[: 4 * 32] == b[: 4 * 32] == plain[: 4 * 32], "64 tokens: the fifth chunk reaches beyond the head"
    assert len({each[place : place + 32] for each in (a, b, plain) for place in range(4 * 32, 320, 32)}) == 3 * 6
    assert keys_of(weights, SharedHead(80), cache_salt="a")[: 5 * 32] == plain[: 5 * 32]


@pytest.mark.promise(19)
def test_only_users_who_agree_on_a_salt_share_a_head_that_has_one(weights: Path) -> None:
    a, b = (keys_of(weights, SharedHead(64, "team"), cache_salt=salt) for salt in "ab")
    others = [
        keys_of(weights),
        keys_of(weights, SharedHead(64, "other"), cache_salt="a"),
        keys_of(weights, cache_salt="a"),
    ]
    assert a[: 4 * 32] == b[: 4 * 32]
    assert a[4 * 32 :] != b[4 * 32 :]
    assert all(a[:32] != other[:32] for other in others)


@pytest.mark.parametrize(
    "wishes",
    [{}, {"shared_tokens": 0}, {"shared_tokens": "9"}, {"shared_tokens": True}, {"shared_tokens": 9, "shared_salt": 1}],
)
def test_a_wrong_head_shares_nothing(wishes: dict[str, Any]) -> None:
    assert SharedHead.parse(wishes) is None


def test_an_image_matters_from_where_it_begins(weights: Path) -> None:
    plain, early, late = (keys_of(weights, mm_features=items) for items in ([], [item("x", 40)], [item("x", 47)]))
    assert plain[:64] == early[:64] == late[:64]
    assert len({plain[64:96], early[64:96], late[64:96]}) == 3, "the same image, one place further"


def make_adapter_files(folder: Path, content: bytes) -> Path:
    return safetensors(folder / "adapter_model.safetensors", {"lora_A": content * 64}).parent


def test_an_adapter_is_known_by_its_content_under_any_name_and_path(weights: Path, tmp_path: Path) -> None:
    """Two pods with the same adapter share. An adapter that replaced another one does not share with it."""
    first, copy = (make_adapter_files(tmp_path / name, b"1") for name in ("first", "copy"))
    keys = [keys_of(weights, lora_request=each) for each in (adapter(first), adapter(copy), adapter(copy, "b", 7))]
    assert keys[0] == keys[1] == keys[2]
    make_adapter_files(copy, b"2")
    assert keys_of(weights, lora_request=adapter(copy)) != keys[0]


def test_an_adapter_without_a_fingerprint_is_known_by_its_name_and_path(weights: Path, tmp_path: Path) -> None:
    """Adapters passed in memory have a path that does not exist."""
    gone = tmp_path / "gone"
    adapters = adapter(gone), adapter(gone, "b"), adapter(tmp_path / "away"), adapter(gone)
    keys = [keys_of(weights, lora_request=each) for each in adapters]
    assert keys[0] == keys[3]
    assert len({*keys}) == 3


def test_prompt_embeddings_are_told_by_their_content() -> None:
    torch = pytest.importorskip("torch")
    one, same, other = torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8) * 2
    found = [extra_keys(request(prompt_embeds=tensor)) for tensor in (one, same, other)]
    assert found[0] == found[1] != found[2]


@pytest.mark.promise(84)
def test_prompts_of_the_same_embeddings_are_told_by_the_places_of_their_tokens() -> None:
    """Regression: vLLM sets the ids of embedded places to 0, so that token 0 and an embedding had one key."""
    torch = pytest.importorskip("torch")
    embeddings = torch.ones(4, 8)
    none, first, same, last, all_embedded = (
        extra_keys(request(prompt_embeds=embeddings, prompt_is_token_ids=mask))
        for mask in (None, [True, *[False] * 3], [True, *[False] * 3], [*[False] * 3, True], [False] * 4)
    )
    assert first == same
    assert len({repr(each) for each in (none, first, last, all_embedded)}) == 4


KEY_OF_ONES = "92a6656d62656473c42059c83c031a1231bc30d55dc07e24a57c4ef75c6f139fe57b11b107653d50bb70"


def test_a_prompt_of_embeddings_alone_keeps_its_key_over_releases() -> None:
    torch = pytest.importorskip("torch")
    ((first, end, key),) = extra_keys(request(prompt_embeds=torch.ones(4, 8)))
    assert (first, end, key.hex()) == (0, 1 << 40, KEY_OF_ONES)


def test_real_multimodal_requests_have_what_is_read(weights: Path) -> None:
    # if a new vLLM renames these attributes, this test must fail
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
        # The same content under another name and path is the same adapter. Other content under its path is another one.
        one, two = (Path(folder) for _, folder, _ in adapters)
        copy = engine.generate(PROMPTS, adapter=["copy", str(shutil.copytree(one, one.with_name("copy"))), "3"])
        assert (tokens(copy), cached(copy)) == (expected[3], [384, 384])
        shutil.copytree(two, one, dirs_exist_ok=True)
        replaced = engine.generate(PROMPTS, adapter=["one", str(one), "4"])
        assert (tokens(replaced), cached(replaced)) == (expected[4], [384, 384])


@pytest.mark.promise(19)
def test_users_with_own_salts_share_the_head_that_both_declare_and_nothing_else(
    depot: DepotProcess, model: MakeModel
) -> None:
    wanted, head = prompts(2, 500, seed=32, shared=300), {"kvdepot": {"shared_tokens": 300}}
    salts: list[dict[str, Any]] = [{"salt": "a"}, {"salt": "b"}]
    with Engine(model("gqa"), connector(depot.url), reference=wanted, enable_prefix_caching=False) as engine:

        def serve(wishes: dict[str, Any]) -> list[int]:
            outputs = [
                engine.generate([prompt], params=wishes, **salt)[0] for prompt, salt in zip(wanted, salts, strict=True)
            ]
            assert tokens(outputs) == engine.reference
            return cached(outputs)

        assert serve({}) == [0, 0]
        assert serve(head) == [0, 256], "the chunk beyond the head is private"
        assert serve(head) == serve({}) == [384, 384], "each user finds all of the own prompt"
        swapped = engine.generate([wanted[0]], params=head, salt="b")
        assert (tokens(swapped), cached(swapped)) == ([engine.reference[0]], [256]), "the same prompt of another user"


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


OTHER_NAMES = """
import vllm
import vllm.v1.attention.backends.cpu_attn as backend
vllm.__version__ = "0.99.0"
backend.CPUAttentionBackend.__name__ = "AnotherBackend"
backend._get_attn_isa = lambda *_: "vec16"
"""
OTHER_PAGES = """
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Kernels
written = Kernels.do_kv_cache_update
Kernels.do_kv_cache_update = lambda self, layer, k, v, *rest: written(self, layer, v, k, *rest)
"""


@pytest.mark.promise(69, 70)
def test_equal_weights_share_under_other_paths_and_names_but_not_over_other_pages(
    depot: DepotProcess, model: MakeModel, tmp_path: Path
) -> None:
    """An engine with another minor version, attention backend and instruction set finds pages like its own."""
    wanted = prompts(2, 500, seed=31)
    copy = Path(shutil.copytree(model("gqa"), tmp_path / "copy"))
    with Engine(model("gqa"), connector(depot.url), reference=wanted) as engine:
        engine.generate(wanted)
        workers = [context.format for context in depot.status().contexts if context.role == "worker"]
        assert workers
        assert all(name.startswith("vllm 0 seen ") for name in workers)
        with Engine(copy, connector(depot.url), first=OTHER_NAMES) as same:
            outputs = same.generate(wanted)
            assert (tokens(outputs), cached(outputs)) == (engine.reference, [384, 384])
        with Engine(copy, connector(depot.url), first=OTHER_PAGES) as other:
            assert cached(other.generate(wanted)) == [0, 0]
            other.reset()
            assert cached(other.generate(wanted)) == [384, 384], "it has its own"


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

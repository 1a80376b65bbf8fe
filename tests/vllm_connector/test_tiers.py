"""Prefixes from disk, for each kind of cache: the same tokens, and loaded bytes equal stored bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate.cli import main
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens

# Three: from the fourth promotion on, the depot compares the speeds of tier and engine, and may prefer computation.
PROMPTS = prompts(1, 1500) + prompts(2, 1000, seed=1, shared=600)

# Model, options, cached tokens, tokens that vLLM counts as hits from disk, chunks of all prompts. The last two prompts
# begin with the same four chunks. A pool that promoted them with the first of the two has no window or state there.
CASES: dict[str, tuple[str, dict[str, Any], list[int], int, int]] = {
    "grouped queries": ("gqa", {}, [1408, 896, 896], 1408 + 896 + 384, 21),
    "sliding windows": ("windows", {}, [1408, 896, 896], 1408 + 896 + 896, 21),
    # vLLM's default type of states depends on the CPU: without AVX-512 BF16, blocks had 128 tokens instead of 256.
    "recurrent states": (
        "recurrent",
        {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "kv_cache_memory_bytes": 256 << 20},
        [1280, 768, 768],
        1280 + 768 + 768,
        9,
    ),
}  # fmt: skip


def wait_until_in_tier(depot: DepotProcess, num_chunks: int) -> None:
    """Wait until the depot has all chunks of the prompts, including later stores, and has written them."""
    wait_until(lambda: depot.status().num_chunks == num_chunks and not depot.status().num_tickets, 60)
    wait_until(lambda: not depot.status().tiers[0].queued_write_bytes, 60)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.promise(29, 32)
def test_evicted_chunks_come_back_from_disk(case: str, model: MakeModel, tmp_path: Path) -> None:
    name, options, expected, num_from_disk, num_chunks = CASES[case]
    all_options: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20, "max_tokens": 4, **options}
    with (
        DepotProcess(
            "--tier",
            f"disk://{tmp_path}/tier?capacity=4GiB",
            "--promote-seconds",
            "30",
            pool_size="512MiB",
            new_session=True,
        ) as depot,
        Engine(model(name), connector(depot.url), reference=PROMPTS, **all_options) as engine,
    ):
        engine.ask("watch")
        assert tokens(engine.generate(PROMPTS, together=False)) == engine.reference
        wait_until_in_tier(depot, num_chunks)
        depot.kill()
        for path in depot.pool_directory.glob("*"):
            path.unlink()
        depot.start()
        wait_until(lambda: len(depot.status().contexts) == 2, 60)
        wait_until(lambda: depot.status().tiers[0].num_entries > 0, 60, what="the list of the folder")
        engine.reset()
        warm = engine.generate(PROMPTS, together=False)
        assert tokens(warm) == engine.reference
        assert cached(warm) == expected
        assert engine.hit_sources().get("disk") == num_from_disk
        watched = engine.execute("result = child.watched")
        assert watched["loaded"] >= 10
        assert (watched["wrong"], watched["unknown"]) == (0, 0)
        assert depot.status().counters["entries_promoted"] > 0


def test_prompts_are_warmed_by_their_tokens_before_an_engine_asks(
    model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = f"disk://{tmp_path}/tier?capacity=4GiB"
    with (
        DepotProcess("--tier", tier, pool_size="512MiB", new_session=True) as depot,
        Engine(model("gqa"), connector(depot.url), reference=PROMPTS, kv_cache_memory_bytes=128 << 20) as engine,
    ):
        engine.generate(PROMPTS, together=False)
        wait_until_in_tier(depot, 21)
        depot.kill()
        for path in depot.pool_directory.glob("*"):
            path.unlink()
        depot.start()
        wait_until(lambda: len(depot.status().contexts) == 2, 60)
        wait_until(lambda: depot.status().tiers[0].num_entries > 0, 60, what="the list of the folder")
        (said,) = re.findall(r'beside "tokens": (\{.*\})', engine.log())
        file = tmp_path / "prompts"
        file.write_text("".join(json.dumps({"tokens": prompt, **json.loads(said)}) + "\n" for prompt in PROMPTS))

        with pytest.raises(SystemExit) as ended:
            main(["warm", str(file), "--url", depot.url])
        assert not ended.value.code
        chunk = json.loads(said)["chunk_tokens"]
        asked = sum(len(prompt) // chunk for prompt in PROMPTS)
        assert capsys.readouterr().out == f"{asked:,} of {asked:,} chunks are in the pool\n"
        promoted = depot.status().counters["entries_promoted"]
        assert promoted > 0
        engine.reset()
        warm = engine.generate(PROMPTS, together=False)
        assert tokens(warm) == engine.reference
        assert cached(warm) == [1408, 896, 896]
        assert depot.status().counters["entries_promoted"] == promoted, "the engine waited for no tier"

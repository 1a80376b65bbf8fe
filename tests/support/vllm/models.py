# pyright: basic, reportMissingImports=false
"""Makes tiny models with random weights. Prompts are token ids.

`python models.py DIRECTORY NAME SEED` or `python models.py DIRECTORY adapter MODEL SEED` prints the path.
"""

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 2048
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": VOCABULARY - 1,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
_SMALL: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, **_COMMON}
_TINY: dict[str, Any] = {"intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64, **_SMALL}
_MLA: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    **_COMMON,
}


def _configurations() -> dict[str, Any]:
    import transformers as t

    return {
        "gqa": lambda: t.LlamaConfig(**_TINY),
        "eight-heads": lambda: t.LlamaConfig(
            **{**_TINY, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
        ),
        # 128 KiB of float32 KV a token and little computation, for benchmarks of a cache
        "large-kv": lambda: t.LlamaConfig(
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=16,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=128,
            **_COMMON,
        ),
        # for prompts of 10,000 tokens, whose KV has 328 MB in float32
        "long": lambda: t.LlamaConfig(
            **{
                **_TINY,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "max_position_embeddings": 16384,
            }
        ),
        # the shape of Llama 3.1 8B: only the configuration is written, for engines that make up random weights
        "8b": lambda: t.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131072,
            bos_token_id=0,
            eos_token_id=1,
        ),
        # the shape of SmolLM2-135M: a realistic ratio of computation to KV
        "smol": lambda: t.LlamaConfig(
            intermediate_size=1536,
            num_hidden_layers=30,
            head_dim=64,
            **{**_SMALL, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
        ),
        "mla": lambda: t.DeepseekV2Config(**_MLA),
        # runs in SGLang on every CPU: without experts, with YaRN
        "mla-dense": lambda: t.DeepseekV2Config(
            moe_layer_freq=1,
            rope_parameters={"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.7, **_YARN},
            **{**_MLA, "first_k_dense_replace": 3},
        ),
        "mla-yarn": lambda: t.DeepseekV2Config(
            rope_parameters={"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.7, **_YARN}, **_MLA
        ),
        "qk-norm": lambda: t.Qwen3Config(**_TINY),
        "yarn": lambda: t.LlamaConfig(rope_parameters={"rope_theta": 1e4, **_YARN}, **_TINY),
        "scaled": lambda: t.LlamaConfig(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            **_TINY,
        ),
        "partial": lambda: t.Glm4Config(**_TINY),  # rotates half of the dims, in pairs of neighbours
        "learned": lambda: t.GPT2Config(n_embd=256, n_head=4, n_layer=4, n_positions=8192, **_COMMON),
        "windows": lambda: t.Gemma3TextConfig(
            sliding_window=512,
            query_pre_attn_scalar=64,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            **{**_TINY, "num_hidden_layers": 6},
        ),
        "only-windows": lambda: t.MistralConfig(sliding_window=512, **_TINY),
        "short-windows": lambda: t.GptOssConfig(
            sliding_window=128,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **{**_TINY, "intermediate_size": 256},
        ),
        # SGLang keeps this model's windows in a pool of their own, and runs it on CPU
        "window-pool": lambda: t.MellumConfig(
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
            mlp_layer_types=["dense"] * 4,
            **_TINY,
        ),
        "recurrent": lambda: t.Qwen3NextConfig(
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            layer_types=["linear_attention"] * 2 + ["full_attention"],
            **{**_TINY, "num_hidden_layers": 3},
        ),
        "mamba": lambda: t.FalconH1Config(
            mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64, mamba_n_groups=1, **_TINY
        ),
    }


_IMAGE_WORDS = {"<fake_token_around_image>": 3, "<image>": 4, "<global-img>": 5, "<end_of_utterance>": 6}
IMAGE_TOKEN = 4  # stands for one image in a prompt for the model "images"


def make_model_of_images(path: Path, seed: int) -> Path:
    """Write a model with its processor. It takes images of 64 x 64 pixels: 16 tokens each and 5 around them."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    size = {"longest_edge": 64}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = t.LlamaConfig(intermediate_size=512, num_hidden_layers=2, head_dim=64, **_SMALL)
    config = t.Idefics3Config(
        vision_config={**vision, "image_size": 64, "patch_size": 8},
        text_config=text.to_dict(),
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
    )
    _spread(t.Idefics3ForConditionalGeneration(config).float()).save_pretrained(path, safe_serialization=True)
    images = t.Idefics3ImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    t.Idefics3Processor(image_processor=images, tokenizer=_tokenizer(_IMAGE_WORDS), image_seq_len=16).save_pretrained(
        path
    )
    return path


def _spread(model: Any) -> Any:
    """Spread the logits, so that wrong KV changes tokens."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "norm" not in name and "A_log" not in name:
                parameter.normal_(0, 0.06)
    return model


def make_model_with_drafter(path: Path, name: str, seed: int) -> Path:
    """Write a model whose first layer says most, and a drafter with a copy of it: an own layer that guesses well.

    "mtp" has its drafter within (MiMo), "eagle" in the folder `drafter`. The copy gets only the next token's embedding,
    so its guesses come from its own KV.
    """
    import json

    import torch
    import transformers as t
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    small = {**_SMALL, "intermediate_size": 512, "num_hidden_layers": 2}
    config = t.Qwen2Config(**small) if name == "mtp" else t.LlamaConfig(head_dim=64, **small)
    weights = dict(_spread(t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)).state_dict())
    weights["model.embed_tokens.weight"].normal_(0, 1)
    for last in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{last}.weight"].mul_(2)
        weights[f"model.layers.1.{last}.weight"].mul_(0.1)
    first = {key.removeprefix("model.layers.0."): value for key, value in weights.items() if ".layers.0." in key}
    size = config.hidden_size
    embedding, rest = torch.eye(size), torch.zeros(size, size)

    def write(folder: Path, tensors: dict[str, Any], architecture: str, **more: Any) -> None:
        config.save_pretrained(folder)
        file = folder / "config.json"
        file.write_text(
            json.dumps({**json.loads(file.read_text()), "architectures": [architecture], "dtype": "float32", **more})
        )
        save_file({key: value.clone() for key, value in tensors.items()}, folder / "model.safetensors")
        _tokenizer().save_pretrained(folder)

    if name == "mtp":
        within = {f"mtp_layers.0.{key}": value for key, value in first.items()}
        within["mtp_layers.0.input_proj.weight"] = torch.cat((rest, embedding), 1)
        within |= {f"mtp_layers.0.{key}_layernorm.weight": torch.ones(size) for key in ("token", "hidden", "final")}
        weights |= {f"model.{key}": value for key, value in within.items()}
        write(path, weights, "MiMoForCausalLM", num_nextn_predict_layers=1)
        return path
    drafter = {f"layers.0.{key}": value for key, value in first.items() if key != "input_layernorm.weight"}
    drafter["fc.weight"] = torch.cat((embedding, rest), 1)
    write(path / "drafter", drafter, "LlamaForCausalLM", num_hidden_layers=1)
    write(path, weights, "LlamaForCausalLM")
    return path


def make_model(directory: Path, name: str, seed: int = 0) -> Path:
    """Write a model and its tokenizer to `directory/NAME-SEED` unless they exist. Return the path."""
    path = directory / f"{name}-{seed}"
    if (path / "tokenizer.json").exists():
        return path
    if name == "images":
        return make_model_of_images(path, seed)
    if name in ("eagle", "mtp"):
        return make_model_with_drafter(path, name, seed)
    import torch
    import transformers as t

    if name == "8b":
        config = _configurations()[name]()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(path)
        return path
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(_configurations()[name](), dtype=torch.float32)
    _spread(model).save_pretrained(path, safe_serialization=True)
    _tokenizer().save_pretrained(path)
    return path


def make_adapter(directory: Path, model: Path, seed: int) -> Path:
    """Write a LoRA adapter with random weights for the attention's projections. Return its path."""
    import json

    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    path = directory / f"{model.name}-adapter-{seed}"
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, rank = config["hidden_size"], 8
    widths = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    weights: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.2
    save_file(weights, str(path / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "bias": "none",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": sorted(widths),
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def _tokenizer(special: dict[str, int] | None = None) -> Any:
    import transformers as t
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {f"t{number}": number for number in range(VOCABULARY - 3)}
    words["<unk>"], words["<s>"], words["</s>"] = VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
    for word, number in (special or {}).items():
        del words[f"t{number}"]
        words[word] = number
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special or {}])
    return t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


if __name__ == "__main__":
    target, what, *rest = sys.argv[1:]
    if what == "adapter":
        print(make_adapter(Path(target), Path(rest[0]), int(rest[1])))
    else:
        print(make_model(Path(target), what, int(rest[0])))

# pyright: basic, reportMissingImports=false
"""Trains the model of `support.vllm.recall`: `python benchmarks/blend/train_recall.py FOLDER` in tox's `torch`.

A Llama with rotary positions and grouped queries, 0.6 million parameters, float32, one thread, fixed seeds. It first
sees one document, then one more every 400 steps. Once it answers 99.5 % of both kinds of questions right four times in
a row, the learning rate falls to 0 within 500 steps. Takes 10 to 25 minutes on one core.
"""

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
import transformers

from support.vllm import recall

_IGNORED = -100  # label that the loss ignores
_QUESTIONS = 32
_BATCH = 16
_RATE = 2e-3
_STAGE_STEPS = 400
_WARM_STEPS = 100
_COOL_STEPS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6000, help="at most, before the rate of learning falls")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=recall.VOCABULARY,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=recall.BOS,
            eos_token_id=recall.PAD,
            pad_token_id=recall.PAD,
        )
    )
    learn(model, arguments.steps)
    cool(model)
    model.save_pretrained(arguments.folder)


def learn(model: Any, most_steps: int) -> None:
    """Train until the model answers 99.5 % of each kind four times in a row."""
    optimizer = make_optimizer(model)
    source = random.Random(1)
    started, num_good = time.monotonic(), 0
    for step in range(most_steps):
        most_documents = min(recall.MOST_DOCUMENTS, 1 + step // _STAGE_STEPS)
        rate = min(1, (step + 1) / _WARM_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / most_steps))
        loss, nth, any_ = take_step(model, optimizer, _RATE * rate, *make_batch(source, most_documents))
        if step % 50 == 49:
            print(
                f"step {step + 1}, {time.monotonic() - started:.0f} s, up to {most_documents} documents: "
                f"loss {loss:.4f}, NTH {nth:.1%}, ANY {any_:.1%}",
                flush=True,
            )
            num_good = num_good + 1 if min(nth, any_) >= 0.995 and most_documents == recall.MOST_DOCUMENTS else 0
            if num_good == 4:
                return


def cool(model: Any) -> None:
    """Decay the learning rate to 0. Afterwards the model answers single questions as well as many at once."""
    optimizer = make_optimizer(model)
    source = random.Random(77)
    for step in range(_COOL_STEPS):
        rate = 0.75 * _RATE * (_COOL_STEPS - step) / _COOL_STEPS * min(1, (step + 1) / 20)
        loss, nth, any_ = take_step(model, optimizer, rate, *make_batch(source, recall.MOST_DOCUMENTS))
        if step % 50 == 49:
            print(f"cooling, step {step + 1}: loss {loss:.4f}, NTH {nth:.1%}, ANY {any_:.1%}", flush=True)


def make_optimizer(model: Any) -> Any:
    """Return a new optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)


def take_step(model: Any, optimizer: Any, rate: float, tokens: Any, labels: Any) -> tuple[float, float, float]:
    """Train with one batch. Return the loss and the shares of right answers to NTH and ANY questions."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    answered = labels[:, 1:] != _IGNORED
    logits = model.lm_head(model.model(tokens).last_hidden_state[:, :-1][answered])
    target = labels[:, 1:][answered]
    loss = torch.nn.functional.cross_entropy(logits, target)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    right = (logits.argmax(-1) == target).float()
    before = tokens[:, :-2][answered[:, 1:]]  # two tokens before the answer: a document's number, or ANY
    is_nth = (before >= recall.NUMBER) & (before < recall.NUMBER + recall.MOST_DOCUMENTS)
    return loss.item(), right[is_nth].mean().item(), right[~is_nth].mean().item()


def make_batch(source: random.Random, most_documents: int) -> tuple[Any, Any]:
    """Return tokens and labels, each `(batch, length)`. All rows have the same number of documents."""
    count = most_documents if most_documents < 3 else source.randrange(2, most_documents + 1)
    rows: list[list[int]] = []
    labels: list[list[int]] = []
    for _ in range(_BATCH):
        documents = recall.make_documents(source, count)
        row = recall.make_prompt(documents)
        label = [_IGNORED] * len(row)
        for _ in range(_QUESTIONS):
            question = recall.make_question(source, documents, source.choice((recall.NTH, recall.ANY)))
            row += [*question.tokens, question.answer]
            label += [_IGNORED] * len(question.tokens) + [question.answer]
        rows.append(row)
        labels.append(label)
    length = max(map(len, rows))
    return (
        torch.tensor([row + [recall.PAD] * (length - len(row)) for row in rows]),
        torch.tensor([label + [_IGNORED] * (length - len(label)) for label in labels]),
    )


if __name__ == "__main__":
    main()

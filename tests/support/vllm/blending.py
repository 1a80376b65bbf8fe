# pyright: basic, reportMissingImports=false
"""A blender in a vLLM without a connector, and prompts blended by hand. Only for processes that may import vLLM."""

import random
from dataclasses import dataclass
from typing import Any, Self

import torch

from kvdepot_vllm.blend.blender import Blender, choose
from kvdepot_vllm.blend.policies import Budget, Run
from support.vllm import recall


def blender_of(llm: Any) -> Blender:
    """Return a blender for the engine of a `vllm.LLM` whose core runs in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    return Blender(runner.get_model(), runner.vllm_config, runner.kv_cache_config)


@dataclass(frozen=True, slots=True)
class Piece:
    """Reused tokens: their first positions in the source and in the prompt, and their number."""

    source: int
    target: int
    length: int


class Bench:
    """Blends one prompt at a time from one source. Prompt and source have separate blocks.

    Args:
        blender: blender of an engine that serves no request.
        max_tokens: longest prompt or source.
    """

    def __init__(self, blender: Blender, max_tokens: int = 512) -> None:
        self.blender = blender
        count = -(-max_tokens // blender.block_tokens)
        self.source = torch.arange(1, 1 + count)
        self.target = torch.arange(1 + count, 1 + 2 * count)

    def logits(self, tokens: list[int], first: int, table: Any = None) -> Any:
        """Compute a prompt from token `first` on; the tokens before have KV. Return logits, `(n, vocabulary)`."""
        blender = self.blender
        positions = torch.arange(first, len(tokens))
        hidden = blender.forward(torch.tensor(tokens), positions, self.target if table is None else table)
        with torch.inference_mode():
            return blender.model.compute_logits(hidden).float()

    def store(self, tokens: list[int]) -> None:
        """Compute the KV of a source."""
        self.blender.recompute(torch.tensor(tokens), torch.arange(len(tokens)), self.source)

    def blend(self, tokens: list[int], pieces: list[Piece], question: int, policy: str, budget: Budget) -> Any:
        """Blend a prompt whose last `question` tokens are never reused. Return the logits of these tokens."""
        blender, prompt = self.blender, torch.tensor(tokens)
        runs: list[Run] = []
        for piece in pieces:
            old = torch.arange(piece.source, piece.source + piece.length)
            new = torch.arange(piece.target, piece.target + piece.length)
            blender.move(blender.slots(self.source, old), blender.slots(self.target, new), old, new)
            runs.append((piece.target, piece.target + piece.length))
        end = len(tokens) - question
        reused = {position for begin, stop in runs for position in range(begin, stop)}
        gaps = [position for position in range(end) if position not in reused]
        blender.recompute(prompt, torch.tensor(gaps, dtype=torch.int64), self.target)
        chosen = choose(blender, policy, prompt, runs, self.target, (end, len(tokens)), budget)
        blender.recompute(prompt, chosen, self.target)
        return self.logits(tokens, end)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of documents whose KV was computed in another order, and one question."""

    source: list[int]
    prompt: list[int]
    pieces: list[Piece]
    question: recall.Question

    @classmethod
    def make(cls, source: random.Random, kind: int) -> Self:
        """Make a case of the recall model's task. `kind` is the kind of the question."""
        documents = recall.make_documents(source, recall.MOST_DOCUMENTS)
        order = source.sample(range(len(documents)), len(documents))
        pieces: list[Piece] = []
        target = 1
        for number in order:
            start = 1 + sum(map(len, documents[:number]))
            pieces.append(Piece(start, target, len(documents[number])))
            target += len(documents[number])
        shuffled = [documents[number] for number in order]
        question = recall.make_question(source, shuffled, kind)
        prompt = recall.make_prompt(shuffled) + question.tokens
        return cls(recall.make_prompt(documents), prompt, pieces, question)

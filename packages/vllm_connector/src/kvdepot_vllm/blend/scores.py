# pyright: basic, reportMissingImports=false
"""`choose`: the reused tokens that a policy recomputes, by scores from the model itself."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size

from kvdepot_vllm.blend.blender import Blender
from kvdepot_vllm.blend.policies import POLICIES, Budget, Run

_MOST_PRODUCTS: Final = 1 << 24  # products of queries and keys held at once, float32: 64 MiB
_SOFTNESS: Final = 8.0  # divides the products: sharp attention over stale keys misses the tokens that matter
_SECOND: Final = 1  # the second layer, which is the first whose K depends on other tokens
_DEFAULT_BUDGET: Final = Budget()


def choose(
    blender: Blender,
    policy: str,
    tokens: Any,
    runs: Sequence[Run],
    table: Any,
    question: Run | None = None,
    budget: Budget = _DEFAULT_BUDGET,
) -> Any:
    """Return the reused positions to recompute, ascending. All ranks choose the same.

    The KV of everything before the last run must be in the pages. Some policies write the KV of the question.

    Args:
        blender: runs the model.
        policy: a name in `POLICIES`.
        tokens: the prompt's tokens, including the question.
        runs: the reused positions: ascending, without overlap.
        table: the prompt's blocks, and blocks for the question, which may be temporary.
        question: positions of the question, if the prompt has one.
        budget: how many tokens to choose.
    """
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    return POLICIES[policy](runs, budget, ModelScores(blender, tokens, runs, table, question))


class Stop(Exception):
    """Ends a forward pass once its remaining layers are not needed."""


class ModelScores:
    """Scores of the tokens in `runs`, with the KV of the prompt as it is in the pages. See `policies.Scores`.

    Args:
        blender: runs the model.
        tokens: the prompt's tokens, including the question.
        runs: the reused positions.
        table: the prompt's blocks, and blocks for the question.
        question: positions of the question, if the prompt has one.
    """

    def __init__(self, blender: Blender, tokens: Any, runs: Sequence[Run], table: Any, question: Run | None) -> None:
        self._blender, self._tokens, self._table = blender, tokens, table
        self._positions = torch.cat([torch.arange(begin, end) for begin, end in runs])
        self._question = question

    @property
    def question_tokens(self) -> int:
        """The number of tokens of the question; 0 without one."""
        return 0 if self._question is None else self._question[1] - self._question[0]

    def deviation(self) -> Any:
        """Return the squared distance of each token's K in the second layer from the reused one.

        Costs one layer of computing the runs. Leaves the exact KV of the first layer in the pages.
        """
        blender = self._blender
        number = min(_SECOND, len(blender.layers) - 1)
        layer = blender.layers[number]
        parts: list[Any] = []
        for batch in blender.batches(self._positions):
            slots = blender.slots(self._table, batch).to(blender.device)

            def compare(inputs: Any, slots: Any = slots) -> None:
                parts.append((layer.keys_of(inputs).float() - layer.keys(slots).float()).square().sum((1, 2)))
                raise Stop

            _watch(blender, {number: compare}, lambda batch=batch: blender.forward(self._tokens, batch, self._table))
        return _summed(torch.cat(parts))

    def attention(self) -> Any:
        """Return how much the question attends to each token, by a softened softmax.

        This is the sum over the question's tokens, all layers and all ranks of the mean over a rank's heads. It costs
        computing the question, and writes the question's KV.
        """
        assert self._question is not None
        blender = self._blender
        slots = blender.slots(self._table, self._positions).to(blender.device)
        total = torch.zeros(len(slots), device=blender.device)

        def hook(number: int) -> Callable[[Any], None]:
            layer = blender.layers[number]

            def add(inputs: Any) -> None:
                keys = layer.keys(slots).float()
                queries = layer.queries_of(inputs).float()
                queries = queries.unflatten(1, (keys.shape[1], -1))
                for few in queries.split(max(1, _MOST_PRODUCTS // (queries[0, ..., 0].numel() * len(keys)))):
                    products = torch.einsum("qhgd,khd->hgqk", few, keys) * (layer.scale / _SOFTNESS)
                    total.add_(products.softmax(-1).mean((0, 1)).sum(0))

            return add

        hooks = {number: hook(number) for number in range(len(blender.layers))}
        for batch in blender.batches(torch.arange(*self._question)):
            _watch(blender, hooks, lambda batch=batch: blender.forward(self._tokens, batch, self._table))
        return _summed(total)


def _watch(blender: Blender, hooks: dict[int, Callable[[Any], None]], forward: Callable[[], object]) -> None:
    """Run `forward`. Before the attention layer of a hook's number runs, call the hook with the layer's arguments."""
    handles = [
        blender.layers[number].module.register_forward_pre_hook(lambda _module, inputs, hook=hook: hook(inputs))
        for number, hook in hooks.items()
    ]
    try:
        forward()
    except Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _summed(score: Any) -> Any:
    """Return the sum over all ranks, as a tensor on the CPU. Each rank sees only its own heads."""
    if get_tensor_model_parallel_world_size() > 1:
        score = tensor_model_parallel_all_reduce(score)
    return score.cpu()

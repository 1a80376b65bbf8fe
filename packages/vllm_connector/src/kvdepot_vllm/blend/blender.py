# pyright: basic, reportMissingImports=false
"""`Blender`: computes chosen tokens of a prompt whose other tokens have KV from elsewhere. There is one per worker.

The worker's side loads KV into the request's blocks or into staging blocks, and calls `move`. Then it calls `recompute`
for the tokens between the reused runs, `choose` for the reused tokens to recompute, and `recompute` for those,
in any number of slices of ascending positions, between or within the engine's steps.

The tokens to compute are scattered positions of one prompt. Each stretch of neighbours becomes one row of an ordinary
ragged batch, and all rows have the block table of the request. In each layer, the engine writes the KV of all rows
before it reads any, so a token attends to exactly the tokens up to itself, recomputed or reused. The model and the
attention backend are the engine's own. The metadata builder is a separate one, because the runner's holds the state of
the step under way.

With several ranks, all must make the same calls in the same step, because the model's layers wait for each other.
Tokens, positions and tables are int64 tensors on the CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvdepot.errors import LayoutError
from kvdepot.kvcache import MoveTokens
from kvdepot_vllm.blend.layers import layers_of
from kvdepot_vllm.blend.moves import move
from kvdepot_vllm.blend.policies import POLICIES, Budget, Run

_MOST_PRODUCTS: Final = 1 << 24  # products of queries and keys held at once, float32: 64 MiB
_SOFTNESS: Final = 8.0  # divides the products: sharp attention over stale keys misses the tokens that matter
_SECOND: Final = 1  # the second layer, which is the first whose K depends on other tokens
_DEFAULT_BUDGET: Final = Budget()


class Blender:
    """Blends prompts in the KV cache of one worker, which has one group of full attention.

    Args:
        model: the runner's model.
        vllm_config: `VllmConfig`.
        kv_cache_config: `KVCacheConfig`.
        scratch_block: a block that no request uses yet. Its bytes are overwritten and restored.
        move_tokens: the backend's compiled move of tokens, if it has one.

    Attributes:
        block_tokens: tokens of a block in block tables.
        splits: kernel blocks in one block of a block table.
        layers: all attention layers with a cache.

    Raises:
        LayoutError: the pages, the rotation or the backend of a layer cannot be used.
    """

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        kv_cache_config: Any,
        scratch_block: int = 1,
        move_tokens: MoveTokens | None = None,
    ) -> None:
        self._move_tokens = move_tokens
        (group,) = kv_cache_config.kv_cache_groups
        self.model, self._vllm_config = model, vllm_config
        modules = vllm_config.compilation_config.static_forward_context
        self.block_tokens: int = group.kv_cache_spec.block_size
        first = modules[group.layer_names[0]]
        self.device = first.kv_cache.device
        self.splits: int = first.kv_cache.shape[0] // kv_cache_config.num_blocks
        self.layers = layers_of(
            model,
            [modules[name] for name in group.layer_names],
            kv_cache_config.num_blocks * self.block_tokens,
            scratch_block * self.splits,
        )
        backends = {modules[name].get_attn_backend() for name in group.layer_names}
        if len(backends) > 1:
            raise LayoutError(f"the layers of one group have different attention backends: {backends}")
        spec = group.kv_cache_spec
        if self.splits > 1:
            spec = spec.copy_with_new_block_size(self.block_tokens // self.splits)
        self._builder = backends.pop().get_builder_cls()(spec, group.layer_names, vllm_config, self.device)
        names = set(group.layer_names)
        self._names = [  # includes layers that read another layer's cache
            name
            for name, module in modules.items()
            if name in names or getattr(module, "kv_sharing_target_layer_name", None) in names
        ]
        self._most_rows: int = vllm_config.scheduler_config.max_num_seqs
        self._most_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens

    def slots(self, table: Any, positions: Any) -> Any:
        """Return the slots of positions, `(n,)`, in the blocks of `table`."""
        return table[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens

    def move(self, from_slots: Any, to_slots: Any, old_positions: Any, new_positions: Any) -> None:
        """Move KV to other slots and positions in all layers, see `moves.move`."""
        with torch.inference_mode():
            move(self.layers, from_slots, to_slots, old_positions, new_positions, self._move_tokens)

    def forward(self, tokens: Any, positions: Any, table: Any, *, shift: int = 0, compiled: bool = False) -> Any:
        """Run the model over positions of a prompt. Return the hidden states in the order of positions, `(n, hidden)`.

        Args:
            tokens: the prompt's tokens, at least up to the last of `positions`.
            positions: `(n,)`, ascending; at most `max_num_seqs` stretches and `max_num_batched_tokens` tokens.
            table: the block of every `block_tokens` positions up to the last of `positions`.
            shift: added to the positions that the rotary embedding sees.
            compiled: use the engine's compiled model, if it has one. Hooks on layers do not run there.
        """
        runs = _rows(positions)
        order = torch.cat([torch.arange(begin, end) for begin, end in runs])
        device = self.device
        lengths = [end - begin for begin, end in runs]
        ends = [int(positions[end - 1]) + 1 for _, end in runs]
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor(ends, dtype=torch.int32)
        ordered = positions[order]
        slots = self.slots(table, ordered).to(device)
        places = (ordered + shift).to(device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(runs),
            num_actual_tokens=len(ordered),
            max_query_len=max(lengths),
            max_seq_len=max(ends),
            block_table_tensor=self._blocks(table, max(ends)).expand(len(runs), -1).contiguous(),
            slot_mapping=slots,
            causal=True,
            positions=places,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        )
        context = create_forward_context(
            dict.fromkeys(self._names, self._builder.build(0, common)),
            self._vllm_config,
            slot_mapping=dict.fromkeys(self._names, slots),
            skip_compiled=not compiled,
        )
        with override_forward_context(context), torch.inference_mode():
            hidden = self.model(input_ids=tokens[ordered].to(device, torch.int32), positions=places)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # models with a draft model return more
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            return hidden[back.to(device)]

    def recompute(self, tokens: Any, positions: Any, table: Any) -> None:
        """Compute the KV of ascending positions, in batches that fit the engine's buffers.

        Several calls in ascending order give the same KV as one call.
        """
        for batch in self.batches(positions):
            self.forward(tokens, batch, table, compiled=True)

    def batches(self, positions: Any) -> Iterator[Any]:
        """Cut ascending positions into batches that fit the engine's buffers."""
        is_start = torch.ones(len(positions), dtype=torch.bool)
        is_start[1:] = positions[1:] != positions[:-1] + 1
        row = is_start.long().cumsum(0)
        begin = 0
        while begin < len(positions):
            end = int(torch.searchsorted(row, row[begin] + self._most_rows))
            end = min(end, begin + self._most_tokens)
            yield positions[begin:end]
            begin = end

    def _blocks(self, table: Any, num_tokens: int) -> Any:
        """Return the kernel blocks that hold this many tokens, `(blocks,)` int32."""
        blocks = table[: -(-num_tokens // self.block_tokens)]
        blocks = (blocks[:, None] * self.splits + torch.arange(self.splits)).flatten()
        return blocks.to(self.device, torch.int32)


def _rows(positions: Any) -> list[tuple[int, int]]:
    """Return begin and end of each stretch of neighbours, as indices of `positions`, the shortest first.

    Some backends split a batch into decodes and prefills by length, and expect the decodes first.
    """
    cuts = (positions[1:] != positions[:-1] + 1).nonzero().squeeze(1) + 1
    ends = [*cuts.tolist(), len(positions)]
    return sorted(zip([0, *ends[:-1]], ends, strict=True), key=lambda run: run[1] - run[0])


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
    return POLICIES[policy](runs, budget, _ModelScores(blender, tokens, runs, table, question))


class _Stop(Exception):
    """Ends a forward pass once its remaining layers are not needed."""


class _ModelScores:
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
                raise _Stop

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
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _summed(score: Any) -> Any:
    """Return the sum over all ranks, as a tensor on the CPU. Each rank sees only its own heads."""
    if get_tensor_model_parallel_world_size() > 1:
        score = tensor_model_parallel_all_reduce(score)
    return score.cpu()

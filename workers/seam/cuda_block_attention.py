"""The drafter's attention on CUDA: a block of rows over all keys of its request, split over them.

SGLang's Triton kernel gives one program a request, a head and all keys: at 32k tokens a layer takes
two milliseconds, whatever the device. All rows of a drafted block see the same keys (the prefix and
the whole block, whose keys are in the cache by then), so no mask is needed and the keys can be
shared out.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from overstory.workers.seam.block_attention import MOST_LINES, block_attention
from overstory.workers.seam.cuda_slots import SlotLists


class BlockAttention(AttentionBackend):
    """Attention of a DFlash drafter: block forwards here, everything else by ``others``.

    The slots of the keys lie in tensors that never move, so that
    a captured forward reads those of the step at hand.
    """

    #: Nothing here reads lengths on the host.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, others: AttentionBackend, block_size: int) -> None:
        super().__init__()
        self._others = others
        self._block_size = block_size
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._table = model_runner.req_to_token_pool.req_to_token
        requests, width = (int(size) for size in self._table.shape)
        self._lists = SlotLists(requests, width, self._table.device)

    @classmethod
    def install(cls, model_runner: Any, block_size: int) -> bool:
        """Puts it in front of the backend of a drafter that it serves; returns whether it does."""
        if not cls.serves(model_runner, block_size):
            return False
        given = model_runner.attn_backend
        model_runner.attn_backend = cls(model_runner, given, block_size)
        for name in ("prefill_attention_backend_str", "decode_attention_backend_str"):
            setattr(model_runner.attn_backend, name, getattr(given, name))  # models ask for them
        return True

    @staticmethod
    def serves(model_runner: Any, block_size: int) -> bool:
        """Whether the drafter of ``model_runner`` computes and keeps its KV in a 16-bit type, and
        all its layers let every row of a block see all keys."""
        types = {model_runner.dtype, model_runner.token_to_kv_pool.dtype}
        layers = [m for m in model_runner.model.modules() if isinstance(m, RadixAttention)]
        return types in ({torch.bfloat16}, {torch.float16}) and all(
            _sees_all(layer)
            and block_size * (layer.tp_q_head_num // layer.tp_k_head_num) <= MOST_LINES
            for layer in layers
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Lists the keys of a forward outside of a graph, for all its layers."""
        if forward_batch.forward_mode.is_target_verify():
            self._list_keys(forward_batch)
        elif not forward_batch.forward_mode.is_idle():
            self._others.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Lists the keys of a captured forward: before the capture, and before each replay."""
        del in_capture
        assert forward_batch.forward_mode.is_target_verify(), forward_batch.forward_mode
        self._list_keys(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing depends on the sizes: the lists have room for every request."""
        del max_num_tokens
        assert max_bs < self._lists.bounds.numel(), max_bs

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that fill a graph's batch up."""
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **named: Any,
    ) -> torch.Tensor:
        """Of the rows [bs * block_size, heads * head_dim] of a block forward.

        Returns:
            [bs * block_size, heads * v_head_dim].
        """
        if not forward_batch.forward_mode.is_target_verify():
            return self._others.forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, **named
            )
        assert not named, f"the drafter's attention takes no {sorted(named)}"
        pool = self.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        out = block_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self._lists.bounds[: forward_batch.seq_lens.shape[0] + 1],
            self._lists.slots,
            scale=layer.scaling,
        )
        return out.view(q.shape[0], -1)

    def _list_keys(self, forward_batch: Any) -> None:
        assert int(forward_batch.spec_info.draft_token_num) == self._block_size
        lengths = forward_batch.seq_lens + self._block_size
        self._lists.fill(self._table, forward_batch.req_pool_indices, lengths)


def _sees_all(layer: RadixAttention) -> bool:
    """Whether every row of a block attends to the whole prefix and block."""
    window = layer.sliding_window_size
    return (
        layer.attn_type == AttentionType.ENCODER_ONLY
        and (window is None or window < 0)
        and not layer.logit_cap
        and layer.k_scale is None
    )

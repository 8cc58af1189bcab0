"""What SGLang's MLA pool stores under `--kv-cache-dtype fp8_e4m3` is what our reference says."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_checks import check_prefix_hits
from ddtree_support import GREEDY, check_scripted, random_prompts, run_under, server_args
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from overstory.kernels import reference
from overstory.kernels.reference import dequantize_kv, quantize_kv
from overstory.workers.seam import cuda_attention
from overstory.workers.seam.cuda_limits import AttentionShape

SCALE = 0.37


def test_the_pool_stores_our_bytes() -> None:
    pool = MLATokenToKVPool(300, 1, torch.float8_e4m3fn, 512, 64, 1, "cpu", False)
    rows = torch.randn(256, 1, 576, generator=torch.Generator().manual_seed(2)) * 30
    rows[7, 0, 5] = 1e6  # does not fit
    slots = torch.arange(1, 257)
    # The backend divides by the layer's scale before it stores (TritonAttnBackend.forward_extend).
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, rows / SCALE, rows[..., :512])
    (buffer,) = pool.kv_buffer
    assert torch.equal(buffer[slots], quantize_kv(rows, SCALE).view(torch.uint8))
    keys, values = pool.get_kv_buffer(0)
    meant = dequantize_kv(buffer, SCALE)
    torch.testing.assert_close(dequantize_kv(keys, SCALE), meant, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(
        dequantize_kv(values, SCALE), meant[..., :512], atol=0, rtol=0, equal_nan=True
    )
    assert bool(meant[8, 0, 5].isnan())


def batch_of(mode: ForwardMode, lengths: list[int], written: torch.Tensor, rows: int) -> Any:
    return SimpleNamespace(
        forward_mode=mode,
        seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(len(lengths)),
        out_cache_loc=written,
        spec_info=SimpleNamespace(draft_token_num=rows, mask_words=None),
    )


def backend_over(
    monkeypatch: pytest.MonkeyPatch, pool: MLATokenToKVPool, table: torch.Tensor
) -> cuda_attention.OverstoryAttention:
    monkeypatch.setattr(cuda_attention, "attention_shape", lambda _: AttentionShape(8, 3))
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool
    )
    return cuda_attention.OverstoryAttention(runner, others=None)  # type: ignore[arg-type]


def layer_of(scale: float | None) -> Any:
    return SimpleNamespace(
        layer_id=0, scaling=0.05, v_head_dim=512, tp_q_head_num=8, qk_head_dim=576,
        k_scale=None if scale is None else torch.tensor(scale), k_scale_float=scale,
    )  # fmt: skip


@pytest.mark.parametrize("scale", [None, SCALE])
def test_the_backend_writes_and_reads_such_a_pool(
    monkeypatch: pytest.MonkeyPatch, scale: float | None
) -> None:
    """Verify of three rows, then decode of one, over two requests; on the reference ops."""
    pool = MLATokenToKVPool(100, 1, torch.float8_e4m3fn, 512, 64, 1, "cpu", False)
    table = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:80].view(2, 40)
    backend, layer = backend_over(monkeypatch, pool, table), layer_of(scale)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(101, 1, 576, generator=generator).bfloat16()
    divided = rows if scale is None else (rows / torch.tensor(scale)).bfloat16()
    stored = quantize_kv(divided)
    options = {"scale": 0.05, "kv_scale": scale or 1.0}
    lengths = [20, 11]
    prefixes = torch.cat([table[b, :n] for b, n in enumerate(lengths)])
    pool.kv_buffer[0][prefixes] = stored.view(torch.uint8)[prefixes]

    new = torch.cat([table[b, n : n + 3] for b, n in enumerate(lengths)])
    q = torch.randn(6, 8, 576, generator=generator).bfloat16()
    batch = batch_of(ForwardMode.TARGET_VERIFY, lengths, new, 3)
    backend.init_forward_metadata(batch)
    got = backend.forward_extend(q, rows[new], rows[new][..., :512], layer, batch)
    bounds = torch.tensor([0, 3, 6]), torch.tensor([0, 20, 31])
    want = reference.verify_attention(q, stored, *bounds, prefixes, new, **options)
    torch.testing.assert_close(got.view(6, 8, 512), want)
    assert torch.equal(pool.kv_buffer[0][new], stored.view(torch.uint8)[new])

    lengths = [24, 15]
    last = torch.stack([table[b, n - 1] for b, n in enumerate(lengths)])
    batch = batch_of(ForwardMode.DECODE, lengths, last, 1)
    backend.init_forward_metadata(batch)
    got = backend.forward_decode(q[:2], rows[last], rows[last][..., :512], layer, batch)
    slots = torch.cat([table[b, :n] for b, n in enumerate(lengths)])
    want = reference.decode_attention(q[:2], stored, torch.tensor([0, 24, 39]), slots, **options)
    torch.testing.assert_close(got.view(2, 8, 512), want)


@pytest.mark.parametrize("kernels", ["reference", "simulator"])
@pytest.mark.parametrize("scale", [None, SCALE])
def test_extends_over_such_a_pool(
    monkeypatch: pytest.MonkeyPatch, scale: float | None, kernels: str
) -> None:
    """Seventy rows behind a prefix and three behind none, by keys as the cache has them."""
    if kernels == "simulator" and shutil.which("g++") is None:
        pytest.skip("no g++ for the simulator")
    monkeypatch.setenv("OVERSTORY_KERNELS", kernels)
    pool = MLATokenToKVPool(200, 1, torch.float8_e4m3fn, 512, 64, 1, "cpu", False)
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(200, generator=generator).view(2, 100)
    backend, layer = backend_over(monkeypatch, pool, table), layer_of(scale)
    rows = torch.randn(201, 1, 576, generator=generator).bfloat16()
    divided = rows if scale is None else (rows / torch.tensor(scale)).bfloat16()
    stored = quantize_kv(divided)
    prefix, new = table[0, :20], torch.cat([table[0, 20:90], table[1, :3]])
    pool.kv_buffer[0][prefix] = stored.view(torch.uint8)[prefix]
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.arange(2),
        extend_prefix_lens_cpu=[20, 0],
        extend_seq_lens_cpu=[70, 3],
        out_cache_loc=new,
    )
    q = torch.randn(73, 8, 576, generator=generator).bfloat16()
    backend.init_forward_metadata(batch)
    got = backend.forward_extend(q, rows[new], rows[new][..., :512], layer, batch)
    indptrs = torch.tensor([0, 70, 73]), torch.tensor([0, 20, 20])
    options = {"scale": 0.05, "kv_scale": scale or 1.0}
    want = reference.verify_attention(q, stored, *indptrs, prefix, new, **options)
    # The kernel rounds weights to bf16 too.
    bounds = {} if kernels == "reference" else {"rtol": 1e-2, "atol": 4e-3}
    torch.testing.assert_close(got.view(73, 8, 512), want, **bounds)


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 16])
def test_trees_over_such_a_pool(
    engine: Any, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """Target and drafter keep their KV in fp8: what a tree reads back is what plain decoding does,
    bit for bit, so texts are the same; hits of the prefix cache too."""
    harness = engine(
        **server_args(pair[1], rows=32, kv_cache_dtype="fp8_e4m3", page_size=page_size)
    )
    worker = harness.scheduler.model_worker
    for runner in (worker.model_runner, worker.draft_model_runner):
        assert runner.token_to_kv_pool.dtype == torch.float8_e4m3fn
    prompts = random_prompts([40, 7, 65, 90], seed=81)
    params = GREEDY | {"max_new_tokens": 40}
    harness.flush_cache()
    plain = run_under(harness, "plain", prompts, params)
    check_scripted(harness, prompts, params, plain, monkeypatch, ("chain", "tree-31"), seed=81)
    check_prefix_hits(harness, monkeypatch, ("tree-31",))
    harness.flush_cache()
    harness.assert_no_leak()

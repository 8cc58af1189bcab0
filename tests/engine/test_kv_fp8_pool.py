"""What SGLang's MLA pool stores under `--kv-cache-dtype fp8_e4m3` is what our reference says."""

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from overstory.kernels.reference import dequantize_kv, quantize_kv

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

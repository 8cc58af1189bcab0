// The plain way: one block per head of a row, which walks the whole context alone. A baseline for
// the benchmark, not part of the library of kernels.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kKey = 576, kValue = 512, kThreads = 256, kTile = 64;

__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

__global__ void __launch_bounds__(kThreads)
naive_verify(const __nv_bfloat16* q, const __nv_bfloat16* kv, const int* kv_indptr,
             const int64_t* kv_indices, const int64_t* out_cache_loc, const uint8_t* mask,
             const int64_t* mask_indptr, __nv_bfloat16* out, int rows, float scale) {
  __shared__ float query[kKey];
  __shared__ float score[kTile];
  __shared__ int64_t slot[kTile];
  const int token = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
  const int request = token / rows, row = token % rows;
  const int begin = kv_indptr[request], prefix = kv_indptr[request + 1] - begin;
  const int64_t width = prefix + rows;
  const uint8_t* visible =
      mask == nullptr ? nullptr : mask + mask_indptr[request] + row * width + prefix;
  for (int i = threadIdx.x; i < kKey; i += kThreads) {
    query[i] = __bfloat162float(q[(int64_t(token) * heads + head) * kKey + i]);
  }
  const int keys = mask == nullptr ? prefix : prefix + rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float highest = -INFINITY, sum = 0.0f, value[2] = {0.0f, 0.0f};
  for (int first = 0; first < keys; first += kTile) {
    __syncthreads();
    for (int i = warp; i < kTile; i += kThreads / 32) {
      const int key = first + i;
      const bool tail = key >= prefix;
      float dot = -INFINITY;
      if (key < keys && (!tail || visible[key - prefix])) {
        const int64_t at =
            tail ? out_cache_loc[int64_t(request) * rows + key - prefix] : kv_indices[begin + key];
        if (lane == 0) slot[i] = at;
        dot = 0.0f;
        for (int d = lane; d < kKey; d += 32) {
          dot += query[d] * __bfloat162float(kv[at * kKey + d]);
        }
        dot = warp_sum(dot) * scale;
      }
      if (lane == 0) score[i] = dot;
    }
    __syncthreads();
    float tile_highest = highest;
    for (int i = 0; i < kTile; ++i) tile_highest = fmaxf(tile_highest, score[i]);
    if (tile_highest == -INFINITY) continue;
    const float rescale = __expf(highest - tile_highest);
    highest = tile_highest;
    sum *= rescale;
    value[0] *= rescale;
    value[1] *= rescale;
    for (int i = 0; i < kTile; ++i) {
      if (score[i] == -INFINITY) continue;
      const float weight = __expf(score[i] - highest);
      sum += weight;
      for (int part = 0; part < 2; ++part) {
        value[part] +=
            weight * __bfloat162float(kv[slot[i] * kKey + part * kThreads + threadIdx.x]);
      }
    }
  }
  for (int part = 0; part < 2; ++part) {
    out[(int64_t(token) * heads + head) * kValue + part * kThreads + threadIdx.x] =
        __float2bfloat16(sum > 0.0f ? value[part] / sum : 0.0f);
  }
}

}  // namespace

/// Every request has `rows` rows; without a mask they have no tail (decode).
extern "C" int overstory_naive_verify(const void* q, const void* kv, const int* kv_indptr,
                                      const int64_t* kv_indices, const int64_t* out_cache_loc,
                                      const uint8_t* mask, const int64_t* mask_indptr, void* out,
                                      int tokens, int rows, int heads, float scale, void* stream) {
  using bf16 = __nv_bfloat16;
  naive_verify<<<dim3(tokens, heads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const bf16*>(q), static_cast<const bf16*>(kv), kv_indptr, kv_indices,
      out_cache_loc, mask, mask_indptr, static_cast<bf16*>(out), rows, scale);
  return cudaGetLastError();
}

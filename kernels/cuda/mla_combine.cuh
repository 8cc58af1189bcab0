// Adds up the parts of items that several blocks worked on, and writes zeros to rows that no
// request owns (graphs are padded).
#pragma once

#include "mla_attention.cuh"

namespace overstory::mla {

// Dynamic shared memory: weights [parts][8 rows], then per-warp maxima and sums, then sums of O.
constexpr int combine_bytes(int blocks) {
  return (blocks + 1) * 8 * 4 + kWarps * 8 * 4 + kWarps * kFragmentBytes;
}

// The parts of one tile: of block `first`, which began the item, to block `last`.
struct Parts {
  int first, last;
  int tile;   // within the item
  int tiles;  // of an item

  __device__ __forceinline__ int count() const { return last - first + 1; }
  __device__ __forceinline__ int64_t slot(int part) const {
    return slot_of(first + part, part == 0);
  }
};

__device__ __forceinline__ float over_rows_of_warps(float* scratch, float value, bool maximum) {
  // Lanes with the same lane % 8 have the same row.
  OVERSTORY_UNROLL
  for (int step = 8; step < 32; step *= 2) {
    const float other = ptx::shfl_xor(value, step);
    value = maximum ? fmaxf(value, other) : value + other;
  }
  ptx::sync_block();  // the scratch of the call before
  if (ptx::lane() < 8) scratch[ptx::warp() * 8 + ptx::lane()] = value;
  ptx::sync_block();
  value = scratch[ptx::lane() & 7];
  OVERSTORY_UNROLL
  for (int warp = 1; warp < kWarps; ++warp) {
    const float other = scratch[warp * 8 + (ptx::lane() & 7)];
    value = maximum ? fmaxf(value, other) : value + other;
  }
  return value;
}

// Fills weights[part][row] with 2^(m_part - m) and returns m and the sum of row lane % 8.
__device__ __forceinline__ float2 weigh_parts(const Args& args, const Parts& parts, float* weights,
                                              float* scratch) {
  const int row = ptx::thread() & 7, step = kThreads / 8;
  const float2* stats = reinterpret_cast<const float2*>(args.stats) + parts.tile * 8 + row;
  const int64_t stride = parts.tiles * 8;
  float m = kMinusInfinity;
  for (int part = ptx::thread() >> 3; part < parts.count(); part += step) {
    m = fmaxf(m, stats[parts.slot(part) * stride].x);
  }
  m = over_rows_of_warps(scratch, m, true);
  const float base = m == kMinusInfinity ? 0.0f : m;
  float sum = 0.0f;
  for (int part = ptx::thread() >> 3; part < parts.count(); part += step) {
    const float2 own = stats[parts.slot(part) * stride];
    const float weight = exp2f(own.x - base);
    weights[part * 8 + row] = weight;
    sum += weight * own.y;
  }
  return make_float2(m, over_rows_of_warps(scratch, sum, false));
}

// Up to eight of a warp's parts of a column block, all on their way at once.
struct Batch {
  float4 v[8];

  // Parts first, first + 8, ...
  __device__ __forceinline__ void load(const Args& args, const Parts& parts, int column,
                                       int first) {
    const float4* from = reinterpret_cast<const float4*>(args.partial) +
                         (parts.tile * kColumnBlocks + column) * 32 + ptx::lane();
    const int64_t stride = static_cast<int64_t>(parts.tiles) * kColumnBlocks * 32;
    OVERSTORY_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int part = first + i * kWarps;
      v[i] = make_float4(0, 0, 0, 0);
      if (part < parts.count()) v[i] = from[parts.slot(part) * stride];
    }
  }

  __device__ __forceinline__ void add_to(float4& sum, const Parts& parts, const float* weights,
                                         int first) const {
    OVERSTORY_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int part = first + i * kWarps;
      if (part >= parts.count()) continue;
      const float2 w =
          *reinterpret_cast<const float2*>(weights + part * 8 + (ptx::lane() & 3) * 2);
      sum.x = fmaf(v[i].x, w.x, sum.x), sum.y = fmaf(v[i].y, w.y, sum.y);
      sum.z = fmaf(v[i].z, w.x, sum.z), sum.w = fmaf(v[i].w, w.y, sum.w);
    }
  }
};

// Column blocks y, y + grid y, ... of a tile; warp w adds the parts w, w + 8, ... `batch` holds the
// first of them.
__device__ __forceinline__ void add_parts(const Args& args, const Parts& parts, Batch& batch,
                                          const float* weights, float4* sums, float inverse,
                                          int64_t first_row, int rows) {
  const int t = ptx::lane() & 3, g = ptx::lane() >> 2;
  const float inverse0 = ptx::shfl(inverse, t * 2), inverse1 = ptx::shfl(inverse, t * 2 + 1);
  for (int column = ptx::block_y(); column < kColumnBlocks; column += ptx::grid_size_y()) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int part = ptx::warp(); part < parts.count(); part += 8 * kWarps) {
      if (part != ptx::warp() || column != ptx::block_y()) batch.load(args, parts, column, part);
      batch.add_to(sum, parts, weights, part);
    }
    ptx::sync_block();  // the sums of the column before
    sums[ptx::thread()] = sum;
    ptx::sync_block();
    if (ptx::warp() != 0) continue;
    OVERSTORY_UNROLL
    for (int warp = 1; warp < kWarps; ++warp) {
      const float4 v = sums[warp * 32 + ptx::lane()];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    uint16_t* out =
        static_cast<uint16_t*>(args.out) + (first_row + t * 2) * kValues + column * 16 + g;
    if (t * 2 < rows) {
      out[0] = ptx::float_to_bf16(sum.x * inverse0);
      out[8] = ptx::float_to_bf16(sum.z * inverse0);
      out[kValues] = ptx::float_to_bf16(sum.y * inverse1);
      out[kValues + 8] = ptx::float_to_bf16(sum.w * inverse1);
    }
  }
}

// Rows of tokens behind the last request's.
__device__ __forceinline__ void clear_unowned(const Args& args, int tile) {
  const int owned =
      args.qo_indptr == nullptr
          ? args.bs
          : static_cast<int>(load_index(args.qo_indptr, args.wide_qo_indptr, args.bs));
  const int64_t first = (static_cast<int64_t>(owned) << args.heads_shift) + int64_t{tile} * 8;
  const int64_t end = static_cast<int64_t>(args.tokens) << args.heads_shift;
  const int pieces = 8 * kValues / 8;  // of 16 bytes
  for (int i = ptx::block_y() * kThreads + ptx::thread(); i < pieces;
       i += kThreads * ptx::grid_size_y()) {
    const int64_t row = first + i / (kValues / 8);
    if (row < end) {
      static_cast<uint4*>(args.out)[row * (kValues / 8) + i % (kValues / 8)] =
          make_uint4(0, 0, 0, 0);
    }
  }
  if (args.lse != nullptr && ptx::block_y() == 0 && ptx::thread() < 8 &&
      first + ptx::thread() < end) {
    args.lse[first + ptx::thread()] = kMinusInfinity;
  }
}

// Grid: x over the tiles of all requests and then of unowned rows, y over column blocks. `tiles`:
// of an item, as the attention kernel had it.
__global__ void __launch_bounds__(kThreads) combine(const Args args, int tiles) {
  // Lengths were there before the attention kernel began, which was an ordinary launch.
  int total_units = 0, total_tiles = 0, ignored = 0;
  find_place<By::tile>(args, tiles, -1, total_units, total_tiles);
  ptx::pdl_wait();  // by every block: one that leaves without could end this grid too early
  if (ptx::block() >= total_tiles) return clear_unowned(args, ptx::block() - total_tiles);
  const Place place = find_place<By::tile>(args, tiles, ptx::block(), ignored, ignored);
  const int chunk = chunk_of(args, tiles, total_units);
  const int tile = ptx::block() - place.first_tile;
  const int granules = granules_of(place.request);
  const int first_unit = place.first_unit + tile / tiles * granules;
  const Parts parts{first_unit / chunk, (first_unit + granules - 1) / chunk, tile % tiles, tiles};
  if (parts.count() == 1) return;

  float* weights = ptx::shared_memory<float>();
  float* scratch = weights + (args.blocks + 1) * 8;
  float4* sums = reinterpret_cast<float4*>(scratch + kWarps * 8);
  Batch batch;  // while the weights are computed
  batch.load(args, parts, ptx::block_y(), ptx::warp());
  const float2 total = weigh_parts(args, parts, weights, scratch);
  const float inverse = total.y == 0.0f ? 0.0f : 1.0f / total.y;
  const int64_t first_row =
      (static_cast<int64_t>(place.request.first_token) << args.heads_shift) + tile * 8;
  const int left = (place.request.tokens << args.heads_shift) - tile * 8;
  const int rows = left < 8 ? left : 8;
  if (args.lse != nullptr && ptx::block_y() == 0 && ptx::thread() < rows) {
    args.lse[first_row + ptx::thread()] = natural_lse(total.x, total.y);
  }
  add_parts(args, parts, batch, weights, sums, inverse, first_row, rows);
}

}  // namespace overstory::mla

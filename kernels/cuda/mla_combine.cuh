// Adds up the parts of items that several blocks worked on, and writes zeros to rows that no
// request owns (graphs are padded).
#pragma once

#include "mla_attention.cuh"

namespace overstory::mla {

// Dynamic shared memory: weights [parts][8 rows], then per-warp maxima and sums, then sums of O.
constexpr int combine_bytes(int blocks) {
  return (blocks + 1) * 8 * 4 + kWarps * 8 * 4 + kWarps * 8 * 32 * 4;
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

// Maxima and sums of the row lane % 8 in up to nine of a thread's parts, all on their way at once.
struct Stats {
  static constexpr int kStep = kThreads / 8, kCount = 9;
  float2 v[kCount];

  __device__ __forceinline__ void load(const Args& args, const Parts& parts, int first) {
    const float2* from = reinterpret_cast<const float2*>(args.stats) + parts.tile * 8 +
                         (ptx::thread() & 7);
    OVERSTORY_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int part = first + i * kStep;
      v[i] = make_float2(kMinusInfinity, 0.0f);
      if (part < parts.count()) v[i] = from[parts.slot(part) * parts.tiles * 8];
    }
  }
};

// Fills weights[part][row] with 2^(m_part - m) and returns m and the sum of row lane % 8. `stats`
// holds the first parts of the thread.
__device__ __forceinline__ float2 weigh_parts(const Args& args, const Parts& parts, Stats& stats,
                                              float* weights, float* scratch) {
  constexpr int kRound = Stats::kStep * Stats::kCount;
  const int row = ptx::thread() & 7, own = ptx::thread() >> 3;
  const bool once = parts.count() <= kRound;
  float m = kMinusInfinity;
  for (int first = own; first < parts.count(); first += kRound) {
    if (!once) stats.load(args, parts, first);
    OVERSTORY_UNROLL
    for (int i = 0; i < Stats::kCount; ++i) m = fmaxf(m, stats.v[i].x);
  }
  m = over_rows_of_warps(scratch, m, true);
  const float base = m == kMinusInfinity ? 0.0f : m;
  float sum = 0.0f;
  for (int first = own; first < parts.count(); first += kRound) {
    if (!once) stats.load(args, parts, first);
    OVERSTORY_UNROLL
    for (int i = 0; i < Stats::kCount; ++i) {
      const int part = first + i * Stats::kStep;
      if (part >= parts.count()) continue;
      const float weight = exp2f(stats.v[i].x - base);
      weights[part * 8 + row] = weight;
      sum += weight * stats.v[i].y;
    }
  }
  return make_float2(m, over_rows_of_warps(scratch, sum, false));
}

// Up to eight of a warp's parts of a pair of column blocks, all on their way at once.
struct Batch {
  uint4 v[8];
  float scale[8];

  // Parts first, first + 8, ...
  __device__ __forceinline__ void load(const Args& args, const Parts& parts, int pair, int first) {
    const uint4* from = static_cast<const uint4*>(args.partial) +
                        (parts.tile * kColumnPairs + pair) * 32 + ptx::lane();
    const int64_t stride = static_cast<int64_t>(parts.tiles) * kColumnPairs * 32;
    OVERSTORY_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int part = first + i * kWarps;
      v[i] = make_uint4(0, 0, 0, 0);
      scale[i] = 0.0f;
      if (part >= parts.count()) continue;
      v[i] = from[parts.slot(part) * stride];
      scale[i] = args.scales[parts.slot(part) * kWarps + pair / 2];
    }
  }

  __device__ __forceinline__ void add_to(float (&sum)[8], const Parts& parts, const float* weights,
                                         int first) const {
    OVERSTORY_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int part = first + i * kWarps;
      if (part >= parts.count()) continue;
      const float2 w =
          *reinterpret_cast<const float2*>(weights + part * 8 + (ptx::lane() & 3) * 2);
      const float own[2] = {w.x * scale[i], w.y * scale[i]};
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      OVERSTORY_UNROLL
      for (int e = 0; e < 8; ++e) {
        const uint16_t bits = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
        sum[e] = fmaf(ptx::f16_to_float(bits), own[e % 2], sum[e]);
      }
    }
  }
};

// Pairs of column blocks y, y + grid y, ... of a tile; warp w adds the parts w, w + 8, ... `batch`
// holds the first of them.
__device__ __forceinline__ void add_parts(const Args& args, const Parts& parts, Batch& batch,
                                          const float* weights, float* sums, float inverse,
                                          int64_t first_row, int rows) {
  // What this thread adds over the warps and writes: element `warp` of its lane's eight.
  const int e = ptx::warp(), lane = ptx::lane();
  const int row = (lane & 3) * 2 + e % 2;
  const float own_inverse = ptx::shfl(inverse, row);
  uint16_t* out = static_cast<uint16_t*>(args.out) + (first_row + row) * kValues + (lane >> 2) +
                  e / 2 * 8;
  for (int pair = ptx::block_y(); pair < kColumnPairs; pair += ptx::grid_size_y()) {
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int part = ptx::warp(); part < parts.count(); part += 8 * kWarps) {
      if (part != ptx::warp() || pair != ptx::block_y()) batch.load(args, parts, pair, part);
      batch.add_to(sum, parts, weights, part);
    }
    ptx::sync_block();  // the sums of the columns before
    OVERSTORY_UNROLL
    for (int i = 0; i < 8; ++i) sums[(ptx::warp() * 8 + i) * 32 + lane] = sum[i];
    ptx::sync_block();
    float all = 0.0f;
    OVERSTORY_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) all += sums[(warp * 8 + e) * 32 + lane];
    if (row < rows) out[pair * 32] = ptx::float_to_bf16(all * own_inverse);
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
  ptx::pdl_launch_dependents();
  // Lengths were there before the attention kernel let this one begin.
  int total_units = 0, total_tiles = 0, ignored = 0;
  find_place<By::tile>(args, tiles, -1, total_units, total_tiles);
  const Place place = find_place<By::tile>(args, tiles, ptx::block(), ignored, ignored);
  ptx::pdl_wait();  // by every block: one that leaves without could end this grid too early
  if (ptx::block() >= total_tiles) return clear_unowned(args, ptx::block() - total_tiles);
  const int chunk = chunk_of(args, tiles, total_units);
  const int tile = ptx::block() - place.first_tile;
  const int granules = granules_of(place.request);
  const int first_unit = place.first_unit + tile / tiles * granules;
  const Parts parts{first_unit / chunk, (first_unit + granules - 1) / chunk, tile % tiles, tiles};
  if (parts.count() == 1) return;

  float* weights = ptx::shared_memory<float>();
  float* scratch = weights + (args.blocks + 1) * 8;
  float* sums = scratch + kWarps * 8;
  Stats stats;
  stats.load(args, parts, ptx::thread() >> 3);
  Batch batch;  // while the weights are computed
  batch.load(args, parts, ptx::block_y(), ptx::warp());
  const float2 total = weigh_parts(args, parts, stats, weights, scratch);
  const float inverse = total.y == 0.0f ? 0.0f : args.value_scale / total.y;
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

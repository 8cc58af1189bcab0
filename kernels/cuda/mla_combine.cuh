// Adds up the parts of items that several blocks worked on, and writes zeros to rows that no
// request owns (graphs are padded).
#pragma once

#include "mla_attention.cuh"

namespace overstory::mla {

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

// Eight elements of a lane (rows 2t and 2t + 1 in turn, t = lane % 4) and what its rows have of
// maxima and sums, over a warp's parts: an online softmax whose scores are the parts' maxima.
struct Joined {
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  float m[2] = {kMinusInfinity, kMinusInfinity};
  float l[2] = {0.0f, 0.0f};
};

__device__ __forceinline__ float finite_base(float m) { return m == kMinusInfinity ? 0.0f : m; }

// Up to eight of a warp's parts of a pair of column blocks, with the maxima and sums of the lane's
// rows, all on their way at once.
struct Batch {
  static constexpr int kCount = 9;
  uint4 v[kCount];
  float scale[kCount];
  float4 stats[kCount];  // maximum and sum of row 2t, and of the next

  // Parts first, first + 8, ...
  __device__ __forceinline__ void load(const Args& args, const Parts& parts, int pair, int first) {
    const uint4* from = static_cast<const uint4*>(args.partial) +
                        (parts.tile * kColumnPairs + pair) * 32 + ptx::lane();
    const float4* of_rows =
        reinterpret_cast<const float4*>(args.stats) + parts.tile * 4 + (ptx::lane() & 3);
    OVERSTORY_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int part = first + i * kWarps;
      v[i] = make_uint4(0, 0, 0, 0);
      scale[i] = 0.0f;
      stats[i] = make_float4(kMinusInfinity, 0.0f, kMinusInfinity, 0.0f);
      if (part >= parts.count()) continue;
      const int64_t slot = parts.slot(part);
      v[i] = from[slot * parts.tiles * kColumnPairs * 32];
      stats[i] = of_rows[slot * parts.tiles * 4];
      scale[i] = args.scales[slot * kWarps + pair / 2];
    }
  }

  __device__ __forceinline__ void join(Joined& to) const {
    float m[2] = {to.m[0], to.m[1]};
    OVERSTORY_UNROLL
    for (int i = 0; i < kCount; ++i) {
      m[0] = fmaxf(m[0], stats[i].x), m[1] = fmaxf(m[1], stats[i].z);
    }
    const float base[2] = {finite_base(m[0]), finite_base(m[1])};
    const float before[2] = {exp2f(to.m[0] - base[0]), exp2f(to.m[1] - base[1])};
    OVERSTORY_UNROLL
    for (int e = 0; e < 8; ++e) to.sum[e] *= before[e % 2];
    OVERSTORY_UNROLL
    for (int c = 0; c < 2; ++c) to.m[c] = m[c], to.l[c] *= before[c];
    OVERSTORY_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const float w[2] = {exp2f(stats[i].x - base[0]), exp2f(stats[i].z - base[1])};
      to.l[0] = fmaf(w[0], stats[i].y, to.l[0]);
      to.l[1] = fmaf(w[1], stats[i].w, to.l[1]);
      const float own[2] = {w[0] * scale[i], w[1] * scale[i]};
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      OVERSTORY_UNROLL
      for (int e = 0; e < 8; ++e) {
        const uint16_t bits = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
        to.sum[e] = fmaf(ptx::f16_to_float(bits), own[e % 2], to.sum[e]);
      }
    }
  }
};

// What the warps have joined, in shared memory.
struct JoinedByWarps {
  float sum[kWarps][8][32];
  float2 stats[kWarps][8];  // by row
};

// One pair of column blocks of a tile, whose first row is `first_row` of `out` and of which `rows` are
// written. `batch` holds each warp's first parts.
__device__ __forceinline__ void join_parts(const Args& args, const Parts& parts, Batch& batch,
                                           int pair, int64_t first_row, int rows,
                                           JoinedByWarps& shared) {
  const int warp = ptx::warp(), lane = ptx::lane();
  Joined own;
  batch.join(own);
  OVERSTORY_KEEP_LOOP
  for (int part = warp + Batch::kCount * kWarps; part < parts.count(); part += Batch::kCount * kWarps) {
    batch.load(args, parts, pair, part);
    batch.join(own);
  }
  OVERSTORY_UNROLL
  for (int e = 0; e < 8; ++e) shared.sum[warp][e][lane] = own.sum[e];
  if (lane < 4) {
    shared.stats[warp][lane * 2] = make_float2(own.m[0], own.l[0]);
    shared.stats[warp][lane * 2 + 1] = make_float2(own.m[1], own.l[1]);
  }
  ptx::sync_block();
  // This thread adds over the warps and writes element `warp` of its lane's eight.
  const int row = (lane & 3) * 2 + warp % 2;
  float m = kMinusInfinity, l = 0.0f, all = 0.0f;
  OVERSTORY_UNROLL
  for (int w = 0; w < kWarps; ++w) m = fmaxf(m, shared.stats[w][row].x);
  OVERSTORY_UNROLL
  for (int w = 0; w < kWarps; ++w) {
    const float2 theirs = shared.stats[w][row];
    const float factor = exp2f(theirs.x - finite_base(m));
    l = fmaf(factor, theirs.y, l);
    all = fmaf(factor, shared.sum[w][warp][lane], all);
  }
  if (row >= rows) return;
  const float inverse = l == 0.0f ? 0.0f : args.value_scale / l;
  static_cast<uint16_t*>(args.out)[(first_row + row) * kValues + pair * 32 + warp / 2 * 8 +
                                   (lane >> 2)] = ptx::float_to_bf16(all * inverse);
  if (args.lse != nullptr && pair == 0 && warp < 2 && lane < 4) {
    args.lse[first_row + row] = natural_lse(m, l);
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
__global__ void __launch_bounds__(kThreads, 2) combine(const Args args, int tiles) {
  ptx::pdl_launch_dependents();
  // Lengths were there before the attention kernel let this one begin.
  const Batches all = load_batch(args, tiles);
  const Place place = find_place<By::tile>(args, tiles, all.first, ptx::block());
  ptx::pdl_wait();  // by every block: one that leaves without could end this grid too early
  if (ptx::block() >= all.tiles) return clear_unowned(args, ptx::block() - all.tiles);
  const int chunk = chunk_of(args, tiles, all.units);
  const int tile = ptx::block() - place.first_tile;
  const int granules = granules_of(place.request);
  const int first_unit = place.first_unit + tile / tiles * granules;
  const Parts parts{first_unit / chunk, (first_unit + granules - 1) / chunk, tile % tiles, tiles};
  if (parts.count() == 1) return;
  Batch batch;
  batch.load(args, parts, ptx::block_y(), ptx::warp());
  const int64_t first_row =
      (static_cast<int64_t>(place.request.first_token) << args.heads_shift) + tile * 8;
  const int left = (place.request.tokens << args.heads_shift) - tile * 8;
  JoinedByWarps& shared = *ptx::shared_memory<JoinedByWarps>();
  for (int pair = ptx::block_y(); pair < kColumnPairs; pair += ptx::grid_size_y()) {
    if (pair != ptx::block_y()) {
      batch.load(args, parts, pair, ptx::warp());
      ptx::sync_block();  // everybody has read the sums of the columns before
    }
    join_parts(args, parts, batch, pair, first_row, left < 8 ? left : 8, shared);
  }
}

}  // namespace overstory::mla

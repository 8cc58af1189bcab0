// Who does what, computed from the lengths on the device by every warp for itself.
//
// Units: one granule (16 keys) of one item (a row tile of a request). Requests follow each other,
// in a request its row tiles, in a row tile its granules. Block c owns units [c * chunk,
// (c + 1) * chunk): balanced for any mix of lengths, and the grid does not depend on them. Row tiles
// of one request run at the same time on different blocks, which stream the same keys: all but the
// first read them from L2.
#pragma once

#include "mla_args.cuh"
#include "ptx.cuh"

namespace overstory::mla {

__device__ __forceinline__ int64_t load_index(const void* base, bool wide, int64_t at) {
  return wide ? static_cast<const int64_t*>(base)[at] : static_cast<const int32_t*>(base)[at];
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Request {
  int prefix;       // keys before the tail
  int tokens;
  int tail;         // keys of the tail: tokens, or none in decode
  int first_token;  // row of q
};

__device__ __forceinline__ Request load_request(const Args& args, int b) {
  Request r;
  r.prefix = static_cast<int>(load_index(args.kv_ends, args.wide_kv_indptr, b) -
                              load_index(args.kv_indptr, args.wide_kv_indptr, b));
  if (args.qo_indptr == nullptr) {
    r.first_token = b;
    r.tokens = 1;
    r.tail = 0;
    return r;
  }
  r.first_token = static_cast<int>(load_index(args.qo_indptr, args.wide_qo_indptr, b));
  r.tokens =
      static_cast<int>(load_index(args.qo_indptr, args.wide_qo_indptr, b + 1)) - r.first_token;
  r.tail = r.tokens;
  return r;
}

// Granules of an item; one without keys has one too, so that its rows are written.
__device__ __forceinline__ int granules_of(const Request& r) {
  const int granules = ceil_div(r.prefix + r.tail, kGranule);
  return granules > 0 ? granules : 1;
}

__device__ __forceinline__ int tiles_of(const Request& r, int heads_shift) {
  return ceil_div(r.tokens << heads_shift, 8);
}

// A request and where its units and tiles begin, in all lanes.
struct Place {
  Request request;
  int index;
  int first_unit;
  int first_tile;
};

enum class By { unit, tile };

// Up to 32 requests from `base` on, of which each lane has one.
struct Group {
  Request request;
  int base;
  int first_unit, units;  // of the lane's request
  int first_tile, tiles;
  int end_unit, end_tile;  // of all requests up to the group's last

  // The request with unit (or tile) `wanted`, in all lanes; all lanes call. False: not one of these.
  template <By kBy>
  __device__ __forceinline__ bool find(int wanted, Place& place) const {
    const int first = kBy == By::unit ? first_unit : first_tile;
    const int count = kBy == By::unit ? units : tiles;
    const uint32_t hit = ptx::ballot(wanted >= first && wanted < first + count);
    if (hit == 0) return false;
    const int source = ptx::lowest_bit(hit);
    place.request.prefix = ptx::shfl(request.prefix, source);
    place.request.tokens = ptx::shfl(request.tokens, source);
    place.request.tail = ptx::shfl(request.tail, source);
    place.request.first_token = ptx::shfl(request.first_token, source);
    place.index = base + source;
    place.first_unit = ptx::shfl(first_unit, source);
    place.first_tile = ptx::shfl(first_tile, source);
    return true;
  }
};

// The requests from `base` on in a schedule of `tiles` tiles per item, whose units and tiles begin at
// `unit` and `tile`. All lanes call.
__device__ __forceinline__ Group load_group(const Args& args, int tiles, int base, int unit, int tile) {
  Group group{};
  group.base = base;
  const int b = base + ptx::lane();
  if (b < args.bs) group.request = load_request(args, b);
  group.tiles = tiles_of(group.request, args.heads_shift);
  group.units = ceil_div(group.tiles, tiles) * granules_of(group.request);
  int units = group.units, row_tiles = group.tiles;  // inclusive sums over the lanes
  OVERSTORY_KEEP_LOOP
  for (int step = 1; step < 32 && step < args.bs; step *= 2) {
    const int u = ptx::shfl_up(units, step), t = ptx::shfl_up(row_tiles, step);
    if (ptx::lane() >= step) units += u, row_tiles += t;
  }
  group.first_unit = unit + units - group.units;
  group.first_tile = tile + row_tiles - group.tiles;
  const int last = args.bs - base < 32 ? args.bs - base - 1 : 31;  // later lanes hold part sums
  group.end_unit = unit + ptx::shfl(units, last);
  group.end_tile = tile + ptx::shfl(row_tiles, last);
  return group;
}

// Of the whole batch, and its first group, in which most searches end.
struct Batches {
  Group first;
  int units, tiles;
};
__device__ __forceinline__ Batches load_batch(const Args& args, int tiles) {
  const Group first = load_group(args, tiles, 0, 0, 0);
  Batches batch{first, first.end_unit, first.end_tile};
  OVERSTORY_KEEP_LOOP
  for (int base = 32; base < args.bs; base += 32) {
    const Group next = load_group(args, tiles, base, batch.units, batch.tiles);
    batch.units = next.end_unit, batch.tiles = next.end_tile;
  }
  return batch;
}

// The request with unit (or tile) `wanted`, which is one of the batch. All lanes call.
template <By kBy>
__device__ __forceinline__ Place find_place(const Args& args, int tiles, Group group, int wanted) {
  Place place{};
  OVERSTORY_KEEP_LOOP
  while (!group.find<kBy>(wanted, place) && group.base + 32 < args.bs) {
    group = load_group(args, tiles, group.base + 32, group.end_unit, group.end_tile);
  }
  return place;
}

// What writing a part of an item and adding it up costs, in the time that a granule takes: about so
// much for each tile, and for eight at least, because few tiles wait as long. From an H200: the
// shares that were fastest there are 2 granules of 65 and 4 of 513 at nine tiles, 4 of 513 at one.
constexpr float kPartCost = 0.004f;

// Units per block: an even share, but not so few that parts cost more than they save. A block
// takes chunk granules' time, total / chunk parts take their cost; the sum is least at
// sqrt(cost * total).
__device__ __forceinline__ int chunk_of(const Args& args, int tiles, int total_units) {
  const int even = ceil_div(total_units, args.blocks);
  const float cost = kPartCost * static_cast<float>(tiles < 8 ? 8 : tiles);
  const float best = sqrtf(cost * static_cast<float>(total_units));
  const int wanted = best > 1.0f ? static_cast<int>(best + 0.5f) : 1;
  const int least = args.min_chunk > 0 ? args.min_chunk : wanted;
  return even > least ? even : least;
}

// Where a block leaves its part of an item that it does not own whole. An item begins in at most
// one of a block's two slots: 0 continues an item of the block before, 1 is an item's first part.
__device__ __forceinline__ int slot_of(int block, bool first_part) { return 2 * block + (first_part ? 1 : 0); }

}  // namespace overstory::mla

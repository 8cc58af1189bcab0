// Who does what, computed from the lengths on the device by every warp for itself.
//
// Units: one granule (16 keys) of one item (a row tile of a request). Requests follow each other,
// in a request its row tiles, in a row tile its granules. Block c owns units [c * chunk,
// (c + 1) * chunk): balanced for any mix of lengths, and the grid does not depend on them. Where it
// costs little, items are padded to whole shares, so that no block works on two. Row tiles
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
  int item_units;  // of each of its items
};

enum class By { unit, tile };

// Up to 32 requests from `base` on, of which each lane has one.
struct Group {
  Request request;
  int base;
  int first_unit, units;  // of the lane's request
  int item_units;
  int first_tile, tiles;
  int end_unit, end_tile;  // of all requests up to the group's last

  // Where the requests' units and tiles begin, the first one's at `unit` and `tile`. All lanes call.
  __device__ __forceinline__ void arrange(const Args& args, int per_item, int align, int unit,
                                          int tile) {
    item_units = granules_of(request);
    if (align > 1) item_units = ceil_div(item_units, align) * align;
    units = ceil_div(tiles, per_item) * item_units;
    int up_to = units, tiles_up_to = tiles;  // inclusive sums over the lanes
    OVERSTORY_KEEP_LOOP
    for (int step = 1; step < 32 && step < args.bs; step *= 2) {
      const int u = ptx::shfl_up(up_to, step), t = ptx::shfl_up(tiles_up_to, step);
      if (ptx::lane() >= step) up_to += u, tiles_up_to += t;
    }
    first_unit = unit + up_to - units;
    first_tile = tile + tiles_up_to - tiles;
    const int last = args.bs - base < 32 ? args.bs - base - 1 : 31;  // later lanes hold part sums
    end_unit = unit + ptx::shfl(up_to, last);
    end_tile = tile + ptx::shfl(tiles_up_to, last);
  }

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
    place.item_units = ptx::shfl(item_units, source);
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
  group.arrange(args, tiles, 1, unit, tile);
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

// What a block that begins a second item loses by it, in granules: it loads queries and writes a part
// once more. On an H200 shares that were 8 granules larger for it still took 3% less.
constexpr int kSecondItem = 10;

// Units of a block. If shares that are hardly larger suffice for it, items are padded to whole
// shares, so that each begins with a block of its own. All lanes call; arranges the batch.
// `uniform` and sums over the warp tell the compiler that lanes do not part here: else nvcc 13.0
// holds the address of shared memory in each lane, and the attention kernel's loop gets 2% longer.
__device__ __forceinline__ int share_out(const Args& args, int tiles, Batches& batch) {
  const int even = ptx::uniform(chunk_of(args, tiles, batch.units));
  Group& group = batch.first;
  const int items = ceil_div(group.tiles, tiles), granules = granules_of(group.request);
  if (args.min_chunk > 0 || args.bs > 32 || ptx::warp_sum(items) < 2) return even;
  OVERSTORY_KEEP_LOOP
  for (int chunk = even; chunk <= even + kSecondItem; ++chunk) {
    if (ptx::warp_sum(items * ceil_div(granules, chunk)) > args.blocks) continue;
    group.arrange(args, tiles, chunk, 0, 0);
    batch.units = group.end_unit;
    return chunk;
  }
  return even;
}

// Where a block leaves its part of an item that it does not own whole. An item begins in at most
// one of a block's two slots: 0 continues an item of the block before, 1 is an item's first part.
__device__ __forceinline__ int slot_of(int block, bool first_part) { return 2 * block + (first_part ? 1 : 0); }

}  // namespace overstory::mla

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

__device__ __forceinline__ float finite_base(float m) { return m == kMinusInfinity ? 0.0f : m; }

constexpr int kLoads = 17;               // parts that a warp has on their way at once
constexpr int kBatch = kLoads * kWarps;  // parts whose weights are in shared memory
constexpr int kEach = (kBatch * 8 + kThreads - 1) / kThreads;  // of a batch's rows, a thread's

struct Joining {
  float sum[kWarps][8][32];
  float weight[kBatch][8];      // of a part and row: 2^(maximum of the part - of all parts)
  float scale[kBatch][kWarps];  // of a part and warp of the attention kernel
  float highest[kWarps][8], total[kWarps][8];  // of a row, what each warp has seen
};

// Of a part and row: maximum and sum. And the power of two of one warp of the attention kernel, whose
// number is the row's. A thread has row thread % 8 of part thread / 8 and of every 32nd after it.
struct PartStat {
  float2 of = make_float2(kMinusInfinity, 0.0f);
  float scale = 0.0f;

  __device__ __forceinline__ static int row() { return ptx::thread() & 7; }
  __device__ __forceinline__ static int part(int i) {
    return ptx::thread() / 8 + i * (kThreads / 8);
  }
  __device__ __forceinline__ void load(const Args& args, const Parts& parts, int part) {
    if (part >= parts.count()) return;
    const int64_t slot = parts.slot(part);
    of = reinterpret_cast<const float2*>(args.stats)[(slot * parts.tiles + parts.tile) * 8 + row()];
    scale = args.scales[slot * kWarps + row()];
  }
  // Weight and power of two of the i-th part of a batch to shared memory; the row's sum goes on.
  __device__ __forceinline__ void put(int i, float base, float& total, Joining& shared) const {
    if (part(i) >= kBatch) return;
    const float weight = exp2f(of.x - base);
    total = fmaf(weight, of.y, total);
    shared.weight[part(i)][row()] = weight;
    shared.scale[part(i)][row()] = scale;
  }
};

// A warp's value of row lane % 8 to `to`, over the lanes that have the same row.
template <typename F>
__device__ __forceinline__ void put_row(float value, float (&to)[kWarps][8], const F& join) {
  value = join(value, ptx::shfl_xor(value, 8));
  value = join(value, ptx::shfl_xor(value, 16));
  if (ptx::lane() < 8) to[ptx::warp()][ptx::lane()] = value;
}
template <typename F>
__device__ __forceinline__ float row_of_all(const float (&of)[kWarps][8], int row, const F& join) {
  float value = of[0][row];
  OVERSTORY_UNROLL
  for (int w = 1; w < kWarps; ++w) value = join(value, of[w][row]);
  return value;
}
struct Higher {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Who adds up what: `team` warps share the parts of a pair of column blocks, and the block's teams
// take its pairs in turn. As many warps as the parts need, or as there are for each pair.
struct Teams {
  int team;   // warps, a power of two
  int pairs;  // of the block: block_y, + grid_size_y, ...

  __device__ __forceinline__ Teams(int parts, int groups) : team(1), pairs(kColumnPairs / groups) {
    while (team < kWarps && (team * kLoads < parts || team * pairs < kWarps)) team *= 2;
  }
  __device__ __forceinline__ int rounds() const { return (pairs * team + kWarps - 1) / kWarps; }
  __device__ __forceinline__ int rank() const { return ptx::warp() & (team - 1); }
  // Of the block's pairs, that which team `number` takes in a round; false: none is left for it.
  __device__ __forceinline__ bool find_pair(int round, int number, int& pair) const {
    const int index = round * (kWarps / team) + number;
    pair = ptx::block_y() + index * ptx::grid_size_y();
    return index < pairs;
  }
};

// A lane's eight elements (rows 2t and 2t + 1 in turn, t = lane % 4) of each of a warp's parts.
struct PartSums {
  uint4 v[kLoads];

  // Parts base + rank, + team, ... of a pair.
  __device__ __forceinline__ void load(const Args& args, const Parts& parts, const Teams& teams,
                                       int base, int pair) {
    const uint4* from = static_cast<const uint4*>(args.partial) +
                        (parts.tile * kColumnPairs + pair) * 32 + ptx::lane();
    const int64_t slot = int64_t{parts.tiles} * kColumnPairs * 32;
    int part = base + teams.rank();
    from += parts.slot(part) * slot;
    OVERSTORY_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      if (part < parts.count()) v[i] = *from;
      from += (2 * teams.team - (part == 0 ? 1 : 0)) * slot;  // as slots follow each other
      part += teams.team;
    }
  }

  // `left`: parts from the batch's first on.
  __device__ __forceinline__ void add(const Joining& shared, const Teams& teams, int left, int pair,
                                      float (&sum)[8]) const {
    OVERSTORY_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int part = teams.rank() + i * teams.team;
      if (part >= left) break;
      const float2 weight = reinterpret_cast<const float2*>(shared.weight[part])[ptx::lane() & 3];
      const float scale = shared.scale[part][pair / 2];
      const float own[2] = {weight.x * scale, weight.y * scale};
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      OVERSTORY_UNROLL
      for (int e = 0; e < 8; ++e) {
        const uint16_t bits = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
        sum[e] = fmaf(ptx::f16_to_float(bits), own[e % 2], sum[e]);
      }
    }
  }
};

// Of a tile, whose first row is `first_row` of `out` and of which `rows` are written.
struct Join {
  const Args& args;
  const Parts& parts;
  const int64_t first_row;
  const int rows;
  Joining& shared;
  const Teams teams;
  PartSums sums;
  float base, total;  // of the row PartStat::row(): maximum of all parts, and this thread's of the sum

  __device__ __forceinline__ Join(const Args& args, const Parts& parts, int64_t first_row, int rows,
                                  Joining& shared)
      : args(args), parts(parts), first_row(first_row), rows(rows), shared(shared),
        teams(parts.count(), ptx::grid_size_y()), total(0.0f) {}

  __device__ __forceinline__ bool find_pair(int round, int& pair) const {
    return teams.find_pair(round, ptx::warp() / teams.team, pair);
  }
  __device__ __forceinline__ void load(int round, int begin) {
    int pair;
    if (find_pair(round, pair)) sums.load(args, parts, teams, begin, pair);
  }

  // The first batch's weights, and the first round's parts. All loads are on their way at once.
  __device__ __forceinline__ void begin() {
    PartStat first[kEach];
    OVERSTORY_UNROLL
    for (int i = 0; i < kEach; ++i) first[i].load(args, parts, PartStat::part(i));
    load(0, 0);
    float m = kMinusInfinity;
    OVERSTORY_UNROLL
    for (int i = 0; i < kEach; ++i) m = fmaxf(m, first[i].of.x);
    OVERSTORY_KEEP_LOOP
    for (int part = PartStat::part(kEach); part < parts.count(); part += kThreads / 8) {
      PartStat later;
      later.load(args, parts, part);
      m = fmaxf(m, later.of.x);
    }
    put_row(m, shared.highest, Higher());
    ptx::sync_block();
    base = finite_base(row_of_all(shared.highest, PartStat::row(), Higher()));
    OVERSTORY_UNROLL
    for (int i = 0; i < kEach; ++i) first[i].put(i, base, total, shared);
    put_row(total, shared.total, Sum());
    ptx::sync_block();
  }
  // Those of another batch, in place of those that are there. Of many parts only, so loads wait.
  __device__ __forceinline__ void replace_weights(int begin) {
    if (begin == 0) total = 0.0f;
    ptx::sync_block();  // everybody has read the others
    OVERSTORY_KEEP_LOOP
    for (int i = 0; i < kEach; ++i) {
      PartStat stat;
      stat.load(args, parts, begin + PartStat::part(i));
      stat.put(i, base, total, shared);
    }
    put_row(total, shared.total, Sum());  // up to this batch
    ptx::sync_block();
  }

  // A warp's share of the sums of its team's pair, to shared memory.
  __device__ __forceinline__ void add(int round) {
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int pair;
    const bool has_pair = find_pair(round, pair);
    OVERSTORY_KEEP_LOOP
    for (int begin = 0; begin < parts.count(); begin += kBatch) {
      if (begin > 0) load(round, begin);
      if (begin > 0 || (round > 0 && parts.count() > kBatch)) replace_weights(begin);
      if (has_pair) sums.add(shared, teams, parts.count() - begin, pair, sum);
    }
    OVERSTORY_UNROLL
    for (int e = 0; e < 8; ++e) shared.sum[ptx::warp()][e][ptx::lane()] = sum[e];
  }

  // A thread adds over the warps of each team and writes element `warp` of its lane's eight.
  __device__ __forceinline__ void write(int round) const {
    const int lane = ptx::lane(), element = ptx::warp(), row = (lane & 3) * 2 + element % 2;
    const float l = row_of_all(shared.total, row, Sum());
    const float inverse = l == 0.0f ? 0.0f : args.value_scale / l;
    if (row >= rows) return;
    uint16_t* out = static_cast<uint16_t*>(args.out) + (first_row + row) * kValues +
                    element / 2 * 8 + (lane >> 2);
    int pair;
    OVERSTORY_KEEP_LOOP
    for (int n = 0; n < kWarps / teams.team && teams.find_pair(round, n, pair); ++n) {
      float all = 0.0f;
      for (int w = 0; w < teams.team; ++w) all += shared.sum[n * teams.team + w][element][lane];
      out[pair * 32] = ptx::float_to_bf16(all * inverse);
    }
  }
  __device__ __forceinline__ void write_lse() const {
    const int row = ptx::thread();
    if (args.lse == nullptr || ptx::block_y() != 0 || row >= rows) return;
    args.lse[first_row + row] = natural_lse(row_of_all(shared.highest, row, Higher()),
                                            row_of_all(shared.total, row, Sum()));
  }

  __device__ __forceinline__ void run() {
    begin();
    OVERSTORY_KEEP_LOOP
    for (int round = 0; round < teams.rounds(); ++round) {
      add(round);
      const bool last = round + 1 == teams.rounds();
      if (!last) load(round + 1, 0);
      ptx::sync_block();
      if (round == 0) write_lse();
      write(round);
      if (!last) ptx::sync_block();  // everybody has read the sums
    }
  }
};

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
  Batches all = load_batch(args, tiles);
  const int chunk = share_out(args, tiles, all);
  const Place place = find_place<By::tile>(args, tiles, all.first, ptx::block());
  ptx::pdl_wait();  // by every block: one that leaves without could end this grid too early
  if (ptx::block() >= all.tiles) return clear_unowned(args, ptx::block() - all.tiles);
  const int tile = ptx::block() - place.first_tile;
  const int granules = granules_of(place.request);
  const int first_unit = place.first_unit + tile / tiles * place.item_units;
  const Parts parts{first_unit / chunk, (first_unit + granules - 1) / chunk, tile % tiles, tiles};
  if (parts.count() == 1) return;
  const int64_t first_row =
      (static_cast<int64_t>(place.request.first_token) << args.heads_shift) + tile * 8;
  const int left = (place.request.tokens << args.heads_shift) - tile * 8;
  Joining& shared = *ptx::shared_memory<Joining>();
  Join(args, parts, first_row, left < 8 ? left : 8, shared).run();
}

}  // namespace overstory::mla

// Absorbed MLA attention of the rows of a tree (or of one row) over a paged cache, split over keys.
//
// Operands are swapped: keys are the M side of the matrix instructions, rows the N side.
//   scores   S^T [keys, rows]    = K [keys, 576] Q^T [576, rows]
//   outputs  O^T [values, rows] += V^T [512, keys] P^T [keys, rows],   V = K[:, :512]
// So no row is padded beyond 8, Q and O live in registers, and shared memory holds keys alone,
// which serve both products. Warp w multiplies scores over the columns [144 (w & 3), +144) for one
// half of the tiles (the first half takes an odd one too), and owns the output columns [64 w, +64) of
// all tiles.
#pragma once

#include "mla_keys.cuh"
#include "mla_layout.cuh"
#include "mla_schedule.cuh"
#include "ptx.cuh"

namespace overstory::mla {

constexpr float kMinusInfinity = -__builtin_huge_valf();
// A row's maximum moves only by more than this (log2), so that outputs are seldom rescaled; weights
// stay below 2^4, and their relative precision in bf16 is the same. But a row's highest weight is
// then not exactly 1: with 8 the error beside Triton's showed it
// (docs/kernels-attention.md, "How exact it is").
constexpr float kSlack = 4.0f;

// Nine tiles take values by halves of a warp's columns on sm_120, where registers do not suffice for
// all of them (nvcc 13.0 spills two); that costs reading the weights twice.
// The simulator does as sm_120 unless told otherwise.
#if defined(OVERSTORY_SIM) ? !defined(OVERSTORY_SIM_SM_90) : __CUDA_ARCH__ >= 1200
constexpr bool kHalves = true;
#else
constexpr bool kHalves = false;
#endif

__device__ __forceinline__ float natural_lse(float m, float l) {
  return l == 0.0f ? kMinusInfinity : (m + log2f(l)) * 0.693147180559945f;
}

// Which tail rows each token of the row tile sees, one 64-bit word each, kRowBytes apart.
template <int kTiles>
__device__ __forceinline__ void load_visible(const Args& args, const Piece& piece, int thread,
                                             char* visible) {
  const int lane = thread & 31;
  const int tail = piece.keys - piece.prefix;
  const int first = piece.first_row >> args.heads_shift;
  const int last = (piece.first_row + 8 * kTiles - 1) >> args.heads_shift;
  for (int token = first + (thread >> 5); token <= last && token < piece.tokens; token += kWarps) {
    uint64_t word = ~uint64_t{0};
    if (args.mask_mode == kMaskBytes) {
      const uint8_t* row = args.mask_bytes + args.mask_indptr[piece.request] +
                           int64_t{token} * piece.keys + piece.prefix;
      const int low = lane, high = lane + 32;
      const uint32_t low_bits = ptx::ballot(low < tail && row[low] != 0);
      const uint32_t high_bits = ptx::ballot(high < tail && row[high] != 0);
      word = (static_cast<uint64_t>(high_bits) << 32) | low_bits;
    } else if (args.mask_mode == kMaskWords) {
      word = args.mask_words[piece.first_token + token];
    } else if (args.mask_mode == kMaskCausal) {
      word >>= kMaxTail - 1 - token;
    }
    if (lane == 0) *reinterpret_cast<uint64_t*>(visible + (token - first) * kRowBytes) = word;
  }
}

template <int kTiles, int kStages, bool kFp8>
struct Block {
  using L = Layout<kTiles, kStages>;
  using Copy = KeyCopy<L::kCopiers, kFp8>;
  char* shared;
  int own_warp, own_lane;  // the warp is known to be the same in all lanes
  bool any_moved;  // a maximum, in the granule before
  int plain, all;  // granules of the piece: those with keys of the prefix only, and all
  float o[kTiles][4][4];                   // O^T fragments: 4 blocks of 16 columns
  uint32_t q[kStepsQK][L::kPairs + 1][2];  // Q^T fragments, the odd tile's last
  float4 state;                            // of the tile `own_tile`
  float2 odd_state;                        // of a row of the odd tile
  float4 own_part;                         // of the scores of the tile `own_tile`

  __device__ __forceinline__ int thread() const { return own_warp * 32 + own_lane; }
  __device__ __forceinline__ int warp() const { return own_warp; }
  __device__ __forceinline__ int lane() const { return own_lane; }
  // Where registers are scarce, nothing derived from the lane is kept beyond the next call.
  __device__ __forceinline__ void find_lane() {
    own_lane = (L::kTight ? ptx::computed_here(ptx::thread()) : ptx::thread()) & 31;
  }

  template <typename T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  __device__ __forceinline__ Piece& piece() const { return *at<Piece>(L::kPiece); }
  __device__ __forceinline__ int half() const { return warp() >> 2; }
  // The tile whose maxima and sums this warp keeps, if it has one. Of the odd tile each warp of the
  // first half keeps those of two rows.
  __device__ __forceinline__ int own_tile() const { return half() * L::kPairs + (warp() & 3); }
  __device__ __forceinline__ bool has_tile() const { return (warp() & 3) < L::kPairs; }
  __device__ __forceinline__ bool has_odd() const { return L::kOdd && half() == 0; }
  __device__ __forceinline__ int odd_row() const { return (warp() & 3) * 2 + (lane() >> 4); }

  // Queries that registers do not hold, each thread's its own.
  __device__ __forceinline__ static constexpr bool is_spared(int step, int j) {
    return j == L::kPairs - 1 && step >= kStepsQK - L::kSpared;
  }
  __device__ __forceinline__ uint2* spared(int step) const {
    return at<uint2>(L::kQueries) + (step - (kStepsQK - L::kSpared)) * kThreads + thread();
  }

  __device__ __forceinline__ static constexpr bool is_half_spared(int step, int j) {
    return L::kSparedHalf && j == L::kPairs - 1 && step == kStepsQK - L::kSpared - 1;
  }
  __device__ __forceinline__ uint32_t* half_spared() const {
    return at<uint32_t>(L::kHalfQueries) + thread();
  }

  // A warp's j-th tile of its half: that which it owns, if it does, is the first.
  __device__ __forceinline__ int tile_of(int j) const {
    const int tile = (warp() & 3) + j;
    return L::kPairs == 4 ? tile & 3 : tile % (L::kPairs > 0 ? L::kPairs : 1);
  }

  // Bytes from a key's or query's first column to this warp's of a step.
  __device__ __forceinline__ int column_of(int step) const {
    return (warp() & 3) * 288 + step * 32;
  }

  // ---- queries: by copies to shared memory, where keys will be, and from there as fragments

  __device__ __forceinline__ static char* query_row(char* shared, int row) {
    return shared + (row < L::kStagedRows ? L::kStaged + row * kRowBytes
                                          : L::kOddQueries + (row - L::kStagedRows) * kRowBytes);
  }

  // Of the row tile, rows of tokens that there are.
  __device__ __forceinline__ static int rows_of(const Args& args, const Piece& piece) {
    const int rows = (piece.tokens << args.heads_shift) - piece.first_row;
    return rows < L::kRows ? rows : L::kRows;
  }

  // The others become zeros. One copy a row: a thread's loop over pieces of 16 bytes took 2 us.
  __device__ __forceinline__ void stage_queries(const Args& args) const {
    const int rows = rows_of(args, piece());
    const uint16_t* q = static_cast<const uint16_t*>(args.q) +
                        piece().first_token * args.q_token_stride;
    // All blocks ask the L2 cache for these rows at the same time: each begins at another one.
    const int shift = ptx::block() % rows;
    if (lane() == 0) {
#ifndef OVERSTORY_SIM
#pragma unroll 3
#endif
      for (int i = warp(); i < rows; i += kWarps) {
        const int place = i + shift < rows ? i + shift : i + shift - rows;
        const int row = piece().first_row + place, token = row >> args.heads_shift;
        const int head = row & ((1 << args.heads_shift) - 1);
        ptx::bulk_copy(query_row(shared, place),
                       q + token * args.q_token_stride + head * args.q_head_stride, kKeyBytes,
                       at<uint64_t>(L::kArrivals));
      }
    }
    OVERSTORY_KEEP_LOOP
    for (int i = rows + warp(); i < L::kRows; i += kWarps) {
      OVERSTORY_KEEP_LOOP
      for (int part = lane(); part < kKeyBytes / 16; part += 32) {
        reinterpret_cast<uint4*>(query_row(shared, i))[part] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Steps `step` and `step + 1` (if there is one) of a tile.
  __device__ __forceinline__ void load_queries(int tile, int step, bool two, uint32_t (&first)[2],
                                               uint32_t (&second)[2]) const {
    const char* from = query_row(shared, tile * 8 + (lane() & 7)) + column_of(step);
    if (two) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, from + (lane() >> 3) * 16);
      first[0] = r[0], first[1] = r[1], second[0] = r[2], second[1] = r[3];
    } else {
      ptx::ldmatrix_x2(first, from + ((lane() >> 3) & 1) * 16);
    }
  }

  __device__ __forceinline__ const char* odd_queries() const {
    const int l = lane();
    return query_row(shared, (kTiles - 1) * 8 + (l & 7)) + column_of(0) + (l >> 3 & 1) * 16;
  }

  __device__ __forceinline__ void load_queries() {
    uint32_t none[2];
    OVERSTORY_UNROLL
    for (int j = 0; j <= L::kPairs; ++j) {
      const bool odd = j == L::kPairs;
      if (odd && (L::kOddSpared || !has_odd())) continue;
      const int tile = odd ? kTiles - 1 : half() * L::kPairs + tile_of(j);
      OVERSTORY_UNROLL
      for (int step = 0; step < kStepsQK; step += 2) {
        const bool two = step + 1 < kStepsQK;
        load_queries(tile, step, two, q[step][j], two ? q[step + 1][j] : none);
      }
    }
  }

  __device__ __forceinline__ void spare_queries() const {
    OVERSTORY_UNROLL
    for (int step = kStepsQK - L::kSpared; step < kStepsQK; ++step) {
      const uint32_t(&own)[2] = q[step][L::kPairs - 1];
      *spared(step) = make_uint2(own[0], own[1]);
    }
    if (L::kSparedHalf) *half_spared() = q[kStepsQK - L::kSpared - 1][L::kPairs - 1][1];
  }

  __device__ __forceinline__ void multiply_keys(float (&s)[4], const uint32_t (&a)[4], int step,
                                                int j) const {
    if (is_spared(step, j)) {
      const uint2 pairs = *spared(step);
      const uint32_t b[2] = {pairs.x, pairs.y};
      ptx::mma_bf16_m16n8k16(s, a, b);
    } else if (is_half_spared(step, j)) {
      const uint32_t b[2] = {q[step][j][0], *half_spared()};
      ptx::mma_bf16_m16n8k16(s, a, b);
    } else {
      ptx::mma_bf16_m16n8k16(s, a, q[step][j]);
    }
  }

  // Maxima of the rows 2t and 2t + 1 of the own tile, and what this lane has added of their sums.
  __device__ __forceinline__ float4 load_state() const {
    if (!L::kTight) return state;
    const float2 m = at<float2>(L::kMaxima)[own_tile() * 4 + (lane() & 3)];
    const float2 l = at<float2>(L::kSums)[own_tile() * 32 + lane()];
    return make_float4(m.x, m.y, l.x, l.y);
  }
  __device__ __forceinline__ void store_state(const float (&m)[2], const float (&l)[2]) {
    state = make_float4(m[0], m[1], l[0], l[1]);
    if (!L::kTight) return;
    ptx::sync_warp();  // other lanes have read them
    if (lane() < 4) at<float2>(L::kMaxima)[own_tile() * 4 + lane()] = make_float2(m[0], m[1]);
    at<float2>(L::kSums)[own_tile() * 32 + lane()] = make_float2(l[0], l[1]);
  }

  // This warp's part of the scores of its half's tiles and of the odd tile, to shared memory.
  // Pieces of `copy` go between, since one after another they wait for the memory pipe.
  __device__ __forceinline__ void multiply_scores(const char* keys, const Copy& copy) {
    if (L::kPairs == 0 && !has_odd()) return;
    float s[L::kPairs + 1][4], other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    OVERSTORY_UNROLL
    for (int j = 0; j <= L::kPairs; ++j) {
      OVERSTORY_UNROLL
      for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
    }
    const int own_lane = lane();
    const char* from = keys + (own_lane & 15) * kRowBytes + (own_lane >> 4) * 16 + column_of(0);
    uint32_t a[2][4], odd[2];
    ptx::ldmatrix_x4(a[0], from);
    const char* odd_from = L::kOddSpared ? odd_queries() : nullptr;
    if (L::kOddSpared && has_odd()) ptx::ldmatrix_x2(odd, odd_from);
    OVERSTORY_UNROLL
    for (int step = 0; step < kStepsQK; ++step) {
      // The next keys are on their way while these are multiplied: no other warp hides the wait.
      if (step + 1 < kStepsQK) {
        ptx::ldmatrix_x4(a[(step + 1) % 2], from + (step + 1) * 32);
        // Or the compiler, for want of registers, loads keys when they are needed.
        if (L::kFull) ptx::sync_warp();
      }
      OVERSTORY_UNROLL
      for (int j = 0; j < L::kPairs; ++j) multiply_keys(s[j], a[step % 2], step, j);
      if (L::kSpread && step * Copy::kPieces % kStepsQK < Copy::kPieces) {
        copy.issue(step * Copy::kPieces / kStepsQK, thread());
      }
      if (has_odd()) {
        // On its own, one chain of products would wait on itself: two, added below.
        const bool second = L::kPairs == 0 && step % 2 != 0;
        ptx::mma_bf16_m16n8k16(second ? other : s[L::kPairs], a[step % 2],
                               L::kOddSpared ? odd : q[step][L::kPairs]);
        if (L::kOddSpared && step + 1 < kStepsQK) ptx::ldmatrix_x2(odd, odd_from + (step + 1) * 32);
      }
    }
    float4* to = at<float4>(L::kScores) + lane();
    OVERSTORY_UNROLL
    for (int j = 0; j < L::kPairs; ++j) {
      const float4 part = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
      const int columns = warp() & 3, tile = tile_of(j);
      if (j == 0) {
        own_part = part;
        if (L::kPairs == 4 || columns < L::kPairs) continue;
      }
      // Any place of the tile's that no other warp takes.
      const int place = L::kPairs == 4 ? j - 1 : columns > tile ? columns - 1 : columns;
      to[((half() * L::kPairs + tile) * L::kParts + place) * 32] = part;
    }
    if (has_odd()) {
      const float* last = s[L::kPairs];
      const int g = lane() >> 2, t = lane() & 3;
      at<float4>(L::kScores)[L::kPairs * 2 * L::kParts * 32 + warp() * 32 + odd_place(g, t)] =
          L::kPairs > 0 ? make_float4(last[0], last[1], last[2], last[3])
                        : make_float4(last[0] + other[0], last[1] + other[1], last[2] + other[2],
                                      last[3] + other[3]);
    }
  }
  // Of keys g and g + 8 and rows 2t and 2t + 1 in a part of the odd tile: no bank conflicts in
  // either order.
  __device__ __forceinline__ static int odd_place(int g, int t) {
    return t * 8 + ((g + 2 * t) & 7);
  }

  // ---- weights 2^(score - maximum), to shared memory in bf16; maxima and sums go on

  // Of a tile: this lane has keys g and g + 8, rows 2t and 2t + 1 (g = lane / 4, t = lane % 4).
  __device__ __forceinline__ float4 add_parts() const {
    const float4* from = at<float4>(L::kScores) + own_tile() * L::kParts * 32 + lane();
    float4 s = own_part;
    OVERSTORY_UNROLL
    for (int part = 0; part < L::kParts; ++part) {
      const float4 more = from[part * 32];
      s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
    }
    return s;
  }

  // A row's maximum and what this lane has of its sum, for a granule whose scores reach `top`.
  struct Row {
    float m, l, factor;
    bool rescales;  // what was added up before, if anything was
    __device__ __forceinline__ bool moves(float top) const { return top > m + kSlack; }
    // `top`: of all keys of the granule.
    __device__ __forceinline__ void see(float top) {
      if (!moves(top)) return;
      factor = ptx::exp2_fast(m - top);
      rescales = m != kMinusInfinity;
      m = top;
      l *= factor;
    }
    // Nothing seen: all scores are -inf, and so must the exponents be.
    __device__ __forceinline__ float base() const { return m == kMinusInfinity ? 0.0f : m; }
  };

  // Weights of a tile's scores for these maxima.
  __device__ __forceinline__ static float4 weights_of(const Args& args, const float4& s,
                                                      const Row (&row)[2]) {
    const float base[2] = {row[0].base(), row[1].base()};
    return make_float4(ptx::exp2_fast(fmaf(s.x, args.scale_log2, -base[0])),
                       ptx::exp2_fast(fmaf(s.y, args.scale_log2, -base[1])),
                       ptx::exp2_fast(fmaf(s.z, args.scale_log2, -base[0])),
                       ptx::exp2_fast(fmaf(s.w, args.scale_log2, -base[1])));
  }
  __device__ __forceinline__ static float weight_of(const Args& args, float score, const Row& row) {
    return ptx::exp2_fast(fmaf(score, args.scale_log2, -row.base()));
  }

  // The scores `own` of the own tile, if this warp has one, and `odd` of a row of the odd tile. Whether
  // outputs must be rescaled. Weights are computed as if no maximum moved, while the lanes vote whether
  // one does; maxima, factors and who moved are written only then.
  __device__ __forceinline__ bool weigh(const Args& args, int count, const float4& own, float odd) {
    const int parity = count & 1;
    const bool owns = L::kPairs == 4 || has_tile(), odds = has_odd();
    float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float2 odd_before = make_float2(0.0f, 0.0f);
    if (owns) before = load_state();
    if (odds) odd_before = load_odd_state();
    Row row[2] = {{before.x, before.z, 1.0f, false}, {before.y, before.w, 1.0f, false}};
    Row last{odd_before.x, odd_before.y, 1.0f, false};
    float4 w = weights_of(args, own, row);
    const float top[2] = {fmaxf(own.x, own.z) * args.scale_log2, fmaxf(own.y, own.w) * args.scale_log2};
    const bool own_moves = owns && (row[0].moves(top[0]) || row[1].moves(top[1]));
    const bool odd_moves = odds && last.moves(odd * args.scale_log2);
    bool rescales = false;
    if (ptx::any(own_moves || odd_moves)) {
      if (owns) {
        rescales = move_own(count, row, top[0], top[1]);
        w = weights_of(args, own, row);
      }
      if (odds && move_odd(count, last, odd * args.scale_log2)) rescales = true;
    }
    const float odd_w = weight_of(args, odd, last);
    if (owns) put_weights(parity, w, row);
    if (odds) put_odd_weight(parity, odd_w, last);
    return rescales;
  }
  // The highest of all keys; true if outputs must be rescaled.
  __device__ __forceinline__ bool move_own(int count, Row (&row)[2], float first, float second) {
    OVERSTORY_UNROLL
    for (int step = 4; step < 32; step *= 2) {
      first = fmaxf(first, ptx::shfl_xor(first, step));
      second = fmaxf(second, ptx::shfl_xor(second, step));
    }
    row[0].see(first), row[1].see(second);
    const bool rescales = ptx::any(row[0].rescales || row[1].rescales);
    const int tile = own_tile(), parity = count & 1;
    ptx::sync_warp();  // other lanes have read the maxima: no vote says so of shared memory
    if (lane() < 4) {
      at<float2>(L::kScaling)[(parity * kTiles + tile) * 4 + lane()] =
          make_float2(row[0].factor, row[1].factor);
      if (L::kTight) at<float2>(L::kMaxima)[tile * 4 + lane()] = make_float2(row[0].m, row[1].m);
    }
    if (rescales && lane() == 0) at<int>(L::kMoved)[parity * 16 + tile] = count;
    return rescales;
  }
  __device__ __forceinline__ bool move_odd(int count, Row& last, float top) {
    OVERSTORY_UNROLL
    for (int step = 1; step < 16; step *= 2) top = fmaxf(top, ptx::shfl_xor(top, step));
    last.see(top);
    const bool rescales = ptx::any(last.rescales);
    const int parity = count & 1;
    ptx::sync_warp();  // as above
    if (L::kTight && (lane() & 15) == 0) at<float>(L::kOddStates)[odd_row()] = last.m;
    if (rescales && lane() == 0) at<int>(L::kMoved)[parity * 16 + 8 + warp()] = count;
    return rescales;
  }
  __device__ __forceinline__ void put_weights(int parity, const float4& w, Row (&row)[2]) {
    const uint32_t near = ptx::pack_bf16x2(w.x, w.y), far = ptx::pack_bf16x2(w.z, w.w);
    uint32_t* to = at<uint32_t>(L::kWeights + parity * L::kWeightBytes) + own_tile() * 64 + lane();
    to[0] = near;
    to[32] = far;
    row[0].l += ptx::bits_float(near << 16) + ptx::bits_float(far << 16);
    row[1].l += ptx::bits_float(near & 0xffff0000u) + ptx::bits_float(far & 0xffff0000u);
    state = make_float4(row[0].m, row[1].m, row[0].l, row[1].l);
    // A lane's own place: no other reads it.
    if (L::kTight) at<float2>(L::kSums)[own_tile() * 32 + lane()] = make_float2(row[0].l, row[1].l);
  }
  __device__ __forceinline__ void put_odd_weight(int parity, float w, const Row& row) {
    const uint16_t rounded = ptx::float_to_bf16(w);
    at<uint16_t>(L::kWeights + parity * L::kWeightBytes)[(kTiles - 1) * 128 + (lane() & 15) * 8 +
                                                         odd_row()] = rounded;
    // Whether or not it moved: another warp's rows of the tile may have.
    if ((lane() & 15) == 0) {
      at<float>(L::kScaling)[(parity * kTiles + kTiles - 1) * 8 + odd_row()] = row.factor;
    }
    const float l = row.l + ptx::bf16_to_float(rounded);
    odd_state = make_float2(row.m, l);
    if (L::kTight) at<float>(L::kOddStates)[8 + (warp() & 3) * 32 + lane()] = l;
  }

  // Of the odd tile a lane has the row `odd_row` and the key lane % 16.
  __device__ __forceinline__ float add_odd_parts() const {
    const int key = lane() & 15;
    const float* from = at<float>(L::kScores + L::kPairs * 2 * L::kParts * kFragmentBytes) +
                        odd_place(key & 7, warp() & 3) * 4 + (key >> 3) * 2 + (lane() >> 4);
    return (from[0] + from[128]) + (from[256] + from[384]);
  }
  __device__ __forceinline__ float2 load_odd_state() const {
    if (!L::kTight) return odd_state;
    return make_float2(at<float>(L::kOddStates)[odd_row()],
                       at<float>(L::kOddStates)[8 + (warp() & 3) * 32 + lane()]);
  }
  __device__ __forceinline__ void store_odd_state(float m, float l) {
    odd_state = make_float2(m, l);
    if (!L::kTight) return;
    ptx::sync_warp();  // other lanes have read them
    at<float>(L::kOddStates)[8 + (warp() & 3) * 32 + lane()] = l;
    if ((lane() & 15) == 0) at<float>(L::kOddStates)[odd_row()] = m;
  }

  __device__ __forceinline__ void mask_own(const Args& args, int count, float4& s) const {
    const int first = piece().first_row >> args.heads_shift;
    const int row = piece().first_row + own_tile() * 8 + (lane() & 3) * 2;
    const uint64_t word = seen_by(args, row, first);
    const int key = lane() >> 2;
    mask_key(count, key, word, s.x, s.y);
    mask_key(count, key + 8, word, s.z, s.w);
  }
  __device__ __forceinline__ void mask_odd(const Args& args, int count, float& score) const {
    const int first = piece().first_row >> args.heads_shift;
    const int row = piece().first_row + (kTiles - 1) * 8 + odd_row();
    float same = score;
    mask_key(count, lane() & 15, seen_by(args, row, first), score, same);
  }
  __device__ __forceinline__ uint64_t seen_by(const Args& args, int row, int first) const {
    const int token = row >> args.heads_shift;
    if (token >= piece().tokens) return 0;
    return *at<uint64_t>(L::kVisible + (token - first) * kRowBytes);
  }
  __device__ __forceinline__ void mask_key(int count, int key, uint64_t word,
                                           float& first, float& second) const {
    const int index = (piece().begin + count) * kGranule + key;
    const int tail = index - piece().prefix;
    const bool seen = index < piece().keys && (tail < 0 || ((word >> tail) & 1) != 0);
    if (!seen) {
      first = second = kMinusInfinity;
    } else if (at<uint8_t>(L::kBroken)[(count & 1) * 16 + key] != 0) {
      first = second = __builtin_nanf("");
    }
  }

  // A bit for each tile whose maxima moved in granule `count`, the odd tile's last.
  __device__ __forceinline__ uint32_t moved_in(int parity, int count) const {
    const int4* stamps = at<int4>(L::kMoved) + parity * 4;
    uint32_t tiles = 0;
    OVERSTORY_UNROLL
    for (int i = 0; i < (2 * L::kPairs + 3) / 4; ++i) {
      const int4 s = stamps[i];
      tiles |= (s.x == count ? 1u : 0u) << (4 * i) | (s.y == count ? 2u : 0u) << (4 * i) |
               (s.z == count ? 4u : 0u) << (4 * i) | (s.w == count ? 8u : 0u) << (4 * i);
    }
    if (!L::kOdd) return tiles;
    const int4 s = stamps[2];
    const bool odd = s.x == count || s.y == count || s.z == count || s.w == count;
    return tiles | (odd ? 1u << (kTiles - 1) : 0u);
  }
  // O of the tiles whose maxima moved to the new maxima.
  __device__ __forceinline__ void rescale(int parity, int count) {
    if (!any_moved) return;
    const uint32_t tiles = moved_in(parity, count);
    const float2* scaling = at<float2>(L::kScaling) + parity * kTiles * 4;
    OVERSTORY_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      if ((tiles >> tile & 1) == 0) continue;
      const float2 factor = scaling[tile * 4 + (lane() & 3)];
      OVERSTORY_UNROLL
      for (int block = 0; block < 4; ++block) {
        o[tile][block][0] *= factor.x, o[tile][block][1] *= factor.y;
        o[tile][block][2] *= factor.x, o[tile][block][3] *= factor.y;
      }
    }
  }

  // Values of a granule: this warp's 64 columns, or half of them where registers are scarce.
  static constexpr int kBlocks = L::kFull && kHalves ? 2 : 4;
  struct Values {
    uint32_t v[kBlocks][4];
  };
  __device__ __forceinline__ void load_values(const char* keys, int first, Values& values) const {
    const int matrix = lane() >> 3;
    const char* from = keys + ((lane() & 7) + (matrix >> 1) * 8) * kRowBytes +
                       (matrix & 1) * 16 + warp() * 128 + first * 32;
    OVERSTORY_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      ptx::ldmatrix_x4_trans(values.v[block], from + block * 32);
    }
  }
  // O of the tiles from kFirst (even) to kLast in those columns, for the weights of a parity.
  template <int kFirst, int kLast, int kFirstBlock>
  __device__ __forceinline__ void multiply_tiles(const Values& values, int parity) {
    const char* weights = at<char>(L::kWeights + parity * L::kWeightBytes);
    OVERSTORY_UNROLL
    for (int tile = kFirst; tile < kLast && tile < kTiles; tile += 2) {
      uint32_t p[4];
      if (tile + 1 < kTiles) {
        ptx::ldmatrix_x4_trans(p, weights + tile * 256 + lane() * 16);
      } else {
        uint32_t last[2];
        ptx::ldmatrix_x2_trans(last, weights + tile * 256 + lane() * 16);
        p[0] = last[0], p[1] = last[1];
      }
      const uint32_t first[2] = {p[0], p[1]}, second[2] = {p[2], p[3]};
      OVERSTORY_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        ptx::mma_bf16_m16n8k16(o[tile][kFirstBlock + block], values.v[block], first);
        if (tile + 1 < kTiles) {
          ptx::mma_bf16_m16n8k16(o[tile + 1 < kTiles ? tile + 1 : tile][kFirstBlock + block],
                                 values.v[block], second);
        }
      }
    }
  }
  // The fifths of the work on the values of granule `count`, to be done between other things.
  template <int kPart>
  __device__ __forceinline__ void multiply_values(const char* keys, int parity, int count,
                                                  Values& values) {
    if (kPart == 0) load_values(keys, 0, values), rescale(parity, count);
    if constexpr (kBlocks == 4) {
      multiply_tiles<kPart * 2, kPart * 2 + 2, 0>(values, parity);
    } else {
      if (kPart == 0) multiply_tiles<0, 4, 0>(values, parity);
      if (kPart == 1) multiply_tiles<4, kTiles, 0>(values, parity);
      if (kPart == 2) load_values(keys, 2, values);
      if (kPart == 2) multiply_tiles<0, 4, 2>(values, parity);
      if (kPart == 3) multiply_tiles<4, 8, 2>(values, parity);
      if (kPart == 4) multiply_tiles<8, kTiles, 2>(values, parity);
    }
  }

  __device__ __forceinline__ void clear_outputs() {
    OVERSTORY_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OVERSTORY_UNROLL
      for (int block = 0; block < 4; ++block) {
        OVERSTORY_UNROLL
        for (int e = 0; e < 4; ++e) o[tile][block][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void clear_states() {
    any_moved = false;
    const float high[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};
    if (has_tile()) store_state(high, sum);
    if (has_odd()) store_odd_state(kMinusInfinity, 0.0f);
    if (thread() < 32) at<int>(L::kMoved)[thread()] = -1;
    // Before the first granule there are values of none: its own ones, times 0.
    for (int i = thread(); i < L::kWeightBytes / 4; i += kThreads) {
      at<uint32_t>(L::kWeights + L::kWeightBytes)[i] = 0;
    }
  }

  // ---- the granules
  //
  // Between two barriers of the block a warp multiplies scores of granule i and values of granule
  // i - 1. The latter hide what the former wait for: other warps' parts of the scores, shuffles,
  // exponentials.

  // Granule number `count` of the piece is in stage count % kStages. `place`: bytes from the first
  // stage to a granule's; this is where the granule `later` after it is.
  template <int kLater>
  __device__ __forceinline__ static int place_after(int place) {
    constexpr int kAhead = (kLater % kStages + kStages) % kStages * kStageBytes;
    constexpr int kEnd = kStages * kStageBytes;
    return place >= kEnd - kAhead ? place + (kAhead - kEnd) : place + kAhead;
  }

  // Each copying warp fetches two (or four) keys of a granule. Its lanes hold where those of 16 (or
  // 8) granules are, found half as many granules or more ahead.
  __device__ __forceinline__ bool copies() const { return L::kCopiers == kThreads || half() == 1; }
  __device__ __forceinline__ int copier() const { return thread() & (L::kCopiers - 1); }
  __device__ __forceinline__ int locate_ahead(const Args& args, int first) const {
    const int granule = piece().begin + first + lane() / L::kCopiedKeys;
    const int key = granule * kGranule + (warp() & (L::kCopiers / 32 - 1)) * L::kCopiedKeys +
                    lane() % L::kCopiedKeys;
    return locate_key(args, piece(), key);
  }
  // Of the key that this lane copies a part of.
  __device__ __forceinline__ int located(int count, int ahead) const {
    return ptx::shfl(ahead, count % L::kAhead * L::kCopiedKeys + lane() / (32 / L::kCopiedKeys));
  }

  // Granule number `count` of the piece, to its stage, which has been free since a barrier.
  __device__ __forceinline__ void fetch(const Args& args, int count, int& ahead) const {
    copy_of(args, count, count * kStageBytes, ahead).issue_all(copier());  // the first ones
    go_on(args, count, ahead);
  }
  __device__ __forceinline__ Copy copy_of(const Args& args, int count, int place, int ahead) const {
    return Copy(args, shared + place, located(count, ahead), !in_tail(count), copier());
  }
  // The lanes of the last granules go on to those `kAhead` later.
  __device__ __forceinline__ void go_on(const Args& args, int count, int& ahead) const {
    constexpr int kHalf = L::kAhead / 2;
    if (count % kHalf != kHalf - 1) return;
    const bool upper = (count & kHalf) != 0;
    if ((lane() >= 16) == upper) ahead = locate_ahead(args, count + (upper ? 1 : kHalf + 1));
  }
  __device__ __forceinline__ void prefetch(const Args& args, int count, int ahead) {
    constexpr int kLanes = 32 / L::kCopiedKeys;
    const int where = located(count, ahead);
    if (where == kNoKey) return;
    const char* row = row_of(args, where);
    for (int line = lane() % kLanes; line * 128 < Copy::kBytes; line += kLanes) {
      ptx::prefetch_l2(row + line * 128);
    }
  }

  // This warp's keys of a granule have come: e4m3 ones become bf16.
  __device__ __forceinline__ void widen(int count, int place) const {
    constexpr int kLanes = 32 / L::kCopiedKeys;
    if (!kFp8 || !copies() || count >= all) return;
    widen_row<kLanes>(shared + place + copier() / kLanes * kRowBytes, copier() % kLanes);
  }
  // `count` granules of the piece lie before the one at hand. What is to be copied meanwhile, in the
  // group of copies that begins with it.
  __device__ __forceinline__ Copy fetch_ahead(const Args& args, int count, int place, int& ahead) const {
    if (!copies() || count < L::kFilled - (kStages - 2)) return Copy();  // `begin` has fetched it
    const int next = count + kStages - 2;
    Copy copy;
    if (next < all) {
      copy = copy_of(args, next, place_after<kStages - 2>(place), ahead);
      if (!L::kSpread) copy.issue_all(copier());
      go_on(args, next, ahead);
    }
    if (!L::kSpread) ptx::cp_async_commit();
    return copy;
  }

  // The first keys and the queries. Keys go at once to the stages that no query is put in; the
  // others to L2, and from there to their stages as soon as the queries are in registers.
  __device__ __forceinline__ void begin(const Args& args, int count, int& ahead) {
    ahead = kNoKey;
    if (copies()) ahead = locate_ahead(args, 0);
    stage_queries(args);
    OVERSTORY_KEEP_LOOP
    for (int i = 0; i < L::kEarly; ++i) {
      if (copies() && i < count) fetch(args, i, ahead);
      ptx::cp_async_commit();
    }
    OVERSTORY_KEEP_LOOP
    for (int i = L::kEarly; i < kStages; ++i) {
      if (copies() && i < count) prefetch(args, i, ahead);
    }
    if (piece().end * kGranule > piece().prefix) {
      load_visible<kTiles>(args, piece(), thread(), at<char>(L::kVisible));
    }
    ptx::mbarrier_wait(at<uint64_t>(L::kArrivals), piece().parity);
    ptx::sync_block();
    load_queries();
    ptx::sync_block();
    spare_queries();
    OVERSTORY_KEEP_LOOP
    for (int i = L::kEarly; i < L::kFilled; ++i) {
      if (copies() && i < count) fetch(args, i, ahead);
      ptx::cp_async_commit();
    }
    clear_states();
    clear_outputs();
    ptx::cp_async_wait<L::kFilled - 1>();
    widen(0, 0);
    ptx::sync_block();
  }

  // All parts of the scores that this warp adds up are there.
  __device__ __forceinline__ void wait_for_parts() const {
    if (half() == 0) {
      ptx::sync_named(1, kThreads / 2);
    } else if (L::kPairs > 0) {
      ptx::sync_named(2, kThreads / 2);
    }
  }

  // Of the piece: how many granules hold keys of the prefix only, and how many there are.
  // Where registers are scarce the piece is read again each time, and none holds it across the loop.
  __device__ __forceinline__ bool in_tail(int count) const {
    if (!L::kFull) return count >= plain;
    return ptx::load_volatile(&piece().begin) + count >= ptx::load_volatile(&piece().plain_end);
  }
  __device__ __forceinline__ bool in_piece(int count) const {
    if (!L::kFull) return count < all;
    return count < ptx::load_volatile(&piece().end) - ptx::load_volatile(&piece().begin);
  }
  __device__ __forceinline__ void count_granules() {
    plain = ptx::uniform(piece().plain_end > piece().begin ? piece().plain_end - piece().begin : 0);
    all = ptx::uniform(piece().end - piece().begin);
  }

  // When it begins, granule `count` is in shared memory for all; when it ends, the next one is.
  __device__ __forceinline__ void step(const Args& args, int count, bool tail, int& place, int& ahead) {
    find_lane();
    const Copy copy = fetch_ahead(args, count, place, ahead);
    if (tail) isolate(count, place);
    const int before = (count + 1) & 1;
    find_lane();
    multiply_scores(shared + place, copy);
    find_lane();
    if (L::kSpread && count >= L::kFilled - (kStages - 2)) ptx::cp_async_commit();
    Values values;
    const char* keys = shared + (count > 0 ? place_after<-1>(place) : place);
    multiply_values<0>(keys, before, count - 1, values);
    wait_for_parts();
    const bool owns = L::kPairs == 4 || has_tile();
    float4 own = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float odd = 0.0f;
    if (owns) own = add_parts();
    if (has_odd()) odd = add_odd_parts();
    multiply_values<1>(keys, before, count - 1, values);
    if (tail && owns) mask_own(args, count, own);
    if (tail && has_odd()) mask_odd(args, count, odd);
    multiply_values<2>(keys, before, count - 1, values);
    const bool rescales = weigh(args, count, own, odd);
    multiply_values<3>(keys, before, count - 1, values);
    multiply_values<4>(keys, before, count - 1, values);
    ptx::cp_async_wait<kStages - 3>();
    place = place_after<1>(place);
    widen(count + 1, place);
    any_moved = ptx::sync_block_or(rescales);
  }

  __device__ __forceinline__ void multiply_keys_and_values(const Args& args) {
    find_lane();
    count_granules();
    int ahead;
    begin(args, all, ahead);
    int count = 0, place = 0;
    if (L::kFull) {  // one loop: registers do not suffice for two
      OVERSTORY_KEEP_LOOP
      for (; in_piece(count); ++count) step(args, count, in_tail(count), place, ahead);
    } else {
      for (; count < plain; ++count) step(args, count, false, place, ahead);
      for (; count < all; ++count) step(args, count, true, place, ahead);
    }
    Values values;
    const int parity = (count - 1) & 1;
    const char* keys = shared + place_after<-1>(place);
    multiply_values<0>(keys, parity, count - 1, values);
    multiply_values<1>(keys, parity, count - 1, values);
    multiply_values<2>(keys, parity, count - 1, values);
    multiply_values<3>(keys, parity, count - 1, values);
    multiply_values<4>(keys, parity, count - 1, values);
  }

  // Before anybody reads a granule of the tail, a barrier on its own.
  __device__ __forceinline__ void isolate(int count, int place) {
    isolate_broken_keys(piece(), piece().begin + count, shared + place, thread(),
                        at<uint8_t>(L::kBroken) + (count & 1) * 16);
    ptx::sync_block();
  }

  // The piece in shared memory.
  __device__ __forceinline__ void run(const Args& args) {
    multiply_keys_and_values(args);
    finish(args);
  }

  // Sums over the lanes, then what becomes of the rows: reciprocals for `write_rows`, or maxima and
  // sums for the combining kernel.
  __device__ __forceinline__ void finish_tile(const Args& args) const {
    const float4 own = load_state();
    const float m[2] = {own.x, own.y};
    float l[2] = {own.z, own.w};
    OVERSTORY_UNROLL
    for (int step = 4; step < 32; step *= 2) {
      l[0] += ptx::shfl_xor(l[0], step);
      l[1] += ptx::shfl_xor(l[1], step);
    }
    if (lane() >= 4) return;
    OVERSTORY_UNROLL
    for (int c = 0; c < 2; ++c) finish_row(args, own_tile() * 8 + lane() * 2 + c, m[c], l[c]);
  }
  __device__ __forceinline__ void finish_odd_row(const Args& args) const {
    const float2 own = load_odd_state();
    float l = own.y;
    OVERSTORY_UNROLL
    for (int step = 1; step < 16; step *= 2) l += ptx::shfl_xor(l, step);
    if ((lane() & 15) == 0) finish_row(args, (kTiles - 1) * 8 + odd_row(), own.x, l);
  }
  __device__ __forceinline__ void finish_row(const Args& args, int row, float m, float l) const {
    if (piece().whole == 0) {
      reinterpret_cast<float2*>(args.stats)[piece().slot * kTiles * 8 + row] = make_float2(m, l);
      return;
    }
    at<float>(L::kScaling)[row] = l == 0.0f ? 0.0f : args.value_scale / l;
    const int in_request = piece().first_row + row;
    if (args.lse == nullptr || in_request >= piece().tokens << args.heads_shift) return;
    args.lse[(int64_t{piece().first_token} << args.heads_shift) + in_request] = natural_lse(m, l);
  }

  // In half precision, times a power of two that is this warp's own: of the 29 powers of two that
  // are normal numbers, the largest sum takes the last.
  __device__ __forceinline__ void write_partial(const Args& args) const {
    const int exponent = scale_exponent(largest());
    const float scale = ptx::bits_float(static_cast<uint32_t>(127 + exponent) << 23);
    if (lane() == 0) {
      args.scales[int64_t{piece().slot} * kWarps + warp()] =
          ptx::bits_float(static_cast<uint32_t>(127 - exponent) << 23);
    }
    uint4* to = static_cast<uint4*>(args.partial) +
                (int64_t{piece().slot} * kTiles * kColumnPairs + warp() * 2) * 32 + lane();
    OVERSTORY_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OVERSTORY_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        const float* a = o[tile][pair * 2];
        const float* b = o[tile][pair * 2 + 1];
        to[(tile * kColumnPairs + pair) * 32] =
            make_uint4(ptx::pack_f16x2(a[0] * scale, a[1] * scale),
                       ptx::pack_f16x2(a[2] * scale, a[3] * scale),
                       ptx::pack_f16x2(b[0] * scale, b[1] * scale),
                       ptx::pack_f16x2(b[2] * scale, b[3] * scale));
      }
    }
  }

  // Of the finite sums that this warp has, as bits of a float.
  __device__ __forceinline__ uint32_t largest() const {
    float most = 0.0f;
    for_sums([&](float v) { most = fmaxf(most, fabsf(v)); });  // not NaN
    uint32_t bits = ptx::warp_max(ptx::float_bits(most));
    if (bits >= 0x7f800000u) {
      most = 0.0f;
      for_sums([&](float v) {
        if (fabsf(v) < __builtin_huge_valf()) most = fmaxf(most, fabsf(v));
      });
      bits = ptx::warp_max(ptx::float_bits(most));
    }
    return bits;
  }
  // Of the power of two that takes it to [2^14, 2^15).
  __device__ __forceinline__ static int scale_exponent(uint32_t bits) {
    const int exponent = 14 + 127 - static_cast<int>(bits >> 23);
    return exponent < 126 ? exponent : 126;
  }
  template <typename F>
  __device__ __forceinline__ void for_sums(const F& f) const {
    OVERSTORY_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OVERSTORY_UNROLL
      for (int block = 0; block < 4; ++block) {
        OVERSTORY_UNROLL
        for (int e = 0; e < 4; ++e) f(o[tile][block][e]);
      }
    }
  }

  __device__ __forceinline__ void write_rows(const Args& args) const {
    const int g = lane() >> 2, t = lane() & 3;
    const bool odd = (g & 1) != 0;
    const int64_t first = int64_t{piece().first_token} << args.heads_shift;
    const int end = piece().tokens << args.heads_shift;
    uint16_t* out = static_cast<uint16_t*>(args.out) + warp() * 64 + (g & ~1);
    OVERSTORY_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const float2 factor = at<float2>(L::kScaling)[tile * 4 + t];
      const int row = piece().first_row + tile * 8 + t * 2 + (odd ? 1 : 0);
      OVERSTORY_UNROLL
      for (int part = 0; part < 8; ++part) {
        // Lanes of neighbouring columns swap, so that each has two columns of one row.
        const float first_row = o[tile][part / 2][part % 2 * 2] * factor.x;
        const float second_row = o[tile][part / 2][part % 2 * 2 + 1] * factor.y;
        const float other = ptx::shfl_xor(odd ? first_row : second_row, 4);
        const uint32_t pair =
            odd ? ptx::pack_bf16x2(other, second_row) : ptx::pack_bf16x2(first_row, other);
        if (row < end) {
          *reinterpret_cast<uint32_t*>(out + (first + row) * kValues + part * 8) = pair;
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const Args& args) {
    ptx::sync_block();  // nobody needs the scaling of the last granule any more
    if (has_tile()) finish_tile(args);
    if (has_odd()) finish_odd_row(args);
    if (piece().whole == 0) return write_partial(args);
    ptx::sync_block();
    write_rows(args);
  }
};

// The piece that begins with `unit`, of a block that owns the units before `end`, to shared memory;
// with the units that are left.
template <typename B>
__device__ __forceinline__ void make_piece(const Args& args, int tiles, const Place& place, int unit,
                                          int end, bool is_first, const B& block) {
  Piece& piece = block.piece();
  const int granules = granules_of(place.request);
  const int item = (unit - place.first_unit) / place.item_units;
  const int first_unit = place.first_unit + item * place.item_units;
  const int first = unit - first_unit;
  const int last = end - first_unit < granules ? end - first_unit : granules;
  if (ptx::thread() == 0) {
    piece.first_index = load_index(args.kv_indptr, args.wide_kv_indptr, place.index);
    piece.prefix = place.request.prefix;
    piece.keys = place.request.prefix + place.request.tail;
    piece.begin = first;
    piece.end = last;
    piece.plain_end = last < piece.prefix / kGranule ? last : piece.prefix / kGranule;
    piece.request = place.index;
    piece.tokens = place.request.tokens;
    piece.first_token = place.request.first_token;
    piece.first_row = item * tiles * 8;
    piece.whole = last - first == granules ? 1 : 0;
    piece.slot = slot_of(ptx::block(), first == 0);
    piece.next_unit = first_unit + last + (last < granules ? 0 : place.item_units - granules);
    piece.end_unit = end;
    piece.wide_out_cache_loc = args.wide_out_cache_loc ? 1 : 0;
    piece.parity = is_first ? 0 : piece.parity ^ 1;
    uint64_t* arrivals = block.template at<uint64_t>(B::L::kArrivals);
    if (is_first) {
      ptx::mbarrier_init(arrivals, 1);
      ptx::mbarrier_fence_init();
    }
    ptx::mbarrier_arrive_expect(arrivals, B::rows_of(args, piece) * kKeyBytes);
  }
  ptx::sync_block();
}

template <int kTiles, int kStages, bool kFp8>
__global__ void __launch_bounds__(kThreads, kTiles <= 3 ? 2 : 1) attention(const Args args) {
  ptx::pdl_wait();  // before the combining kernel may start, which reads lengths without waiting
  ptx::pdl_launch_dependents();
  Batches batch = load_batch(args, kTiles);
  const int chunk = share_out(args, kTiles, batch);
  const int64_t from = int64_t{ptx::block()} * chunk;  // beyond 32 bits for large shares
  if (from >= batch.units) return;
  const int begin = static_cast<int>(from);
  const int end = batch.units - begin > chunk ? begin + chunk : batch.units;
  Block<kTiles, kStages, kFp8> block;
  block.shared = ptx::shared_here(ptx::shared_memory<char>());
  block.own_warp = ptx::uniform(ptx::warp());
  Piece& piece = block.piece();
  make_piece(args, kTiles, find_place<By::unit>(args, kTiles, batch.first, begin), begin, end, true,
             block);
  while (true) {
    block.run(args);
    ptx::sync_block();  // the next piece takes the shared memory
    const int unit = piece.next_unit, last = piece.end_unit;
    if (unit >= last) return;
    ptx::fence_async();  // queries are copied to where keys and weights were
    ptx::sync_block();   // everybody has read the piece
    const Group first = load_group(args, kTiles, 0, 0, 0);
    make_piece(args, kTiles, find_place<By::unit>(args, kTiles, first, unit), unit, last, false,
               block);
  }
}

}  // namespace overstory::mla

// Absorbed MLA attention of the rows of a tree (or of one row) over a paged cache, split over keys.
//
// Operands are swapped: keys are the M side of the matrix instructions, rows the N side.
//   scores   S^T [keys, rows]    = K [keys, 576] Q^T [576, rows]
//   outputs  O^T [values, rows] += V^T [512, keys] P^T [keys, rows],   V = K[:, :512]
// So no row is padded beyond 8, Q and O live in registers, and shared memory holds keys alone,
// which serve both products. Warp w multiplies scores over the columns [144 (w & 3), +144) for one
// half of the tiles, and owns the output columns [64 w, +64) of all tiles.
#pragma once

#include "mla_keys.cuh"
#include "mla_layout.cuh"
#include "mla_schedule.cuh"
#include "ptx.cuh"

namespace overstory::mla {

constexpr float kMinusInfinity = -__builtin_huge_valf();
// A row's maximum moves only by more than this (log2), so that outputs are seldom rescaled; weights
// stay below 2^8, and their relative precision in bf16 is the same.
constexpr float kSlack = 8.0f;

__device__ __forceinline__ float natural_lse(float m, float l) {
  return l == 0.0f ? kMinusInfinity : (m + log2f(l)) * 0.693147180559945f;
}

// Which tail rows each token of the row tile sees, one 64-bit word each.
template <int kTiles>
__device__ __forceinline__ void load_visible(const Args& args, const Piece& piece, int thread,
                                             uint64_t* visible) {
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
    if (lane == 0) visible[token - first] = word;
  }
}

template <int kTiles, int kStages, Flow kFlow>
struct Block {
  using L = Layout<kTiles, kStages, kFlow>;
  // Granules that are copied to L2 ahead of those that are copied to shared memory: with three
  // stages those alone would wait for memory.
  static constexpr int kAhead = kStages <= 3 ? 2 : 0;

  char* shared;
  int own_warp;                                // ptx::warp(), known to be the same in all lanes
  float o[kTiles][4][4];                       // O^T fragments: 4 blocks of 16 columns
  uint32_t q[kStepsQK][L::kPairs + 1][2];      // Q^T fragments, the odd tile's last
  float4 state;                                // of the tile `own_tile`
  float4 own_part;                             // of its scores
  int ring = 0;  // pipelined: stage of the granule at hand, + kStages every other time around

  __device__ __forceinline__ static int thread() {
    return L::kTight ? ptx::computed_here(ptx::thread()) : ptx::thread();
  }
  __device__ __forceinline__ int warp() const { return L::kTight ? thread() >> 5 : own_warp; }
  __device__ __forceinline__ static int lane() { return thread() & 31; }

  __device__ __forceinline__ char* stage(int i) const { return shared + i * kStageBytes; }
  template <typename T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  __device__ __forceinline__ Piece& piece() const { return *at<Piece>(L::kPiece); }
  __device__ __forceinline__ int half() const { return warp() >> 2; }
  // The tile whose maxima and sums this warp keeps, if it has one.
  __device__ __forceinline__ int own_tile() const { return half() * L::kPairs + (warp() & 3); }
  __device__ __forceinline__ bool has_tile() const {
    return (warp() & 3) < L::kPairs + (L::kOdd && !L::kFull ? half() : 0);
  }

  // Queries of this lane's row of a tile, from this lane's first column; null for no row.
  __device__ __forceinline__ const uint16_t* query(const Args& args, int tile) const {
    const int row = piece().first_row + tile * 8 + (lane() >> 2);
    const int token = row >> args.heads_shift;
    if (token >= piece().tokens) return nullptr;
    const int head = row & ((1 << args.heads_shift) - 1);
    return static_cast<const uint16_t*>(args.q) +
           (piece().first_token + token) * args.q_token_stride + head * args.q_head_stride +
           (warp() & 3) * 144 + (lane() & 3) * 2;
  }

  __device__ __forceinline__ static uint32_t load_pair(const uint16_t* from, int column) {
    return from == nullptr ? 0 : *reinterpret_cast<const uint32_t*>(from + column);
  }

  // Places of queries in shared memory: 0.. of the odd tile, or -1 for those in registers.
  __device__ __forceinline__ static constexpr int place_of(int step, int j) {
    if (!L::kFull) return -1;
    if (j == L::kPairs) return step;
    const int spared = step - (kStepsQK - L::kSpared);
    return j == L::kPairs - 1 && spared >= 0 ? kStepsOdd + spared : -1;
  }

  __device__ __forceinline__ void keep_query(int step, int j, uint32_t low, uint32_t high) {
    if (place_of(step, j) >= 0) {
      at<uint2>(L::kQueries)[place_of(step, j) * kThreads + thread()] = make_uint2(low, high);
    } else {
      q[step][j][0] = low, q[step][j][1] = high;
    }
  }

  // A warp's j-th tile of its half: that which it owns, if it does, is the first.
  __device__ __forceinline__ int tile_of(int j) const {
    if (!L::kOwn) return j;
    const int tile = (warp() & 3) + j;
    return L::kPairs == 4 ? tile & 3 : tile % (L::kPairs > 0 ? L::kPairs : 1);
  }

  __device__ __forceinline__ void load_pair_queries(const Args& args, int j) {
    const uint16_t* from = query(args, half() * L::kPairs + tile_of(j));
    OVERSTORY_UNROLL
    for (int step = 0; step < kStepsQK; ++step) {
      keep_query(step, j, load_pair(from, step * 16), load_pair(from, step * 16 + 8));
    }
  }

  __device__ __forceinline__ void load_odd_queries(const Args& args) {
    const uint16_t* from = query(args, kTiles - 1);
    OVERSTORY_UNROLL
    for (int step = 0; step < kStepsOdd; ++step) {
      const int column = (half() == 0 ? step : step + kStepsOdd) * 16;
      const uint16_t* own = column < kStepsQK * 16 ? from : nullptr;
      keep_query(step, L::kPairs, load_pair(own, column), load_pair(own, column + 8));
    }
  }

  __device__ __forceinline__ void multiply_keys(float (&s)[4], const uint32_t (&a)[4], int step,
                                                int j) const {
    if (place_of(step, j) >= 0) {
      const uint2 pairs = at<uint2>(L::kQueries)[place_of(step, j) * kThreads + thread()];
      const uint32_t b[2] = {pairs.x, pairs.y};
      ptx::mma_bf16_m16n8k16(s, a, b);
    } else {
      ptx::mma_bf16_m16n8k16(s, a, q[step][j]);
    }
  }

  // Maxima of the rows 2t and 2t + 1 of a tile, and what this lane has added of their sums.
  __device__ __forceinline__ float4 load_state(int tile) const {
    return L::kTight ? at<float4>(L::kStates)[tile * 32 + lane()] : state;
  }
  __device__ __forceinline__ void store_state(int tile, const float (&m)[2], const float (&l)[2]) {
    state = make_float4(m[0], m[1], l[0], l[1]);
    if (L::kTight) at<float4>(L::kStates)[tile * 32 + lane()] = state;
  }

  // This warp's part of the scores of its half's tiles (kPaired) and of the odd tile (kOdd), to
  // shared memory as the lanes hold it. Of the odd tile the first half of the warps multiplies the
  // first five steps, the second half the others.
  template <int kHalf, bool kPaired, bool kOdd>
  __device__ __forceinline__ void multiply_scores(const char* keys) {
    constexpr int kBegin = kPaired || kHalf == 0 ? 0 : kStepsOdd;
    constexpr int kEnd = kPaired || kHalf == 1 ? kStepsQK : kStepsOdd;
    float s[L::kPairs + 1][4], other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    OVERSTORY_UNROLL
    for (int j = 0; j <= L::kPairs; ++j) {
      OVERSTORY_UNROLL
      for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
    }
    const char* from = keys + (lane() & 15) * kRowBytes + (lane() >> 4) * 16 + (warp() & 3) * 288;
    uint32_t a[2][4];
    ptx::ldmatrix_x4(a[kBegin % 2], from + kBegin * 32);
    OVERSTORY_UNROLL
    for (int step = kBegin; step < kEnd; ++step) {
      // The next keys are on their way while these are multiplied: no other warp hides the wait.
      if (step + 1 < kEnd) ptx::ldmatrix_x4(a[(step + 1) % 2], from + (step + 1) * 32);
      if (kPaired) {
        OVERSTORY_UNROLL
        for (int j = 0; j < L::kPairs; ++j) multiply_keys(s[j], a[step % 2], step, j);
      }
      const int odd_step = step - kHalf * kStepsOdd;
      if (kOdd && odd_step >= 0 && odd_step < kStepsOdd) {
        // On its own, one chain of products would wait on itself: two, added below.
        const bool second = !(kPaired && L::kPairs > 0) && step % 2 != 0;
        multiply_keys(second ? other : s[L::kPairs], a[step % 2], odd_step, L::kPairs);
      }
    }
    float4* to = at<float4>(L::kScores) + lane();
    if (kPaired) {
      OVERSTORY_UNROLL
      for (int j = 0; j < L::kPairs; ++j) {
        const float4 part = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
        const int columns = warp() & 3, tile = tile_of(j);
        if (L::kOwn && j == 0) {
          own_part = part;
          if (L::kPairs == 4 || columns < L::kPairs) continue;
        }
        // Any place of the tile's that no other warp takes.
        const int place = !L::kOwn           ? columns
                          : L::kPairs == 4 ? j - 1
                          : columns > tile ? columns - 1
                                           : columns;
        to[((kHalf * L::kPairs + tile) * L::kParts + place) * 32] = part;
      }
    }
    if (kOdd) {
      const float* last = s[L::kPairs];
      to[(L::kPairs * 2 * L::kParts + warp()) * 32] = make_float4(
          last[0] + other[0], last[1] + other[1], last[2] + other[2], last[3] + other[3]);
    }
  }

  // Scores of a tile: this lane has keys g and g + 8, rows 2t and 2t + 1 (g = lane / 4, t = lane % 4).
  __device__ __forceinline__ float4 add_parts(int tile, bool odd) const {
    const float4* from = at<float4>(L::kScores) + tile * L::kParts * 32 + lane();
    float4 s = L::kOwn && !odd ? own_part : from[0];
    OVERSTORY_UNROLL
    for (int part = 0; part < 8; ++part) {
      if (part == 0 && (!L::kOwn || odd)) continue;
      if (part >= L::kParts && !odd) break;
      const float4 more = from[part * 32];
      s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
    }
    return s;
  }

  __device__ __forceinline__ void mask_scores(const Args& args, int granule,
                                              int tile, float4& s) const {
    const int first = piece().first_row >> args.heads_shift;
    const int row = piece().first_row + tile * 8 + (lane() & 3) * 2;
    const int token = row >> args.heads_shift;
    const uint64_t word =
        token < piece().tokens ? at<uint64_t>(L::kVisible)[token - first] : 0;
    const int key = lane() >> 2;
    mask_key(granule, key, word, s.x, s.y);
    mask_key(granule, key + 8, word, s.z, s.w);
  }

  __device__ __forceinline__ void mask_key(int granule, int key, uint64_t word,
                                           float& first, float& second) const {
    const int index = granule * kGranule + key;
    const int tail = index - piece().prefix;
    const bool seen = index < piece().keys && (tail < 0 || ((word >> tail) & 1) != 0);
    if (!seen) {
      first = second = kMinusInfinity;
    } else if (at<uint8_t>(L::kBroken)[granule % 2 * 16 + key] != 0) {
      first = second = __builtin_nanf("");
    }
  }

  // Weights 2^(score - maximum) of `tile` and the odd one (kCount 2), to shared memory in bf16; their
  // maxima and sums go on. Two tiles go side by side, because each waits on itself.
  template <bool kTail, int kCount>
  __device__ __forceinline__ void softmax(const Args& args, int granule, int first, bool odd) {
    const int parity = granule & 1;
    float4 s[kCount];
    float top[kCount][2], factor[kCount][2];
    OVERSTORY_UNROLL
    for (int k = 0; k < kCount; ++k) {
      const int tile = k == 0 ? first : kTiles - 1;
      s[k] = add_parts(tile, k > 0 || odd);
      if (kTail) mask_scores(args, granule, tile, s[k]);
      top[k][0] = fmaxf(s[k].x, s[k].z), top[k][1] = fmaxf(s[k].y, s[k].w);
    }
    OVERSTORY_UNROLL
    for (int step = 4; step < 32; step *= 2) {
      OVERSTORY_UNROLL
      for (int k = 0; k < kCount; ++k) {
        top[k][0] = fmaxf(top[k][0], ptx::shfl_xor(top[k][0], step));
        top[k][1] = fmaxf(top[k][1], ptx::shfl_xor(top[k][1], step));
      }
    }
    OVERSTORY_UNROLL
    for (int k = 0; k < kCount; ++k) {
      const int tile = k == 0 ? first : kTiles - 1;
      const float4 before = load_state(tile);
      float m[2] = {before.x, before.y}, l[2] = {before.z, before.w};
      bool moves[2];
      OVERSTORY_UNROLL
      for (int c = 0; c < 2; ++c) {
        top[k][c] *= args.scale_log2;
        moves[c] = top[k][c] > m[c] + kSlack;
        factor[k][c] = 1.0f;
        if (moves[c]) {
          factor[k][c] = ptx::exp2_fast(m[c] - top[k][c]);
          m[c] = top[k][c];
          l[c] *= factor[k][c];
        }
      }
      // A row that has seen nothing: all scores are -inf, and so must the exponents be.
      const float base[2] = {m[0] == kMinusInfinity ? 0.0f : m[0],
                             m[1] == kMinusInfinity ? 0.0f : m[1]};
      const uint32_t near =
          ptx::pack_bf16x2(ptx::exp2_fast(fmaf(s[k].x, args.scale_log2, -base[0])),
                           ptx::exp2_fast(fmaf(s[k].y, args.scale_log2, -base[1])));
      const uint32_t far =
          ptx::pack_bf16x2(ptx::exp2_fast(fmaf(s[k].z, args.scale_log2, -base[0])),
                           ptx::exp2_fast(fmaf(s[k].w, args.scale_log2, -base[1])));
      uint32_t* to = at<uint32_t>(L::kWeights + parity * L::kWeightBytes) + tile * 64 + lane();
      to[0] = near;
      to[32] = far;
      const bool moved = ptx::any(moves[0] || moves[1]);
      if (lane() == 0) at<uint8_t>(L::kMoved)[parity * 16 + tile] = moved ? 1 : 0;
      if (moved && lane() < 4) {
        at<float2>(L::kScaling)[(parity * kTiles + tile) * 4 + lane()] =
            make_float2(factor[k][0], factor[k][1]);
      }
      // The sums of what the product will use: of the rounded weights.
      l[0] += ptx::bits_float(near << 16) + ptx::bits_float(far << 16);
      l[1] += ptx::bits_float(near & 0xffff0000u) + ptx::bits_float(far & 0xffff0000u);
      store_state(tile, m, l);
    }
  }

  // A tile for each warp of a half; the odd tile, of the second half, for the warp that is left or
  // with another.
  template <int kHalf, bool kTail>
  __device__ __forceinline__ void softmax_half(const Args& args, int granule) {
    const int j = warp() & 3, tile = kHalf * L::kPairs + j;
    constexpr bool kWithOdd = L::kOdd && kHalf == 1;
    if (L::kFull && kWithOdd && j == 0) {
      softmax<kTail, 2>(args, granule, tile, false);
    } else if (j < L::kPairs) {
      softmax<kTail, 1>(args, granule, tile, false);
    } else if (!L::kFull && kWithOdd && j == L::kPairs) {
      softmax<kTail, 1>(args, granule, tile, true);
    }
  }

  __device__ __forceinline__ bool any_moved(const uint8_t* moved) const {
    const uint2 tiles = *reinterpret_cast<const uint2*>(moved);
    bool any = (tiles.x | (kTiles > 4 ? tiles.y : 0)) != 0;
    if (kTiles > 8) any |= moved[8] != 0;
    return any;
  }

  // O of the tiles whose maxima moved to the new maxima.
  __device__ __forceinline__ void rescale(const uint8_t* moved, const float2* scaling) {
    OVERSTORY_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      if (moved[tile] == 0) continue;
      const float2 factor = scaling[tile * 4 + (lane() & 3)];
      OVERSTORY_UNROLL
      for (int block = 0; block < 4; ++block) {
        o[tile][block][0] *= factor.x, o[tile][block][1] *= factor.y;
        o[tile][block][2] *= factor.x, o[tile][block][3] *= factor.y;
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const char* keys, int granule) {
    const int parity = granule & 1;
    const int matrix = lane() >> 3;
    const char* from = keys + ((lane() & 7) + (matrix >> 1) * 8) * kRowBytes +
                       (matrix & 1) * 16 + warp() * 128;
    uint32_t v[4][4];
    OVERSTORY_UNROLL
    for (int block = 0; block < 4; ++block) ptx::ldmatrix_x4_trans(v[block], from + block * 32);
    // After those: the branch waits for them all the same.
    const uint8_t* moved = at<uint8_t>(L::kMoved) + parity * 16;
    if (any_moved(moved)) rescale(moved, at<float2>(L::kScaling) + parity * kTiles * 4);
    const char* weights = at<char>(L::kWeights + parity * L::kWeightBytes);
    OVERSTORY_UNROLL
    for (int tile = 0; tile + 1 < kTiles; tile += 2) {
      uint32_t p[4];
      ptx::ldmatrix_x4_trans(p, weights + tile * 256 + lane() * 16);
      const uint32_t first[2] = {p[0], p[1]}, second[2] = {p[2], p[3]};
      OVERSTORY_UNROLL
      for (int block = 0; block < 4; ++block) {
        ptx::mma_bf16_m16n8k16(o[tile][block], v[block], first);
        ptx::mma_bf16_m16n8k16(o[tile + 1][block], v[block], second);
      }
    }
    if (L::kOdd) {
      uint32_t p[2];
      ptx::ldmatrix_x2_trans(p, weights + (kTiles - 1) * 256 + (lane() & 15) * 16);
      OVERSTORY_UNROLL
      for (int block = 0; block < 4; ++block) {
        ptx::mma_bf16_m16n8k16(o[kTiles - 1][block], v[block], p);
      }
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

  // Before the first granule: queries of the pairs from `first` on, state, masks.
  __device__ __forceinline__ void prepare(const Args& args, int first) {
    OVERSTORY_UNROLL
    for (int j = first; j < L::kPairs; ++j) load_pair_queries(args, j);
    if (L::kOdd) load_odd_queries(args);
    const float high[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};
    if (has_tile()) store_state(own_tile(), high, sum);
    if (L::kFull && warp() == 4) store_state(kTiles - 1, high, sum);
    if (thread() < 32) at<uint8_t>(L::kMoved)[thread()] = 0;
    if (piece().end * kGranule > piece().prefix) {
      load_visible<kTiles>(args, piece(), thread(), at<uint64_t>(L::kVisible));
    }
  }

  // ---- one barrier a granule
  //
  // Between two barriers a warp multiplies values of the granule before and makes weights of this
  // one; halves in different order, so that one half waits on its softmax while the other keeps the
  // tensor cores busy:
  //   first half    scores (i), | softmax (i), values (i - 1)
  //   second half   values (i - 1), scores (i), | softmax (i)       |: a barrier of the half alone

  __device__ __forceinline__ int ring_stage(int ahead) const {
    const int at = ring + ahead;
    return at >= 2 * kStages ? at - 2 * kStages : at >= kStages ? at - kStages : at;
  }
  __device__ __forceinline__ uint64_t* landed(int i) const { return at<uint64_t>(L::kLanded) + i; }
  __device__ __forceinline__ void wait_for_keys() const {
    ptx::mbarrier_wait(landed(ring_stage(0)), ring >= kStages ? 1 : 0);
  }

  // Each warp fetches the keys 2w and 2w + 1 of a granule. Its lanes hold the addresses of those of
  // 16 granules, found eight granules or more ahead: lane / 2 is a granule's number modulo 16.
  __device__ __forceinline__ int locate_ahead(const Args& args, int first) const {
    const int granule = piece().begin + first + (lane() >> 1);
    const int key = granule * kGranule + warp() * 2 + (lane() & 1);
    return locate_key(args, piece(), key);
  }
  __device__ __forceinline__ static bool holds(int count) {
    return ((lane() >> 1) ^ (count & 15)) == 0;
  }

  // Granule number `count` of the piece, to its stage, which has been free since a barrier.
  __device__ __forceinline__ void fetch(const Args& args, int count, int to,
                                        int& ahead) const {
    if (holds(count)) {
      fetch_key(stage(to) + (warp() * 2 + (lane() & 1)) * kRowBytes, row_of(args, ahead),
                landed(to));
    }
    if ((count & 7) == 7) {
      // The lanes of the last eight granules go on to those 16 later.
      const int first = count + ((count & 8) == 0 ? 9 : 1);
      if (((lane() >> 4) != 0) == ((count & 8) != 0)) ahead = locate_ahead(args, first);
    }
  }
  __device__ __forceinline__ static void prefetch(const Args& args, int count,
                                                      int ahead) {
    if (holds(count) && ahead != kNoKey) ptx::bulk_prefetch(row_of(args, ahead), kKeyBytes);
  }

  // `count` granules of the piece lie before the one at hand, and `end` is their number in all.
  __device__ __forceinline__ void fetch_ahead(const Args& args, int count, int end,
                                              int& ahead) const {
    if (count < 2) return;  // all stages have been filled already
    const int next = count + kStages - 2;
    if (kAhead > 0 && next + kAhead < end) prefetch(args, next + kAhead, ahead);
    if (next < end) fetch(args, next, ring_stage(kStages - 2), ahead);
  }

  __device__ __forceinline__ void begin_pipelined(const Args& args, int count,
                                                  int& ahead) {
    ahead = locate_ahead(args, 0);
    OVERSTORY_UNROLL
    for (int i = 0; i < kStages; ++i) {
      if (i < count) fetch(args, i, ring_stage(i), ahead);
    }
    OVERSTORY_UNROLL
    for (int i = kStages; i < kStages + kAhead; ++i) {
      if (i < count) prefetch(args, i, ahead);
    }
    prepare(args, 0);
    ptx::sync_block();
    clear_outputs();
  }

  template <int kHalf>
  __device__ __forceinline__ void score_half() {
    // Nine tiles' scores at a time would be some registers too many.
    constexpr bool kTogether = L::kOdd && !L::kFull;
    const char* keys = stage(ring_stage(0));
    if (L::kPairs > 0 || kTogether) multiply_scores<kHalf, (L::kPairs > 0), kTogether>(keys);
    if (L::kFull) multiply_scores<kHalf, false, true>(keys);
    // The second half adds up the odd tile, with parts of both.
    if (kHalf == 0) {
      if (L::kOdd) ptx::arrive_named(2, kThreads);
      if (L::kPairs > 0) ptx::sync_named(1, kThreads / 2);
    } else {
      ptx::sync_named(2, L::kOdd ? kThreads : kThreads / 2);
    }
  }

  struct Range {
    int begin, plain_end, end;
  };
  __device__ __forceinline__ Range range() const {
    return {piece().begin, piece().plain_end, piece().end};
  }

  template <bool kTail>
  __device__ __forceinline__ void step_pipelined(const Args& args, int granule, const Range& kept,
                                                 int& ahead) {
    const Range now = L::kTight ? range() : kept;
    fetch_ahead(args, granule - now.begin, now.end - now.begin, ahead);
    if (kTail) {
      wait_for_keys();
      isolate(granule, ring_stage(0));
    }
    const char* before = stage(ring_stage(kStages - 1));
    if (half() == 0) {
      if (!kTail) wait_for_keys();
      score_half<0>();
      softmax_half<0, kTail>(args, granule);
      if (granule > now.begin) multiply_values(before, granule - 1);
    } else {
      if (granule > now.begin) multiply_values(before, granule - 1);
      if (!kTail) wait_for_keys();
      score_half<1>();
      softmax_half<1, kTail>(args, granule);
    }
    ptx::sync_block();
    ring = ring + 1 == 2 * kStages ? 0 : ring + 1;
  }

  __device__ __forceinline__ void run_pipelined(const Args& args) {
    int ahead;
    begin_pipelined(args, piece().end - piece().begin, ahead);
    // Again and again from shared memory where registers are scarce.
    const Range kept = range();
    const auto now = [&] { return L::kTight ? range() : kept; };
    int granule = kept.begin;
    for (; granule < now().plain_end; ++granule) step_pipelined<false>(args, granule, kept, ahead);
    for (; granule < now().end; ++granule) step_pipelined<true>(args, granule, kept, ahead);
    multiply_values(stage(ring_stage(kStages - 1)), granule - 1);
  }

  // ---- two barriers a granule
  //
  // Two phases of equal length, in which one half of the warps waits on its softmax while the other
  // keeps the tensor cores busy:
  //             first half of the warps          second half
  //   phase 1   weights of its tiles             scores of its tiles
  //             values of the granule before     values of the granule before
  //   phase 2   scores of its tiles, one on      weights of its tiles

  // The first granules on their way: slots first, keys as soon as those are there, and meanwhile
  // the first queries.
  __device__ __forceinline__ void begin_phases(const Args& args, int granule, int& where) {
    const int key = granule * kGranule + (thread() >> 4);
    int first[kStages - 1];
    OVERSTORY_UNROLL
    for (int i = 0; i < kStages - 1; ++i) {
      first[i] = locate_key(args, piece(), key + i * kGranule);
    }
    where = locate_key(args, piece(), key + (kStages - 1) * kGranule);
    if (L::kPairs > 0) load_pair_queries(args, 0);
    OVERSTORY_UNROLL
    for (int i = 0; i < kStages - 1; ++i) {
      if (granule + i < piece().end) load_key(args, stage(i), first[i], thread());
      ptx::cp_async_commit();
    }
    prepare(args, 1);
  }

  // This thread's key of a granule to its stage, which has been free since a barrier; `where` it
  // is, and then where its key of the next granule is.
  __device__ __forceinline__ void load_ahead(const Args& args, int granule, int to, int& where) {
    if (granule < piece().end) {
      load_key(args, stage(to), where, thread());
      where = locate_key(args, piece(), (granule + 1) * kGranule + (thread() >> 4));
    }
    ptx::cp_async_commit();
  }

  // `now`: the granule's stage.
  template <bool kTail>
  __device__ __forceinline__ void step_phases(const Args& args, int granule, int& now,
                                              int& where) {
    if (half() == 0) {
      if (L::kOdd) multiply_scores<0, false, true>(stage(now));
      softmax_half<0, kTail>(args, granule);
    } else {
      // Nine tiles' scores at a time would be some registers too many.
      multiply_scores<1, true, L::kOdd && !L::kFull>(stage(now));
      if (L::kFull) multiply_scores<1, false, true>(stage(now));
    }
    const int before = now == 0 ? kStages - 1 : now - 1;
    if (granule > piece().begin) multiply_values(stage(before), granule - 1);
    ptx::cp_async_wait<kStages - 3>();
    ptx::sync_block();  // the next granule is there; the stage before is free
    const int after = now + 1 == kStages ? 0 : now + 1;
    const bool more = granule + 1 < piece().end;
    if (more) isolate_in_tail(granule + 1, after);
    load_ahead(args, granule + kStages - 1, before, where);
    if (half() == 0) {
      if (more) multiply_scores<0, true, false>(stage(after));
    } else {
      softmax_half<1, kTail>(args, granule);
    }
    ptx::sync_block();
    now = after;
  }

  // Before anybody reads a granule of the tail, a barrier on its own.
  __device__ __forceinline__ void isolate(int granule, int at_stage) {
    isolate_broken_keys(piece(), granule, stage(at_stage), thread(),
                        at<uint8_t>(L::kBroken) + granule % 2 * 16);
    ptx::sync_block();
  }
  __device__ __forceinline__ void isolate_in_tail(int granule, int at_stage) {
    if (granule >= piece().prefix / kGranule) isolate(granule, at_stage);
  }

  __device__ __forceinline__ void run_phases(const Args& args) {
    int granule = piece().begin;
    int where;
    begin_phases(args, granule, where);
    ptx::cp_async_wait<kStages - 2>();
    ptx::sync_block();
    isolate_in_tail(granule, 0);
    if (half() == 0) multiply_scores<0, true, false>(stage(0));
    ptx::sync_block();
    clear_outputs();
    int now = 0;
    for (; granule < piece().plain_end; ++granule) step_phases<false>(args, granule, now, where);
    for (; granule < piece().end; ++granule) step_phases<true>(args, granule, now, where);
    multiply_values(stage(now == 0 ? kStages - 1 : now - 1), granule - 1);
    ptx::cp_async_wait<0>();
  }

  // The piece in shared memory.
  __device__ __forceinline__ void run(const Args& args) {
    if constexpr (kFlow == Flow::pipelined) {
      run_pipelined(args);
    } else {
      run_phases(args);
    }
    finish(args);
  }

  // Sums over the lanes, then what becomes of the tile's rows: reciprocals for `write_rows`, or
  // maxima and sums for the combining kernel.
  __device__ __forceinline__ void finish_tile(const Args& args, int tile) const {
    const float4 own = load_state(tile);
    const float m[2] = {own.x, own.y};
    float l[2] = {own.z, own.w};
    OVERSTORY_UNROLL
    for (int step = 4; step < 32; step *= 2) {
      l[0] += ptx::shfl_xor(l[0], step);
      l[1] += ptx::shfl_xor(l[1], step);
    }
    if (lane() >= 4) return;
    const int pair = tile * 4 + lane();
    if (piece().whole == 0) {
      float4* to = reinterpret_cast<float4*>(args.stats) + piece().slot * kTiles * 4 + pair;
      *to = make_float4(m[0], l[0], m[1], l[1]);
      return;
    }
    at<float2>(L::kScaling)[pair] = make_float2(l[0] == 0.0f ? 0.0f : 1.0f / l[0],
                                               l[1] == 0.0f ? 0.0f : 1.0f / l[1]);
    const int row = piece().first_row + pair * 2;
    if (args.lse == nullptr || row >= piece().tokens << args.heads_shift) return;
    float* lse = args.lse + (int64_t{piece().first_token} << args.heads_shift);
    lse[row] = natural_lse(m[0], l[0]);
    lse[row + 1] = natural_lse(m[1], l[1]);
  }

  __device__ __forceinline__ void write_partial(const Args& args) const {
    float4* to = reinterpret_cast<float4*>(args.partial) +
                 (int64_t{piece().slot} * kTiles * kColumnBlocks + warp() * 4) * 32 +
                 lane();
    OVERSTORY_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OVERSTORY_UNROLL
      for (int block = 0; block < 4; ++block) {
        const float* v = o[tile][block];
        to[(tile * kColumnBlocks + block) * 32] = make_float4(v[0], v[1], v[2], v[3]);
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
    if (has_tile()) finish_tile(args, own_tile());
    if (L::kFull && warp() == 4) finish_tile(args, kTiles - 1);
    if (piece().whole == 0) return write_partial(args);
    ptx::sync_block();
    write_rows(args);
  }
};

// The piece that begins with `unit`, of a block that owns the units before `end`, to shared memory;
// with the units that are left.
__device__ __forceinline__ void make_piece(const Args& args, int tiles, int unit, int end,
                                          Piece& piece) {
  int ignored;
  const Place place = find_place<By::unit>(args, tiles, unit, ignored, ignored);
  const int granules = granules_of(place.request);
  const int item = (unit - place.first_unit) / granules;
  const int first_unit = place.first_unit + item * granules;
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
    piece.next_unit = unit + last - first;
    piece.end_unit = end;
    piece.wide_out_cache_loc = args.wide_out_cache_loc ? 1 : 0;
  }
  ptx::sync_block();
}

template <int kTiles, int kStages, Flow kFlow>
__global__ void __launch_bounds__(kThreads, kTiles <= 3 ? 2 : 1) attention(const Args args) {
  ptx::pdl_launch_dependents();
  int total = 0, ignored = 0;
  find_place<By::unit>(args, kTiles, -1, total, ignored);
  const int chunk = chunk_of(args, kTiles, total);
  const int begin = ptx::block() * chunk;
  const int end = begin + chunk < total ? begin + chunk : total;
  if (begin >= end) return;
  Block<kTiles, kStages, kFlow> block;
  block.shared = ptx::shared_memory<char>();
  block.own_warp = ptx::shfl(ptx::warp(), 0);
  if (kFlow == Flow::pipelined && ptx::thread() == 0) {
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(block.landed(i), kGranule);
    ptx::mbarrier_fence_init();
  }
  Piece& piece = block.piece();
  make_piece(args, kTiles, begin, end, piece);
  while (true) {
    block.run(args);
    ptx::sync_block();  // the next piece takes the shared memory
    const int unit = piece.next_unit, last = piece.end_unit;
    if (unit >= last) return;
    ptx::sync_block();  // everybody has read it
    make_piece(args, kTiles, unit, last, piece);
  }
}

}  // namespace overstory::mla

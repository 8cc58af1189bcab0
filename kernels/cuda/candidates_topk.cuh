// Top k, k <= 16, and logsumexp of rows of logits, in one pass over them.
//
// A warp streams its segments and keeps the k best of them sorted across its lanes. `cut` is a
// lower bound of what can still enter: nearly every segment is done after one comparison per lane.
// When more than k lanes of a segment hold something above the cut, which is so at the start and on
// rising logits, the k-th largest of the 32 lanes' maxima becomes the cut first: it has k elements
// at or above it. Equal logits: a warp meets its columns in ascending order, so whatever equals
// the k-th best comes too late (the cut is the next larger float); between warps the ids decide.
//
// A row is spread over `splits` blocks; the last of them to finish merges. Logits and ids do not
// depend on the split; the logsumexp rounds differently.
#pragma once

#include "logit_rows.cuh"

namespace overstory {

constexpr int kMaxCandidates = 16;
constexpr int kCandidateWarps = 4;
constexpr int kCandidateSplits = 32;  // at most
constexpr int kNoColumn = 0x7FFFFFFF;

/// Bits of `status`.
constexpr int kNotANumber = 1;      // the logits hold NaN or +inf
constexpr int kNothingAllowed = 2;  // merge: every token is forbidden, or a normaliser is NaN

/// What one block found of a row; columns of the shard, kNoColumn past the last.
struct CandidatePartial {
  float logits[kMaxCandidates];
  int columns[kMaxCandidates];
  float highest;  // -inf if there is nothing
  float sum;      // of exp(logit - highest)
};

template <typename T>
struct CandidatesArgs {
  const T* logits;  // [rows, row_stride]
  std::int64_t row_stride;
  int columns;  // of a row to read
  int k;
  int splits;
  bool aligned;
  std::int64_t first_token_id;
  CandidatePartial* partials;  // [rows, splits]
  int* arrived;                // [rows], 0 before and after
  float* best_logits;          // [rows, k]
  std::int64_t* token_ids;     // [rows, k]
  float* logsumexp;            // [rows]
  int* status;                 // [rows]
};

/// Larger logit first, then lower column.
__device__ inline bool before(float a, int column_a, float b, int column_b) {
  return a > b || (a == b && column_a < column_b);
}

/// The smallest float above; both zeros are equal.
__device__ inline float next_above(float value) {
  const std::uint32_t bits = ptx::float_bits(value);
  if (value == 0.0f) return ptx::bits_float(1u);
  return ptx::bits_float(value > 0.0f ? bits + 1 : bits - 1);
}

/// The k-th largest of the lanes' values.
__device__ inline float kth_largest_of_warp(float value, int k) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = ptx::shfl_xor(value, step);
      const bool lower_lane = (ptx::lane() & step) == 0;
      const bool descending = (ptx::lane() & size) == 0 || size == 32;
      value = lower_lane == descending ? fmaxf(value, other) : fminf(value, other);
    }
  }
  return ptx::shfl(value, k - 1);
}

/// Sorted list across the lanes of a warp, best in lane 0; lanes from kMaxCandidates on are spare.
struct WarpBest {
  float logit = -kInfinity;
  int column = kNoColumn;

  /// Columns must come in ascending order.
  __device__ void insert(float new_logit, int new_column) {
    const bool stays = column != kNoColumn && logit >= new_logit;
    const int place = ptx::popcount(ptx::ballot(stays));
    const float shifted_logit = ptx::shfl_up(logit, 1);
    const int shifted_column = ptx::shfl_up(column, 1);
    if (ptx::lane() < place) return;
    logit = ptx::lane() == place ? new_logit : shifted_logit;
    column = ptx::lane() == place ? new_column : shifted_column;
  }

  /// Merges another sorted list, of which lane i must hold entry kMaxCandidates - 1 - i. The
  /// element-wise better half is the best of both and bitonic: four exchanges sort it.
  __device__ void merge_reversed(float other_logit, int other_column) {
    if (before(other_logit, other_column, logit, column)) {
      logit = other_logit;
      column = other_column;
    }
#pragma unroll
    for (int step = kMaxCandidates / 2; step > 0; step /= 2) {
      other_logit = ptx::shfl_xor(logit, step);
      other_column = ptx::shfl_xor(column, step);
      const bool first = (ptx::lane() & step) == 0;
      if (before(other_logit, other_column, logit, column) == first) {
        logit = other_logit;
        column = other_column;
      }
    }
  }
};

/// Sum of exponentials relative to a running maximum. NaN and +inf make `sum` NaN for good.
struct RunningSum {
  float highest = -kInfinity;
  float sum = 0.0f;

  /// What exponents are taken relative to: a number even if everything so far is forbidden.
  __device__ float base() const { return highest == -kInfinity ? 0.0f : highest; }

  __device__ void raise(float to) {
    if (!(to > highest)) return;
    sum *= ptx::exp2_fast((highest - to) * kLog2E);
    highest = to;
  }

  __device__ void merge(float other_highest, float other_sum) {
    raise(other_highest);
    sum += other_sum * ptx::exp2_fast((other_highest - base()) * kLog2E);
  }
};

/// Of exp(logit - base) over a lane's part of a segment.
template <typename T>
__device__ float sum_of_segment(const Segment<T>& segment, float base) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&](auto exponent) {
#pragma unroll
    for (int i = 0; i < Segment<T>::kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < Segment<T>::kPerLoad; ++j) {
        sums[j % 4] += ptx::exp2_fast(exponent(segment.at(i, j)));
      }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  const float top = ptx::mul_rn(base, kLog2E);
  if (!(fabsf(top) <= kFastExponent)) return add([=](float x) { return (x - base) * kLog2E; });
  // One instruction less; all exponents are too high by what `top` was rounded off by.
  const float sum = add([=](float x) { return ptx::fma_rn(x, kLog2E, -top); });
  return ptx::fma_rn(-ptx::fma_rn(base, kLog2E, -top) * kLn2, sum, sum);
}

/// One warp's state over its segments.
template <typename T>
struct CandidateScan {
  using Loads = Segment<T>;
  WarpBest best;
  RunningSum running;      // of this lane
  float cut = -kInfinity;  // what is below cannot be among the k best

  __device__ void take(const Loads& segment, int first, int end, int k) {
    float load_highest[Loads::kLoads];
    float highest = -kInfinity;
#pragma unroll
    for (int i = 0; i < Loads::kLoads; ++i) {
      load_highest[i] = segment.at(i, 0);
#pragma unroll
      for (int j = 1; j < Loads::kPerLoad; ++j) {
        load_highest[i] = fmaxf(load_highest[i], segment.at(i, j));
      }
      highest = fmaxf(highest, load_highest[i]);
    }
    running.raise(highest);
    running.sum += sum_of_segment(segment, running.base());

    const int lanes = ptx::popcount(ptx::ballot(highest >= cut));
    if (lanes == 0) return;
    if (lanes > k) cut = fmaxf(cut, kth_largest_of_warp(highest, k));
#pragma unroll
    for (int i = 0; i < Loads::kLoads; ++i) {
      std::uint32_t waiting = ptx::ballot(load_highest[i] >= cut);
      while (waiting != 0) {
        const int source = ptx::lowest_bit(waiting);
        waiting &= waiting - 1;
        take_load(segment.raw[i], source, Loads::column(first, i, source), end, k);
      }
    }
  }

 private:
  /// Elements of lane `source`'s load that reach the cut, in ascending order of columns.
  __device__ void take_load(const uint4& raw, int source, int column, int end, int k) {
    const uint4 words = make_uint4(ptx::shfl(raw.x, source), ptx::shfl(raw.y, source),
                                   ptx::shfl(raw.z, source), ptx::shfl(raw.w, source));
    float mine = -kInfinity;
#pragma unroll
    for (int i = 0; i < Loads::kPerLoad; ++i) {
      if (ptx::lane() == i) mine = element_of<T>(words, i);
    }
    const bool exists = ptx::lane() < Loads::kPerLoad && column + ptx::lane() < end;
    std::uint32_t waiting = ptx::ballot(exists && mine >= cut);
    while (waiting != 0) {
      const int i = ptx::lowest_bit(waiting);
      waiting &= waiting - 1;
      const float logit = ptx::shfl(mine, i);
      if (!(logit >= cut)) continue;
      best.insert(logit, column + i);
      const int full = ptx::shfl(best.column, k - 1);
      const float kth = ptx::shfl(best.logit, k - 1);
      if (full != kNoColumn) cut = fmaxf(cut, next_above(kth));
    }
  }
};

/// A warp's lanes to one partial.
__device__ inline void store_partial(CandidatePartial& to, const WarpBest& best,
                                     RunningSum running) {
  float highest = running.highest;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, ptx::shfl_xor(highest, step));
  running.raise(highest);
  const float sum = warp_sum(running.sum);
  if (ptx::lane() < kMaxCandidates) {
    to.logits[ptx::lane()] = best.logit;
    to.columns[ptx::lane()] = best.column;
  }
  if (ptx::lane() == 0) {
    to.highest = highest;
    to.sum = sum;
  }
}

/// Merges partials first, first + step, ... below `count` in that order; whole warp.
__device__ inline void merge_partials(const CandidatePartial* from, int first, int step, int count,
                                      WarpBest& best, RunningSum& running) {
  const int reversed = kMaxCandidates - 1 - ptx::lane() % kMaxCandidates;
  for (int i = first; i < count; i += step) {
    best.merge_reversed(ptx::load_volatile(&from[i].logits[reversed]),
                        ptx::load_volatile(&from[i].columns[reversed]));
    running.merge(ptx::load_volatile(&from[i].highest), ptx::load_volatile(&from[i].sum));
  }
}

template <typename T>
__device__ void write_candidates(const CandidatesArgs<T>& args, int row, const WarpBest& best,
                                 const RunningSum& running) {
  const bool exists = best.column != kNoColumn;
  if (ptx::lane() < args.k) {
    const std::int64_t at = static_cast<std::int64_t>(row) * args.k + ptx::lane();
    args.best_logits[at] = best.logit;
    args.token_ids[at] = exists ? args.first_token_id + best.column : -1;
  }
  if (ptx::lane() == 0) {
    const float result = running.base() + logf(running.sum);
    args.logsumexp[row] = running.highest == -kInfinity && running.sum == 0.0f ? -kInfinity : result;
    args.status[row] = running.sum < kInfinity ? 0 : kNotANumber;
  }
}

/// Grid: rows * splits blocks, those of a row side by side.
template <typename T>
__global__ void __launch_bounds__(32 * kCandidateWarps, sizeof(T) == 4 ? 4 : 5)
    candidates_topk_kernel(CandidatesArgs<T> args) {
  auto* shared = ptx::shared_memory<CandidatePartial>();  // one per warp
  int* is_last = reinterpret_cast<int*>(shared + kCandidateWarps);
  const int row = ptx::block() / args.splits, split = ptx::block() % args.splits;
  const T* logits = args.logits + row * args.row_stride;
  const int segments = segments_of(args.columns);
  const int end = split_begin(segments, split + 1, args.splits);
  int segment = split_begin(segments, split, args.splits) + ptx::warp();
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();

  CandidateScan<T> scan;
  Segment<T> next;
  if (segment < end) next.load(logits, segment * kSegment, args.columns, args.aligned);
  while (segment < end) {
    const Segment<T> current = next;
    const int first = segment * kSegment;
    segment += kCandidateWarps;
    if (segment < end) next.load(logits, segment * kSegment, args.columns, args.aligned);
    scan.take(current, first, args.columns, args.k);
  }
  store_partial(shared[ptx::warp()], scan.best, scan.running);
  ptx::sync_block();

  WarpBest best;
  RunningSum running;
  if (ptx::warp() == 0) {
    merge_partials(shared, 0, 1, kCandidateWarps, best, running);
    if (args.splits == 1) write_candidates(args, row, best, running);
  }
  if (args.splits == 1) return;
  CandidatePartial* partials = args.partials + static_cast<std::int64_t>(row) * args.splits;
  if (ptx::warp() == 0) {
    RunningSum whole = running;  // the same in every lane: lane 0's stands for the warp
    if (ptx::lane() != 0) whole = RunningSum{};
    store_partial(partials[split], best, whole);
    ptx::fence_device();
    ptx::sync_warp();
    if (ptx::lane() == 0) *is_last = ptx::atomic_add(args.arrived + row, 1) == args.splits - 1;
  }
  ptx::sync_block();
  if (*is_last == 0) return;
  ptx::fence_device();
  best = WarpBest{};
  running = RunningSum{};
  merge_partials(partials, ptx::warp(), kCandidateWarps, args.splits, best, running);
  if (ptx::lane() != 0) running = RunningSum{};
  store_partial(shared[ptx::warp()], best, running);
  ptx::sync_block();
  if (ptx::warp() != 0) return;
  best = WarpBest{};
  running = RunningSum{};
  merge_partials(shared, 0, 1, kCandidateWarps, best, running);
  write_candidates(args, row, best, running);
  if (ptx::lane() == 0) args.arrived[row] = 0;
}

struct MergeArgs {
  const float* logits;            // [shards, rows, width]
  const std::int64_t* token_ids;  // [shards, rows, width]
  const float* logsumexp;         // [shards, rows]
  int shards;
  int rows;
  int width;
  int k;
  float* logprobs;     // [rows, k]
  std::int64_t* best;  // [rows, k]
  int* status;         // [rows]
};

/// A warp per row.
__global__ void __launch_bounds__(32 * kCandidateWarps) merge_candidates_kernel(MergeArgs args) {
  const int row = ptx::block() * kCandidateWarps + ptx::warp();
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();
  if (row >= args.rows) return;
  const int reversed = kMaxCandidates - 1 - ptx::lane() % kMaxCandidates;
  WarpBest best;
  float highest = -kInfinity;
  for (int shard = 0; shard < args.shards; ++shard) {
    const std::int64_t at = static_cast<std::int64_t>(shard) * args.rows + row;
    float logit = -kInfinity;
    int token = kNoColumn;
    if (reversed < args.width) {
      const std::int64_t id = args.token_ids[at * args.width + reversed];
      logit = args.logits[at * args.width + reversed];
      token = id < 0 ? kNoColumn : static_cast<int>(id);
    }
    best.merge_reversed(logit, token);
    highest = ptx::max_nan(highest, args.logsumexp[at]);
  }
  float sum = 0.0f;
  for (int shard = 0; shard < args.shards; ++shard) {
    const float other = args.logsumexp[static_cast<std::int64_t>(shard) * args.rows + row];
    if (other > -kInfinity) sum += expf(other - highest);
  }
  const float normaliser = highest + logf(sum);
  const bool possible = highest > -kInfinity && highest < kInfinity;
  if (ptx::lane() < args.k) {
    const std::int64_t at = static_cast<std::int64_t>(row) * args.k + ptx::lane();
    const bool exists = possible && best.column != kNoColumn;
    args.logprobs[at] = exists ? fminf(best.logit - normaliser, 0.0f) : -kInfinity;
    args.best[at] = exists ? best.column : -1;
  }
  if (ptx::lane() == 0) args.status[row] = possible ? 0 : kNothingAllowed;
}

}  // namespace overstory

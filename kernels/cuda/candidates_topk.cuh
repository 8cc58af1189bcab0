// Top k, k <= 16, and logsumexp of rows of logits.
//
// The scan leaves of a row what row_scan.cuh says: the highest logits of groups of 256 columns, and
// sums of weights, which make the logsumexp. The last block of a row: nothing below the k-th best of
// the groups' highest logits can be among the k best, so few groups are read again, and few tokens
// found; each counts those before it, which is its place. Rows with too many equal logits, or fewer
// groups than k, or fewer than k tokens that are allowed, are read once more by warps that keep the
// k best of their columns sorted across their lanes.
//
// In that, `cut` is a lower bound of what can still enter: nearly every segment is done after one
// comparison per lane. When more than k lanes of a segment hold something above the cut, the k-th
// largest of the 32 lanes' maxima becomes the cut first: it has k elements at or above it. Equal
// logits: a warp meets its columns in ascending order, so whatever equals the k-th best comes too
// late (the cut is the next larger float); between warps the ids decide.
#pragma once

#include "row_prefix.cuh"

namespace overstory {

constexpr int kMaxCandidates = 16;
constexpr int kMergeWarps = 4;  // of merge_candidates, a row each
constexpr int kNoColumn = 0x7FFFFFFF;

/// Bits of `status`.
constexpr int kNotANumber = 1;      // the logits hold NaN or +inf
constexpr int kNothingAllowed = 2;  // merge: every token is forbidden, or a normaliser is NaN

template <typename T>
struct CandidatesArgs : RowArgs<T> {
  int k;
  std::int64_t first_token_id;
  float* best_logits;       // [rows, k]
  std::int64_t* token_ids;  // [rows, k]
  float* logsumexp;         // [rows]
  int* status;              // [rows]
};

/// The best of one warp's columns; kNoColumn past the last.
struct CandidateList {
  float logits[kMaxCandidates];
  int columns[kMaxCandidates];
};

struct CandidatesShared {
  RowScan scan;
  RowBounds bounds[kRowWarps];
  double sums[kRowWarps];
  int is_last;
  int listed;  // groups
  int found;   // tokens
  std::uint16_t list[kMaxGroups];
  BlockScratch scratch;
  union {  // one after the other
    PrefixShared prefix;
    Token tokens[kListedTokens];
    CandidateList lists[kRowWarps];
  };
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

/// One warp's search over its segments.
template <typename T>
struct CandidateSearch {
  using Loads = Segment<T>;
  WarpBest best;
  float cut;  // what is below cannot be among the k best

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

/// Output k of a row; column kNoColumn: there is none.
template <typename T>
__device__ void write_candidate(const CandidatesArgs<T>& args, int row, int place, float logit,
                                int column) {
  const std::int64_t at = static_cast<std::int64_t>(row) * args.k + place;
  args.best_logits[at] = logit;
  args.token_ids[at] = column == kNoColumn ? -1 : args.first_token_id + column;
}

/// The sum of weights relative to `highest`. Whole block, the result in every thread.
template <typename T>
__device__ double add_up(const CandidatesArgs<T>& args, float highest, CandidatesShared& shared) {
  double sum = 0.0;
  for (int i = ptx::thread(); i < segments_of(args.columns); i += kRowThreads) {
    const float top = highest_of(&shared.scan.groups[i * kSegmentGroups]);
    if (top > -kInfinity) {
      sum += static_cast<double>(shared.scan.sums[i]) * PlainScaling().weight(top, highest);
    }
  }
  sum = warp_sum(sum);
  if (ptx::lane() == 0) shared.sums[ptx::warp()] = sum;
  ptx::sync_block();
  double all = 0.0;
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) all += shared.sums[i];
  return all;
}

/// Every token counts those before it: up to as many as there are threads.
template <typename T>
__device__ void place_tokens(const CandidatesArgs<T>& args, int row, const Token* tokens,
                             int count) {
  if (ptx::thread() >= count) return;
  const Token mine = tokens[ptx::thread()];
  int place = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const Token other = tokens[i];
    place += other.key > mine.key || (other.key == mine.key && other.column < mine.column);
  }
  if (place >= args.k) return;
  float logit = from_ordered(mine.key);
  // Zeros of both signs have one key.
  if (logit == 0.0f) logit = to_float(args.logits[row * args.row_stride + mine.column]);
  write_candidate(args, row, place, logit, mine.column);
}

/// The whole row once more; `cut` as in CandidateSearch.
template <typename T>
__device__ void search_row(const CandidatesArgs<T>& args, int row, float cut,
                           CandidatesShared& shared) {
  const T* logits = args.logits + row * args.row_stride;
  CandidateSearch<T> search;
  search.cut = cut;
  for (int i = ptx::warp(); i < segments_of(args.columns); i += kRowWarps) {
    // The cut is the same in every lane.
    if (highest_of(&shared.scan.groups[i * kSegmentGroups]) < search.cut) continue;
    Segment<T> segment;
    segment.load(logits, i * kSegment, args.columns, args.aligned);
    search.take(segment, i * kSegment, args.columns, args.k);
  }
  ptx::sync_block();  // the lists lie where the prefix was
  if (ptx::lane() < kMaxCandidates) {
    shared.lists[ptx::warp()].logits[ptx::lane()] = search.best.logit;
    shared.lists[ptx::warp()].columns[ptx::lane()] = search.best.column;
  }
  ptx::sync_block();
  if (ptx::warp() != 0) return;
  const int reversed = kMaxCandidates - 1 - ptx::lane() % kMaxCandidates;
  WarpBest best;
  for (const CandidateList& list : shared.lists) {
    best.merge_reversed(list.logits[reversed], list.columns[reversed]);
  }
  if (ptx::lane() < args.k) write_candidate(args, row, ptx::lane(), best.logit, best.column);
}

/// The whole block, with the row's scan in shared memory.
template <typename T>
__device__ void finish_candidates(const CandidatesArgs<T>& args, int row,
                                  CandidatesShared& shared) {
  const RowBounds bounds = bounds_of(shared.scan, args.columns, shared.bounds);
  const bool good = bounds.highest < kInfinity;  // not NaN either
  const bool allowed = bounds.highest > -kInfinity;
  double sum = 0.0;
  if (good && allowed) sum = add_up(args, bounds.highest, shared);
  if (ptx::thread() == 0) {
    const float result = bounds.highest + static_cast<float>(log(sum));
    args.logsumexp[row] = !good ? NAN : allowed ? result : -kInfinity;
    args.status[row] = good ? 0 : kNotANumber;
  }
  if (!good) {
    if (ptx::thread() < args.k) {
      write_candidate(args, row, ptx::thread(), -kInfinity, kNoColumn);
    }
    return;
  }
  bool bounded = false;
  float floor = -kInfinity;
  if (allowed) {
    const PrefixBound most{static_cast<std::uint32_t>(args.k), UINT64_MAX};
    floor = lowest_by_groups<T>(
        shared.scan.groups, args.columns, bounds, -FLT_MAX, most,
        [](float) { return std::uint64_t{0}; }, shared.prefix, shared.scratch, bounded);
  }
  if (!bounded) {
    search_row(args, row, -kInfinity, shared);
    return;
  }
  const GroupReader<T> reader =
      list_groups<T>(args, row, shared.scan.groups, floor, shared.list, shared.listed);
  // The groups' highest logits are needed below, so the tokens are not put in their place.
  Token* tokens = shared.tokens;
  const int count = list_tokens(reader, floor, [](float) { return true; }, tokens, shared.found);
  if (count <= kRowThreads) {
    place_tokens(args, row, tokens, count);
  } else {
    search_row(args, row, floor, shared);
  }
}

/// Grid: rows * splits blocks, those of a row side by side.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<T>)
    candidates_topk_kernel(CandidatesArgs<T> args) {
  auto& shared = *ptx::shared_memory<CandidatesShared>();
  const int row = ptx::block() / args.splits, split = ptx::block() % args.splits;
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();
  SplitReader<T> reader(args, row, split);
  reader.each([&](const Segment<T>& segment, int number) {
    store_scan(args, row, number, scan_segment(segment, PlainScaling{}), shared.scan);
  });
  ptx::sync_block();
  if (args.splits > 1) {
    if (!is_last_of_row(args, row, shared.is_last)) return;
    collect(args, row, shared.scan);
  }
  finish_candidates(args, row, shared);
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
__global__ void __launch_bounds__(32 * kMergeWarps) merge_candidates_kernel(MergeArgs args) {
  const int row = ptx::block() * kMergeWarps + ptx::warp();
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

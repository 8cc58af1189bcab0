// One token per row of logits: the scan that every row takes, and the draw of rows without filters.
//
// The scan reads the logits once. Of each segment of 1,024 columns it leaves the highest logit and
// the sum of weights relative to it; of a greedy row only the best column. The last block of a row
// adds up the segments, finds the one in which the noise falls, and reads that one again. Segments
// and the order of their sum are fixed by the vocabulary alone, so a row's token depends neither on
// the other rows nor on how many blocks share a row.
#pragma once

#include "sample_rules.cuh"

namespace overstory {

constexpr int kSampleWarps = 4;
constexpr int kSampleThreads = 32 * kSampleWarps;
constexpr int kSampleSplits = 32;  // at most
constexpr int kMaxSegments = 512;
constexpr int kSegmentsPerThread = kMaxSegments / kSampleThreads;

struct SegmentSum {
  float highest;  // logit
  float sum;      // of weights, of which the highest logit's is 1
};

/// Of a sampled row: its highest logit, and the sum of weights relative to it.
struct RowTotal {
  double total;
  float highest;  // NaN: the row has no token
  float unused;
};

struct GreedyBest {
  float logit;
  int column;  // first of the 16-byte load in which it stands
};

template <typename T>
struct SampleArgs {
  const T* logits;  // [rows, row_stride]
  std::int64_t row_stride;
  int columns;
  int splits;
  bool aligned;
  bool filters;  // sample_filter_kernel follows and takes the filtered rows
  SampleParameters parameters;
  RowTotal* totals;       // [rows]
  SegmentSum* segments;   // [rows, segments]
  GreedyBest* greedy;     // [rows, splits]
  int* arrived;           // [rows], 0 before and after
  std::int64_t* tokens;   // [rows]
  int* status;            // [rows]
};

struct SampleShared {
  double sums[kSampleWarps];
  double fraction;
  GreedyBest greedy[kSampleWarps];
  float highest[kSampleWarps];
  int chosen;
  int last;
  int is_last;
};

template <typename T>
__device__ void write_token(const SampleArgs<T>& args, int row, int token, int status) {
  args.tokens[row] = token;
  args.status[row] = status;
}

/// Larger logit first, then lower column; NaN before everything.
__device__ inline GreedyBest better(GreedyBest a, GreedyBest b) {
  if (a.logit != a.logit) return a;
  if (b.logit != b.logit) return b;
  return a.logit > b.logit || (a.logit == b.logit && a.column < b.column) ? a : b;
}

__device__ inline GreedyBest warp_best(GreedyBest mine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    mine = better(mine, {ptx::shfl_xor(mine.logit, step), ptx::shfl_xor(mine.column, step)});
  }
  return mine;
}

/// A lane's best of a segment joins its best so far.
template <typename T>
__device__ void scan_greedy(const Segment<T>& segment, int first, GreedyBest& best) {
#pragma unroll
  for (int i = 0; i < Segment<T>::kLoads; ++i) {
    float highest = segment.at(i, 0);
#pragma unroll
    for (int j = 1; j < Segment<T>::kPerLoad; ++j) {
      highest = ptx::max_nan(highest, segment.at(i, j));
    }
    if (highest > best.logit) best.column = Segment<T>::column(first, i, ptx::lane());
    best.logit = ptx::max_nan(best.logit, highest);
  }
}

template <typename T>
__device__ SegmentSum scan_sampled(const Segment<T>& segment, const SampleRules& rules) {
  float highest = -kInfinity;
#pragma unroll
  for (int i = 0; i < Segment<T>::kLoads; ++i) {
#pragma unroll
    for (int j = 0; j < Segment<T>::kPerLoad; ++j) {
      highest = ptx::max_nan(highest, segment.at(i, j));
    }
  }
  highest = warp_max_nan(highest);
  if (!(highest > -kInfinity)) return {highest, 0.0f};
  const float top = rules.scaled(highest);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < Segment<T>::kLoads; ++i) {
#pragma unroll
    for (int j = 0; j < Segment<T>::kPerLoad; ++j) {
      sums[j % 4] += rules.weight(segment.at(i, j), top);
    }
  }
  return {highest, warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))};
}

/// First column of those from `column` on that holds `logit`.
template <typename T>
__device__ int column_of(const T* row, GreedyBest best) {
  int column = best.column;
  while (to_float(row[column]) != best.logit) ++column;
  return column;
}

template <typename T>
__device__ void finish_greedy(const SampleArgs<T>& args, int row, GreedyBest best) {
  if (ptx::lane() != 0) return;
  const bool good = best.logit > -kInfinity && best.logit < kInfinity;
  const T* logits = args.logits + row * args.row_stride;
  write_token(args, row, good ? column_of(logits, best) : kNoToken, good ? 0 : kBadLogits);
}

/// The whole block: adds up the row's segments and, without filters, draws.
template <typename T>
__device__ void finish_sampled(const SampleArgs<T>& args, int row, const SampleRules& rules,
                               SampleShared& shared) {
  const int segments = segments_of(args.columns);
  const SegmentSum* sums = args.segments + static_cast<std::int64_t>(row) * segments;
  const int begin = ptx::thread() * kSegmentsPerThread;
  SegmentSum mine[kSegmentsPerThread];
  float highest = -kInfinity;
#pragma unroll
  for (int i = 0; i < kSegmentsPerThread; ++i) {
    mine[i] = {-kInfinity, 0.0f};
    if (begin + i < segments) {
      mine[i] = {ptx::load_volatile(&sums[begin + i].highest),
                 ptx::load_volatile(&sums[begin + i].sum)};
    }
    highest = ptx::max_nan(highest, mine[i].highest);
  }
  highest = warp_max_nan(highest);
  if (ptx::lane() == 0) shared.highest[ptx::warp()] = highest;
  if (ptx::thread() == 0) shared.chosen = shared.last = INT32_MAX;
  ptx::sync_block();
  for (int i = 0; i < kSampleWarps; ++i) highest = ptx::max_nan(highest, shared.highest[i]);
  const float top = rules.scaled(highest);
  const bool good = highest > -kInfinity && highest < kInfinity;
  if (!good || !(fabsf(top) < kInfinity)) {
    if (ptx::thread() == 0) {
      args.totals[row].highest = NAN;
      write_token(args, row, kNoToken, good ? kBadParameters : kBadLogits);
    }
    return;
  }

  double weights[kSegmentsPerThread];
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kSegmentsPerThread; ++i) {
    weights[i] = static_cast<double>(mine[i].sum) * rules.weight(mine[i].highest, top);
    sum += weights[i];
  }
  double through = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = ptx::shfl_up(through, step);
    if (ptx::lane() >= step) through += other;
  }
  double before = ptx::shfl_up(through, 1);
  if (ptx::lane() == 0) before = 0.0;
  if (ptx::lane() == 31) shared.sums[ptx::warp()] = through;
  ptx::sync_block();
  double total = 0.0;
  for (int i = 0; i < kSampleWarps; ++i) {
    if (i < ptx::warp()) before += shared.sums[i];
    total += shared.sums[i];
  }
  if (ptx::thread() == 0) {
    args.totals[row].total = total;
    args.totals[row].highest = highest;
  }
  if (rules.filtered()) return;

  const double goal = static_cast<double>(noise_of(args.parameters, row)) * 0x1p-53 * total;
  int chosen = INT32_MAX, last = INT32_MAX;
  double fraction = 1.0;
#pragma unroll
  for (int i = 0; i < kSegmentsPerThread; ++i) {
    if (!(weights[i] > 0.0)) continue;
    const double after = before + weights[i];
    if (chosen == INT32_MAX && after > goal) {
      chosen = begin + i;
      fraction = fmax(goal - before, 0.0) / weights[i];
    }
    last = -(begin + i);
    before = after;
  }
  ptx::atomic_min(&shared.chosen, chosen);
  ptx::atomic_min(&shared.last, last);
  ptx::sync_block();
  // Rounding may leave the goal above every sum: then it is the last token that can be drawn.
  const int segment = shared.chosen != INT32_MAX ? shared.chosen : -shared.last;
  if (shared.chosen == INT32_MAX ? ptx::thread() == 0 : chosen == segment) {
    shared.fraction = fraction;
  }
  ptx::sync_block();
  if (ptx::warp() != 0) return;
  const float segment_top = rules.scaled(ptx::load_volatile(&sums[segment].highest));
  fraction = shared.fraction;
  const int token = locate_in_segment(
      args.logits + row * args.row_stride, segment * kSegment, args.columns,
      [&](float logit, int) { return fixed_weight(rules.weight(logit, segment_top)); },
      [&](std::uint64_t all) {
        const auto share = static_cast<std::uint64_t>(fraction * static_cast<double>(all));
        return share < all ? share : all - 1;
      });
  if (ptx::lane() == 0) write_token(args, row, token, 0);
}

/// Grid: rows * splits blocks, those of a row side by side.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads, 4) sample_nodes_kernel(SampleArgs<T> args) {
  auto& shared = *ptx::shared_memory<SampleShared>();
  const int row = ptx::block() / args.splits, split = ptx::block() % args.splits;
  const T* logits = args.logits + row * args.row_stride;
  const int segments = segments_of(args.columns);
  const int end = split_begin(segments, split + 1, args.splits);
  int segment = split_begin(segments, split, args.splits) + ptx::warp();
  SegmentSum* sums = args.segments + static_cast<std::int64_t>(row) * segments;
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();

  const SampleRules rules(args.parameters, row, args.columns);
  const bool refused = !rules.greedy && rules.filtered() && !args.filters;
  if (rules.wrong || refused) {
    if (split == 0 && ptx::thread() == 0) {
      write_token(args, row, kNoToken, rules.wrong ? kBadParameters : kFilterRefused);
    }
    return;
  }

  GreedyBest best{-kInfinity, INT32_MAX};
  Segment<T> next;
  if (segment < end) next.load(logits, segment * kSegment, args.columns, args.aligned);
  while (segment < end) {
    const Segment<T> current = next;
    const int here = segment;
    segment += kSampleWarps;
    if (segment < end) next.load(logits, segment * kSegment, args.columns, args.aligned);
    if (rules.greedy) {
      scan_greedy(current, here * kSegment, best);
    } else {
      const SegmentSum sum = scan_sampled(current, rules);
      if (ptx::lane() == 0) sums[here] = sum;
    }
  }
  if (rules.greedy) {
    best = warp_best(best);
    if (ptx::lane() == 0) shared.greedy[ptx::warp()] = best;
  }
  ptx::sync_block();
  GreedyBest* partials = args.greedy + static_cast<std::int64_t>(row) * args.splits;
  if (rules.greedy) {
    best = shared.greedy[0];
    for (int i = 1; i < kSampleWarps; ++i) best = better(best, shared.greedy[i]);
  }
  if (args.splits > 1) {
    if (ptx::thread() == 0) {
      if (rules.greedy) partials[split] = best;
      // The barrier put the block's sums before this fence; the fence puts them before the count.
      ptx::fence_device();
      shared.is_last = ptx::atomic_add(args.arrived + row, 1) == args.splits - 1;
    }
    ptx::sync_block();
    if (shared.is_last == 0) return;
    ptx::fence_device();
    if (ptx::thread() == 0) args.arrived[row] = 0;
    if (rules.greedy) {
      best = {-kInfinity, INT32_MAX};
      if (ptx::lane() < args.splits) {
        best = {ptx::load_volatile(&partials[ptx::lane()].logit),
                ptx::load_volatile(&partials[ptx::lane()].column)};
      }
      best = warp_best(best);
    }
  }
  if (!rules.greedy) {
    finish_sampled(args, row, rules, shared);
  } else if (ptx::warp() == 0) {
    finish_greedy(args, row, best);
  }
}

}  // namespace overstory

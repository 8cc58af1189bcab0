// One token per row of logits, in one kernel.
//
// The scan reads the logits once. Of each segment of 1,024 columns it leaves the highest logits of
// its groups of 256 and the sum of weights relative to the highest; of a greedy row only the best
// column. The last block of a row adds up the segments. Without filters it finds the segment in
// which the noise falls, and reads that one again; with filters see sample_filter.cuh. Segments and
// the order of their sum are fixed by the vocabulary alone, so a row's token depends neither on the
// other rows nor on how many blocks share a row.
#pragma once

#include "sample_filter.cuh"

namespace overstory {

constexpr int kSampleSplits = 32;  // at most

/// What a scan leaves of a row with one block, and what the last of several blocks collects.
struct RowScan {
  float groups[kMaxGroups];
  float sums[kMaxSegments];
};

struct SampleShared {
  RowScan scan;
  double sums[kSampleWarps];
  double fraction;
  GreedyBest greedy[kSampleWarps];
  float highest[kSampleWarps], lowest[kSampleWarps];
  int chosen;
  int last;
  int is_last;
  FilterShared filter;  // last, so that a launch without filters need not have it
};

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

/// The whole block: adds the row up and draws.
template <typename T>
__device__ void finish_sampled(const SampleArgs<T>& args, int row, const SampleRules& rules,
                               SampleShared& shared) {
  constexpr int kPerThread = kMaxSegments / kSampleThreads;
  const int segments = segments_of(args.columns);
  float highest = -kInfinity, lowest = kInfinity;
  for (int i = ptx::thread(); i < segments * kSegmentGroups; i += kSampleThreads) {
    const float logit = shared.scan.groups[i];
    highest = ptx::max_nan(highest, logit);
    if (logit > -kInfinity) lowest = fminf(lowest, logit);
  }
  highest = warp_highest(highest);
  lowest = -warp_highest(-lowest);
  if (ptx::lane() == 0) {
    shared.highest[ptx::warp()] = highest;
    shared.lowest[ptx::warp()] = lowest;
  }
  if (ptx::thread() == 0) shared.chosen = shared.last = INT32_MAX;
  ptx::sync_block();
#pragma unroll
  for (int i = 0; i < kSampleWarps; ++i) {
    highest = ptx::max_nan(highest, shared.highest[i]);
    lowest = fminf(lowest, shared.lowest[i]);
  }
  const float top = rules.scaled(highest);
  const bool good = highest > -kInfinity && highest < kInfinity;
  if (!good || !(fabsf(top) < kInfinity)) {
    if (ptx::thread() == 0) write_token(args, row, kNoToken, good ? kBadParameters : kBadLogits);
    return;
  }

  const int begin = ptx::thread() * kPerThread;
  double weights[kPerThread];
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    weights[i] = 0.0;
    if (begin + i < segments) {
      const float high = highest_of(&shared.scan.groups[(begin + i) * kSegmentGroups]);
      weights[i] = static_cast<double>(shared.scan.sums[begin + i]) * rules.weight(high, top);
    }
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
#pragma unroll
  for (int i = 0; i < kSampleWarps; ++i) {
    if (i < ptx::warp()) before += shared.sums[i];
    total += shared.sums[i];
  }
  const T* logits = args.logits + row * args.row_stride;
  if (rules.filtered()) {
    const FilterRow<T> filtered{logits,  args.columns, args.aligned, shared.scan.groups,
                                highest, lowest,       top,          total};
    draw_filtered(args, row, filtered, rules, shared.filter);
    return;
  }

  const double goal = static_cast<double>(noise_of(args.parameters, row)) * 0x1p-53 * total;
  int chosen = INT32_MAX, last = INT32_MAX;
  double fraction = 1.0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (!(weights[i] > 0.0)) continue;
    const double after = before + weights[i];
    if (chosen == INT32_MAX && after > goal) {
      chosen = begin + i;
      fraction = fmax(goal - before, 0.0) / weights[i];
    }
    last = -(begin + i);
    before = after;
  }
  if (chosen != INT32_MAX) ptx::atomic_min(&shared.chosen, chosen);
  if (last != INT32_MAX) ptx::atomic_min(&shared.last, last);
  ptx::sync_block();
  // Rounding may leave the goal above every sum: then it is the last token that can be drawn.
  const int segment = shared.chosen != INT32_MAX ? shared.chosen : -shared.last;
  if (shared.chosen == INT32_MAX ? ptx::thread() == 0 : chosen == segment) {
    shared.fraction = fraction;
  }
  ptx::sync_block();
  if (ptx::warp() != 0) return;
  const float segment_top =
      rules.scaled(highest_of(&shared.scan.groups[segment * kSegmentGroups]));
  fraction = shared.fraction;
  const int token = locate_in_segment(
      logits, segment * kSegment, args.columns, args.aligned,
      [&](float logit, int) { return fixed_weight(rules.weight(logit, segment_top)); },
      [&](std::uint64_t all) {
        const auto share = static_cast<std::uint64_t>(fraction * static_cast<double>(all));
        return share < all ? share : all - 1;
      });
  if (ptx::lane() == 0) write_token(args, row, token, 0);
}

/// A segment's result to where finish_sampled or `collect` finds it.
template <typename T>
__device__ void store_scan(const SampleArgs<T>& args, int row, int segment,
                           const SegmentScan& scan, RowScan& alone) {
  float* groups = alone.groups;
  float* sums = alone.sums;
  if (args.splits > 1) {
    const std::int64_t before = static_cast<std::int64_t>(row) * segments_of(args.columns);
    groups = args.groups + before * kSegmentGroups;
    sums = args.sums + before;
  }
  float mine = scan.groups[0];
#pragma unroll
  for (int i = 1; i < kSegmentGroups; ++i) {
    if (ptx::lane() == i) mine = scan.groups[i];
  }
  if (ptx::lane() < kSegmentGroups) groups[segment * kSegmentGroups + ptx::lane()] = mine;
  if (ptx::lane() == 0) sums[segment] = scan.sum;
}

/// The last block of a row: what all its blocks left.
template <typename T>
__device__ void collect(const SampleArgs<T>& args, int row, RowScan& scan) {
  const int segments = segments_of(args.columns);
  const float* groups = args.groups + static_cast<std::int64_t>(row) * segments * kSegmentGroups;
  const float* sums = args.sums + static_cast<std::int64_t>(row) * segments;
  for (int i = ptx::thread(); i < segments * kSegmentGroups; i += kSampleThreads) {
    scan.groups[i] = ptx::load_volatile(groups + i);
  }
  for (int i = ptx::thread(); i < segments; i += kSampleThreads) {
    scan.sums[i] = ptx::load_volatile(sums + i);
  }
  ptx::sync_block();
}

/// Whether the block is the last one of the row; the others' results can be read then. Counts.
template <typename T>
__device__ bool is_last_of_row(const SampleArgs<T>& args, int row, SampleShared& shared) {
  if (ptx::thread() == 0) {
    // The barrier put the block's results before this fence; the fence puts them before the count.
    ptx::fence_device();
    shared.is_last = ptx::atomic_add(args.arrived + row, 1) == args.splits - 1;
  }
  ptx::sync_block();
  if (shared.is_last == 0) return false;
  ptx::fence_device();
  if (ptx::thread() == 0) args.arrived[row] = 0;
  return true;
}

/// Grid: rows * splits blocks, those of a row side by side.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads, sizeof(T) == 4 ? 2 : 3)
    sample_nodes_kernel(SampleArgs<T> args) {
  auto& shared = *ptx::shared_memory<SampleShared>();
  const int row = ptx::block() / args.splits, split = ptx::block() % args.splits;
  const T* logits = args.logits + row * args.row_stride;
  const int segments = segments_of(args.columns);
  const int end = split_begin(segments, split + 1, args.splits);
  int segment = split_begin(segments, split, args.splits) + ptx::warp();
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();

  // Under way before the row's parameters are there.
  Segment<T> next;
  if (segment < end) next.load(logits, segment * kSegment, args.columns, args.aligned);
  const SampleRules rules(args.parameters, row, args.columns);
  const bool refused = !rules.greedy && rules.filtered() && !args.filters;
  if (rules.wrong || refused) {
    if (split == 0 && ptx::thread() == 0) {
      write_token(args, row, kNoToken, rules.wrong ? kBadParameters : kFilterRefused);
    }
    return;
  }

  GreedyBest best{-kInfinity, INT32_MAX};
  while (segment < end) {
    const Segment<T> current = next;
    const int here = segment;
    segment += kSampleWarps;
    if (segment < end) next.load(logits, segment * kSegment, args.columns, args.aligned);
    if (rules.greedy) {
      scan_greedy(current, here * kSegment, best);
    } else {
      const SegmentScan scan = scan_segment(current, rules);
      store_scan(args, row, here, scan, shared.scan);
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
    if (args.splits > 1 && ptx::thread() == 0) partials[split] = best;
  }
  if (args.splits > 1) {
    if (!is_last_of_row(args, row, shared)) return;
    if (rules.greedy) {
      best = {-kInfinity, INT32_MAX};
      if (ptx::lane() < args.splits) {
        best = {ptx::load_volatile(&partials[ptx::lane()].logit),
                ptx::load_volatile(&partials[ptx::lane()].column)};
      }
      best = warp_best(best);
    } else {
      collect(args, row, shared.scan);
    }
  }
  if (!rules.greedy) {
    finish_sampled(args, row, rules, shared);
  } else if (ptx::warp() == 0) {
    finish_greedy(args, row, best);
  }
}

}  // namespace overstory

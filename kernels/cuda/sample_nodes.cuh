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

struct SampleShared {
  RowScan scan;
  double sums[kRowWarps];
  double fraction;
  GreedyBest greedy[kRowWarps];
  RowBounds bounds[kRowWarps];
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
    const float highest = segment.highest(i);
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
  constexpr int kPerThread = kMaxSegments / kRowThreads;
  const int segments = segments_of(args.columns);
  if (ptx::thread() == 0) shared.chosen = shared.last = INT32_MAX;
  const RowBounds bounds = bounds_of(shared.scan, args.columns, shared.bounds);
  const float highest = bounds.highest;
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
  for (int i = 0; i < kRowWarps; ++i) {
    if (i < ptx::warp()) before += shared.sums[i];
    total += shared.sums[i];
  }
  const T* logits = args.logits + row * args.row_stride;
  if (rules.filtered()) {
    const FilterRow<T> filtered{logits, args.columns, args.aligned,          bounds,
                                top,    total,        tokens_in(shared.scan)};
    draw_filtered(args, row, shared.scan, filtered, rules, shared.filter);
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

/// Grid: rows * splits blocks, those of a row side by side.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<T>)
    sample_nodes_kernel(SampleArgs<T> args) {
  auto& shared = *ptx::shared_memory<SampleShared>();
  const int row = ptx::block() / args.splits, split = ptx::block() % args.splits;
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();

  SplitReader<T> reader(args, row, split);  // on the way before the row's parameters are there
  const SampleRules rules(args.parameters, row, args.columns);
  const bool refused = !rules.greedy && rules.filtered() && !args.filters;
  if (rules.wrong || refused) {
    if (split == 0 && ptx::thread() == 0) {
      write_token(args, row, kNoToken, rules.wrong ? kBadParameters : kFilterRefused);
    }
    return;
  }

  GreedyBest best{-kInfinity, INT32_MAX};
  if (rules.greedy) {
    reader.each([&](const Segment<T>& segment, int number) {
      scan_greedy(segment, number * kSegment, best);
    });
    best = warp_best(best);
    if (ptx::lane() == 0) shared.greedy[ptx::warp()] = best;
  } else {
    reader.each([&](const Segment<T>& segment, int number) {
      store_scan(args, row, number, scan_segment(segment, rules), shared.scan);
    });
  }
  ptx::sync_block();
  GreedyBest* partials = args.greedy + static_cast<std::int64_t>(row) * args.splits;
  if (rules.greedy) {
    best = shared.greedy[0];
    for (int i = 1; i < kRowWarps; ++i) best = better(best, shared.greedy[i]);
    if (args.splits > 1 && ptx::thread() == 0) partials[split] = best;
  }
  if (args.splits > 1) {
    if (!is_last_of_row(args, row, shared.is_last)) return;
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

// Rows of logits that one reading reduces to a little: the highest logits of groups of 256 columns
// and the sums of weights of segments of 1,024. Blocks share a row; the last of them to finish has
// it all in shared memory, and reads what it needs of the row again.
//
// Which columns a result is of, and the order of every sum, are fixed by the vocabulary alone: what
// is made of a row depends neither on other rows nor on how many blocks share it.
#pragma once

#include "logit_rows.cuh"

namespace overstory {

constexpr int kRowWarps = 8;
constexpr int kRowThreads = 32 * kRowWarps;
constexpr int kRowSplits = 32;  // at most
constexpr int kMaxSegments = 512;
constexpr int kGroup = 256;  // columns of which the highest logit is kept
constexpr int kSegmentGroups = kSegment / kGroup;
constexpr int kMaxGroups = kMaxSegments * kSegmentGroups;

/// Blocks that run at once on a multiprocessor; a bound on registers. Many: what a warp has under way
/// in registers is all that hides the memory's latency (prefetches to the L2 cache beside it cost
/// more than they gave).
template <typename T>
constexpr int kRowBlocks = sizeof(T) == 4 ? 2 : 4;

/// What `choose_splits` is to weigh, from an H200.
constexpr BlockCost kRowCost{kRowWarps, 1.0f, 2.0f, 0.08f, 0.75f};

/// Exponents of 2 up to which a logit times a rounded factor is as good as a quotient.
constexpr float kFastExponent = 96.0f;

template <typename T>
struct RowArgs {
  const T* logits;  // [rows, row_stride]
  std::int64_t row_stride;
  int columns;  // of a row to read
  int splits;   // blocks of a row
  bool aligned;
  float* groups;  // [rows, segments, kSegmentGroups], as in SegmentScan; only with splits
  float* sums;    // [rows, segments]
  int* arrived;   // [rows], 0 before and after
};

/// Bytes of `groups` and `sums` together, in this order.
inline std::int64_t row_scan_bytes(int rows, int columns, int splits) {
  if (splits <= 1) return 0;
  return rows * std::int64_t{sizeof(float)} * segments_of(columns) * (kSegmentGroups + 1);
}

/// The launcher's part: room for the scans from `workspace` on, and whether rows are aligned.
template <typename T>
void prepare_rows(RowArgs<T>& args, int rows, void* workspace) {
  args.groups = static_cast<float*>(workspace);
  args.sums = args.groups + (args.splits <= 1 ? 0
                                              : static_cast<std::int64_t>(rows) * kSegmentGroups *
                                                    segments_of(args.columns));
  args.aligned = reinterpret_cast<std::uintptr_t>(args.logits) % 16 == 0 &&
                 args.row_stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}

__host__ __device__ inline int groups_of(int columns) { return (columns + kGroup - 1) / kGroup; }

struct SegmentScan {
  float groups[kSegmentGroups];  // highest logits; NaN where there is one
  float sum;                     // of weights, of which the segment's highest logit's is 1
};

/// All segments of one row, in shared memory.
struct RowScan {
  float groups[kMaxGroups];
  float sums[kMaxSegments];
};

/// Weights as they are: e^logit. What other scalings of logits must offer too.
struct PlainScaling {
  float scale = kLog2E;  // to exponents of 2
  __device__ float scaled(float logit) const { return logit; }
  __device__ float weight(float logit, float top) const {
    return ptx::exp2_fast((logit - top) * kLog2E);
  }
};

/// The highest logit of a segment from those of its groups.
__device__ inline float highest_of(const float* groups) {
  return ptx::max_nan(ptx::max_nan(groups[0], groups[1]), ptx::max_nan(groups[2], groups[3]));
}

/// Sum over the segment of 2^exponent(logit), in a fixed order; the same in every lane.
template <typename T, typename Exponent>
__device__ float sum_powers(const Segment<T>& segment, Exponent exponent) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < Segment<T>::kLoads; ++i) {
#pragma unroll
    for (int j = 0; j < Segment<T>::kPerLoad; ++j) {
      sums[j % 4] += ptx::exp2_fast(exponent(segment.at(i, j)));
    }
  }
  return warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/// A whole warp; the result in every lane. Which formula a segment takes depends on its own logits
/// alone.
template <typename T, typename Scaling>
__device__ SegmentScan scan_segment(const Segment<T>& segment, const Scaling& scaling) {
  constexpr int kGroupLoads = Segment<T>::kLoads / kSegmentGroups;
  SegmentScan scan;
#pragma unroll
  for (int group = 0; group < kSegmentGroups; ++group) {
    float highest = -kInfinity;
#pragma unroll
    for (int i = 0; i < kGroupLoads; ++i) {
      highest = ptx::max_nan(highest, segment.highest(group * kGroupLoads + i));
    }
    scan.groups[group] = warp_highest(highest);
  }
  const float highest = highest_of(scan.groups);
  scan.sum = 0.0f;
  if (!(highest > -kInfinity)) return scan;
  const float top = ptx::mul_rn(highest, scaling.scale);
  if (fabsf(top) <= kFastExponent) {
    const float scale = scaling.scale;
    scan.sum = sum_powers(segment, [=](float x) { return ptx::fma_rn(x, scale, -top); });
    // All exponents are too high by what the product `top` was rounded off by.
    const float excess = ptx::fma_rn(highest, scale, -top);
    scan.sum = ptx::fma_rn(-excess * kLn2, scan.sum, scan.sum);
  } else {
    const float quotient = scaling.scaled(highest);
    scan.sum = sum_powers(segment, [&](float x) {
      // -inf may become NaN: as good as the lowest number here.
      return fmaxf((scaling.scaled(x) - quotient) * kLog2E, -FLT_MAX);
    });
  }
  return scan;
}

/// One block's part of a row. The first loads are under way once it is made.
template <typename T>
struct SplitReader {
  const RowArgs<T>& args;
  const T* logits;
  int segment;  // next of this warp
  int end;
  Segment<T> next;

  __device__ SplitReader(const RowArgs<T>& of, int row, int split)
      : args(of), logits(of.logits + row * of.row_stride) {
    const int segments = segments_of(args.columns);
    end = split_begin(segments, split + 1, args.splits);
    segment = split_begin(segments, split, args.splits) + ptx::warp();
    load();
  }

  /// visit(segment, number), a warp each.
  template <typename Visit>
  __device__ void each(Visit visit) {
    while (segment < end) {
      const Segment<T> current = next;
      const int here = segment;
      segment += kRowWarps;
      load();
      visit(current, here);
    }
  }

 private:
  __device__ void load() {
    if (segment < end) next.load(logits, segment * kSegment, args.columns, args.aligned);
  }
};

/// A segment's result to where `collect` finds it, or to its place if the row has one block.
template <typename T>
__device__ void store_scan(const RowArgs<T>& args, int row, int segment, const SegmentScan& scan,
                           RowScan& alone) {
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

/// Whether the block is the last one of the row; the others' results can be read then. Counts.
/// Whole block, after a barrier behind its results. `flag`: shared.
template <typename T>
__device__ bool is_last_of_row(const RowArgs<T>& args, int row, int& flag) {
  if (ptx::thread() == 0) {
    // The barrier put the block's results before this fence; the fence puts them before the count.
    ptx::fence_device();
    flag = ptx::atomic_add(args.arrived + row, 1) == args.splits - 1;
  }
  ptx::sync_block();
  if (flag == 0) return false;
  ptx::fence_device();
  if (ptx::thread() == 0) args.arrived[row] = 0;
  return true;
}

/// The last block of a row: what all its blocks left.
template <typename T>
__device__ void collect(const RowArgs<T>& args, int row, RowScan& scan) {
  const int segments = segments_of(args.columns);
  const float* groups = args.groups + static_cast<std::int64_t>(row) * segments * kSegmentGroups;
  const float* sums = args.sums + static_cast<std::int64_t>(row) * segments;
  for (int i = ptx::thread(); i < segments * kSegmentGroups; i += kRowThreads) {
    scan.groups[i] = ptx::load_volatile(groups + i);
  }
  for (int i = ptx::thread(); i < segments; i += kRowThreads) {
    scan.sums[i] = ptx::load_volatile(sums + i);
  }
  ptx::sync_block();
}

struct RowBounds {
  float highest;  // NaN where there is one
  float lowest;   // of the groups' highest that are more than -inf; inf without any
};

/// Whole block, the result in every thread; a barrier inside.
__device__ inline RowBounds bounds_of(const RowScan& scan, int columns,
                                      RowBounds (&warps)[kRowWarps]) {
  float highest = -kInfinity, lowest = kInfinity;
  for (int i = ptx::thread(); i < segments_of(columns) * kSegmentGroups; i += kRowThreads) {
    const float logit = scan.groups[i];
    highest = ptx::max_nan(highest, logit);
    if (logit > -kInfinity) lowest = fminf(lowest, logit);
  }
  highest = warp_highest(highest);
  lowest = -warp_highest(-lowest);
  if (ptx::lane() == 0) warps[ptx::warp()] = {highest, lowest};
  ptx::sync_block();
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) {
    highest = ptx::max_nan(highest, warps[i].highest);
    lowest = fminf(lowest, warps[i].lowest);
  }
  return {highest, lowest};
}

/// The groups of a row that may hold something, for the whole block to read again.
template <typename T>
struct GroupReader {
  const T* logits;
  int columns;
  bool aligned;
  const std::uint16_t* list;
  int listed;

  /// visit(logit, column) for what is not below `floor`; `Batch` groups to a warp at a time, after
  /// which done(last group) by the whole warp. The visit is in the code once: most of it is run
  /// once, and what is not in the instruction cache costs more than a few selections.
  template <int Batch, typename Visit, typename Done>
  __device__ void each(float floor, Visit visit, Done done) const {
    using Loads = Segment<T, kGroup>;
    constexpr int kRaws = Batch * Loads::kLoads;
    static_assert(kRaws * Loads::kPerLoad <= 32, "a bit each");
    for (int first = ptx::warp() * Batch; first < listed; first += kRowWarps * Batch) {
      Loads batch[Batch];
      std::uint32_t waiting = 0;
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        if (first + i < listed) {
          batch[i].load(logits, list[first + i] * kGroup, columns, aligned);
        }
      }
#pragma unroll
      for (int i = 0; i < kRaws; ++i) {
        if (first + i / Loads::kLoads >= listed) continue;
#pragma unroll
        for (int j = 0; j < Loads::kPerLoad; ++j) {
          const bool reaches = batch[i / Loads::kLoads].at(i % Loads::kLoads, j) >= floor;
          waiting |= static_cast<std::uint32_t>(reaches) << (i * Loads::kPerLoad + j);
        }
      }
      while (waiting != 0) {
        const int bit = ptx::lowest_bit(waiting);
        waiting &= waiting - 1;
        const int place = bit / Loads::kPerLoad, j = bit % Loads::kPerLoad;
        uint4 raw = batch[0].raw[0];
#pragma unroll
        for (int i = 1; i < kRaws; ++i) {
          if (place == i) raw = batch[i / Loads::kLoads].raw[i % Loads::kLoads];
        }
        const int group = list[first + place / Loads::kLoads];
        const int column =
            Loads::column(group * kGroup, place % Loads::kLoads, ptx::lane());
        visit(element_at<T>(raw, j), column + j);
      }
      ptx::sync_warp();
      done(list[first]);
    }
  }

  /// Groups on their way at once where their order does not matter.
  static constexpr int kMany = 4 / Segment<T, kGroup>::kLoads;
};

/// Lists the groups that reach `floor`, in any order, and returns their reader. Whole block.
template <typename T>
__device__ GroupReader<T> list_groups(const RowArgs<T>& args, int row, const float* highest,
                                      float floor, std::uint16_t (&list)[kMaxGroups],
                                      int& listed) {
  if (ptx::thread() == 0) listed = 0;
  ptx::sync_block();
  for (int first = 0; first < groups_of(args.columns); first += kRowThreads) {
    const int group = first + ptx::thread();
    const bool reaches = group < groups_of(args.columns) && highest[group] >= floor;
    const std::uint32_t those = ptx::ballot(reaches);
    if (those == 0) continue;
    int at = 0;
    if (ptx::lane() == 0) at = ptx::atomic_add(&listed, ptx::popcount(those));
    at = ptx::shfl(at, 0) + ptx::popcount(those & ((1u << ptx::lane()) - 1));
    if (reaches) list[at] = static_cast<std::uint16_t>(group);
  }
  ptx::sync_block();
  return {args.logits + row * args.row_stride, args.columns, args.aligned, list, listed};
}

constexpr int kListedTokens = 1024;

/// A logit as an ordered integer, and where it stands.
struct Token {
  std::uint32_t key;
  int column;
};

/// Tokens may be listed where the groups' highest logits were, which nobody needs once the groups
/// are listed.
__device__ inline Token* tokens_in(RowScan& scan) { return reinterpret_cast<Token*>(scan.groups); }
static_assert(kListedTokens * sizeof(Token) <= kMaxGroups * sizeof(float), "they share memory");

/// Lists the tokens of at least `floor` that `wanted(logit)`, in any order; how many there are,
/// which may be more than are listed. Whole block.
template <typename T, typename Wanted>
__device__ int list_tokens(const GroupReader<T>& reader, float floor, Wanted wanted, Token* tokens,
                           int& found) {
  if (ptx::thread() == 0) found = 0;
  ptx::sync_block();
  reader.template each<GroupReader<T>::kMany>(
      floor,
      [&](float logit, int column) {
        // Many at one address would wait for each other for nothing.
        if (ptx::load_volatile(&found) > kListedTokens || !wanted(logit)) return;
        const int at = ptx::atomic_add(&found, 1);
        if (at < kListedTokens) tokens[at] = {ordered(logit), column};
      },
      [](int) {});
  ptx::sync_block();
  return found;
}

}  // namespace overstory

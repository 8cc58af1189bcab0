// The draw of rows with top-k, top-p or min-p, after sample_nodes_kernel: a block per row.
//
// All three filters keep a prefix of the tokens by descending logit, the lower id first among
// equals. Where it ends is found without sorting: a histogram of counts and of integer weights,
// 2,048 bins of equal width in logits, says in which bin; the next one cuts that bin by logits as
// ordered integers; until there is one token or one logit left (a pass for 16-bit logits, mostly
// two for float32, at most four). Ties of that logit are kept by id. Integer sums do not depend on
// their order: atomics, and yet bitwise repeatable.
//
// From the scan's sums a bound is known below which nothing can be kept; segments whose highest
// logit is below are not read.
#pragma once

#include "sample_nodes.cuh"

namespace overstory {

constexpr int kFilterThreads = 512;
constexpr int kFilterWarps = kFilterThreads / 32;
constexpr int kBinsLog2 = 11;
constexpr int kBins = 1 << kBinsLog2;
constexpr int kBinsPerThread = kBins / kFilterThreads;
static_assert(kMaxSegments <= kFilterThreads, "a thread per segment");

struct Tally {
  std::uint64_t mass;
  std::uint32_t count;
};

struct FilterShared {
  std::uint64_t mass[kBins];
  std::uint32_t count[kBins];
  float highest[kMaxSegments];
  std::uint64_t sums[kMaxSegments];
  Tally warps[kFilterWarps];
  std::uint64_t rest;
  float floor, reach;
  int found;
  Tally above, inside;  // what comes before the bin or logit where the prefix ends; what it holds
};

/// Integers in the order of the floats; both zeros are one.
__device__ inline std::uint32_t ordered(float value) {
  const std::uint32_t bits = ptx::float_bits(value + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ inline float from_ordered(std::uint32_t key) {
  return ptx::bits_float((key >> 31) != 0 ? key & 0x7FFFFFFFu : ~key);
}

/// Distinct logits of a 16-bit type differ by 2^kStep at least, as ordered integers.
template <typename T>
constexpr int kStep = 0;
template <>
inline constexpr int kStep<Bf16> = 16;
template <>
inline constexpr int kStep<F16> = 13;

/// The one logit of type T among the 2^kStep ordered integers up to `high`: its lower bits are 0,
/// or all 1 in a negative one.
template <typename T>
__device__ inline std::uint32_t logit_up_to(std::uint32_t high) {
  constexpr std::uint32_t low = (1u << kStep<T>) - 1;
  if ((high >> 31) != 0) return high & ~low;
  return (high & low) == low ? high : (high & ~low) - 1;
}

/// Sum over the threads before this one; `total` over all. Every thread of the block, with a
/// barrier between one call and the next.
__device__ inline Tally scan_block(Tally mine, Tally* warps, Tally& total) {
  Tally through = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint64_t mass = ptx::shfl_up(through.mass, step);
    const std::uint32_t count = ptx::shfl_up(through.count, step);
    if (ptx::lane() >= step) {
      through.mass += mass;
      through.count += count;
    }
  }
  if (ptx::lane() == 31) warps[ptx::warp()] = through;
  ptx::sync_block();
  Tally before{through.mass - mine.mass, through.count - mine.count};
  total = {0, 0};
  for (int i = 0; i < kFilterWarps; ++i) {
    if (i < ptx::warp()) {
      before.mass += warps[i].mass;
      before.count += warps[i].count;
    }
    total.mass += warps[i].mass;
    total.count += warps[i].count;
  }
  return before;
}

/// What the block works on.
template <typename T>
struct FilterRow {
  const T* logits;
  int columns;
  bool aligned;
  float highest;
  double total;
  float top;  // scaled(highest)

  /// visit(logit, column) for what is not below `floor`, a warp per segment; then
  /// done(segment) by the whole warp, for segments passed over too.
  template <typename Visit, typename Done>
  __device__ void each(const FilterShared& shared, float floor, Visit visit, Done done) const {
    for (int i = ptx::warp(); i < segments_of(columns); i += kFilterWarps) {
      if (shared.highest[i] >= floor) {
        Segment<T> segment;
        segment.load(logits, i * kSegment, columns, aligned);
#pragma unroll
        for (int load = 0; load < Segment<T>::kLoads; ++load) {
          const int column = Segment<T>::column(i * kSegment, load, ptx::lane());
#pragma unroll
          for (int j = 0; j < Segment<T>::kPerLoad; ++j) {
            const float logit = segment.at(load, j);
            if (logit >= floor) visit(logit, column + j);
          }
        }
      }
      done(i);
    }
  }
};

/// locate_in_segment over the row: first column at which the sum of weights of what is not below
/// `floor` passes target(sum of all). Every thread of the block, the result in each.
template <typename T, typename Weight, typename Target>
__device__ int locate_in_row(const FilterRow<T>& row, FilterShared& shared, float floor,
                             Weight weight, Target target) {
  std::uint64_t sum = 0;
  row.each(
      shared, floor, [&](float logit, int column) { sum += weight(logit, column); },
      [&](int segment) {
        sum = warp_sum(sum);
        if (ptx::lane() == 0) shared.sums[segment] = sum;
        sum = 0;
      });
  ptx::sync_block();
  const int thread = ptx::thread();
  const std::uint64_t mine = thread < segments_of(row.columns) ? shared.sums[thread] : 0;
  Tally total;
  const std::uint64_t before = scan_block({mine, 0}, shared.warps, total).mass;
  const std::uint64_t goal = target(total.mass);
  if (before <= goal && goal - before < mine) {
    shared.found = thread;
    shared.rest = goal - before;
  }
  ptx::sync_block();
  const std::uint64_t rest = shared.rest;
  const int segment = shared.found;
  ptx::sync_block();
  if (ptx::warp() == 0) {
    const int column = locate_in_segment(
        row.logits, segment * kSegment, row.columns,
        [&](float logit, int at) { return logit >= floor ? weight(logit, at) : 0; },
        [&](std::uint64_t) { return rest; });
    if (ptx::lane() == 0) shared.found = column;
  }
  ptx::sync_block();
  return shared.found;
}

/// A logit below which no token is kept, and not below the lowest number: -inf is never looked at.
/// Leaves in shared.reach where the first histogram may end: `floor`, or a guess if that is not
/// known.
///
/// top-k: the k-th largest of the segments' maxima. top-p: all tokens of weight below
/// (1 - top_p) total / V together miss 1 - top_p, so the sum before any of them is above top_p.
/// The bounds that come from logarithms are lowered by more than these can be wrong.
template <typename T>
__device__ float lowest_kept(const FilterRow<T>& row, const SampleRules& rules,
                             FilterShared& shared) {
  const int segments = segments_of(row.columns);
  if (ptx::thread() == 0) shared.floor = shared.reach = -FLT_MAX;
  ptx::sync_block();
  if (rules.top_k != 0 && ptx::thread() < segments) {
    const float mine = shared.highest[ptx::thread()];
    int rank = 0;
    for (int i = 0; i < segments; ++i) {
      const float other = shared.highest[i];
      rank += other > mine || (other == mine && i < ptx::thread()) ? 1 : 0;
    }
    if (rank == rules.top_k - 1) shared.floor = fmaxf(mine, -FLT_MAX);
    if (rank == segments - 1) {
      const float span = fmaxf(4.0f * (row.highest - mine), 16.0f * rules.temperature);
      shared.reach = row.highest - span;
    }
  }
  ptx::sync_block();
  float least = rules.min_p;
  if (rules.top_p < 1.0f) {
    const float share = static_cast<float>(row.total) / static_cast<float>(row.columns);
    least = fmaxf(least, (1.0f - rules.top_p) * share);
  }
  if (!(least > 0.0f)) return shared.floor;
  const float distance = ptx::log2_fast(fminf(least, 1.0f)) * kLn2 * rules.temperature;
  const float slack = 1e-3f * rules.temperature + 1e-5f * (fabsf(row.highest) - distance);
  return fmaxf(shared.floor, fminf(row.highest + distance - slack, row.highest));
}

/// Ordered integers high - range .. high, cut into bins from the highest logit down.
struct BinRule {
  std::uint32_t high;
  std::uint32_t range;
  bool linear;
  int shift;      // a bin is 2^shift integers, or
  float highest;  // linear: the distance from `highest` times `scale`, the last bin without end
  float scale;

  /// Bins ascend as logits descend. No compiler may fuse this, or the bins' bounds would not be
  /// where `bounds_of` finds them.
  __device__ std::uint32_t linear_bin(float logit) const {
    const float place = ptx::mul_rn(ptx::add_rn(highest, -logit), scale);
    return static_cast<std::uint32_t>(fminf(place, static_cast<float>(kBins - 1)));
  }

  /// The bin of a logit, kBins or more if it is not of the range.
  __device__ std::uint32_t bin_of(float logit) const {
    const std::uint32_t offset = high - ordered(logit);
    if (offset > range) return kBins;  // also what is above `high`: the difference wraps
    return linear ? linear_bin(logit) : offset >> shift;
  }

  /// Smallest offset of the range whose bin is at least `bin`.
  __device__ std::uint32_t first_offset(std::uint32_t bin) const {
    std::uint32_t low = 0, up = range;
    while (low < up) {
      const std::uint32_t middle = low + (up - low) / 2;
      if (linear_bin(from_ordered(high - middle)) >= bin) {
        up = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  /// Shrinks the range to one bin that holds something.
  __device__ void narrow(std::uint32_t bin) {
    std::uint32_t first = bin << shift, last = range;
    if (linear) {
      first = first_offset(bin);
      if (linear_bin(from_ordered(high - range)) > bin) last = first_offset(bin + 1) - 1;
    } else if (range - first >= 1u << shift) {
      last = first + ((1u << shift) - 1);
    }
    high -= first;
    range = last - first;
    linear = false;
  }
};

/// Fills the histogram: of each bin the count, and if `weighs` the integer weights.
template <typename T>
__device__ void fill_bins(const FilterRow<T>& row, const SampleRules& rules, const BinRule& bins,
                          bool weighs, FilterShared& shared) {
  for (int i = ptx::thread(); i < kBins; i += kFilterThreads) {
    shared.mass[i] = 0;
    shared.count[i] = 0;
  }
  ptx::sync_block();
  row.each(
      shared, from_ordered(bins.high - bins.range),
      [&](float logit, int) {
        const std::uint32_t bin = bins.bin_of(logit);
        if (bin >= kBins) return;
        ptx::atomic_add(&shared.count[bin], 1u);
        if (weighs) ptx::atomic_add(&shared.mass[bin], fixed_weight(rules.weight(logit, row.top)));
      },
      [](int) {});
  ptx::sync_block();
}

/// The last bin that is not empty and whose first token is kept, with `above` before the first bin.
/// Moves shared.above to before that bin and puts what it holds in shared.inside.
__device__ inline std::uint32_t choose_bin(std::uint32_t most_count, std::uint64_t most_mass,
                                           Tally above, FilterShared& shared) {
  Tally bins[kBinsPerThread], mine{0, 0}, total;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = ptx::thread() * kBinsPerThread + i;
    bins[i] = {shared.mass[bin], shared.count[bin]};
    mine.mass += bins[i].mass;
    mine.count += bins[i].count;
  }
  if (ptx::thread() == 0) shared.found = INT32_MAX;
  Tally before = scan_block(mine, shared.warps, total);
  before.mass += above.mass;
  before.count += above.count;
  int last = -1;
  Tally last_above{0, 0}, last_inside{0, 0};
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    if (bins[i].count == 0) continue;
    if (before.count < most_count && before.mass <= most_mass) {
      last = ptx::thread() * kBinsPerThread + i;
      last_above = before;
      last_inside = bins[i];
    }
    before.mass += bins[i].mass;
    before.count += bins[i].count;
  }
  if (last >= 0) ptx::atomic_min(&shared.found, -last);
  ptx::sync_block();
  const int bin = -shared.found;
  if (last == bin) {
    shared.above = last_above;
    shared.inside = last_inside;
  }
  ptx::sync_block();
  return static_cast<std::uint32_t>(bin);
}

/// Where the prefix that top-k and top-p keep ends: an ordered integer that is its last logit, or
/// has that logit alone at or above it in the last bin. (The lowest logit not below `floor`, if
/// the prefix goes on.) shared.above is what comes before that logit, shared.inside its ties.
template <typename T>
__device__ std::uint32_t last_of_prefix(const FilterRow<T>& row, const SampleRules& rules,
                                        float floor, std::uint64_t most_mass,
                                        FilterShared& shared) {
  const std::uint32_t most_count = rules.top_k != 0 ? rules.top_k : UINT32_MAX;
  BinRule bins;
  bins.high = ordered(row.highest);
  bins.range = bins.high - ordered(floor);
  bins.linear = true;
  bins.shift = 0;
  bins.highest = row.highest;
  const float reach = fmaxf(floor, shared.reach);
  bins.scale = row.highest > reach ? kBins / (row.highest - reach) : 0.0f;
  Tally above{0, 0};
  for (;;) {
    fill_bins(row, rules, bins, rules.top_p < 1.0f, shared);
    bins.narrow(choose_bin(most_count, most_mass, above, shared));
    above = shared.above;
    if (shared.inside.count == 1) return bins.high - bins.range;
    if ((bins.range >> kStep<T>) == 0) return logit_up_to<T>(bins.high);
    bins.shift = 32 - kBinsLog2 - ptx::leading_zeros(bins.range);
    bins.shift = bins.shift > kStep<T> ? bins.shift : kStep<T>;
  }
}

/// How many of the ties at the end of the prefix are kept; at least 1.
__device__ inline std::uint64_t kept_ties(const SampleRules& rules, std::uint64_t most_mass,
                                          std::uint64_t weight, Tally above, Tally inside) {
  std::uint64_t kept = inside.count;
  if (rules.top_k != 0) {
    const std::uint64_t places = static_cast<std::uint32_t>(rules.top_k) - above.count;
    kept = places < kept ? places : kept;
  }
  if (rules.top_p < 1.0f && weight != 0) {
    const std::uint64_t places = (most_mass - above.mass) / weight + 1;
    kept = places < kept ? places : kept;
  }
  return kept;
}

/// Grid: rows. Rows that are greedy, unfiltered or refused are done already.
template <typename T>
__global__ void __launch_bounds__(kFilterThreads, 2) sample_filter_kernel(SampleArgs<T> args) {
  auto& shared = *ptx::shared_memory<FilterShared>();
  const int number = ptx::block();
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();
  const SampleRules rules(args.parameters, number, args.columns);
  if (rules.greedy || rules.wrong || !rules.filtered()) return;
  FilterRow<T> row;
  row.logits = args.logits + number * args.row_stride;
  row.columns = args.columns;
  row.aligned = args.aligned;
  row.highest = args.totals[number].highest;
  row.total = args.totals[number].total;
  row.top = rules.scaled(row.highest);
  if (row.highest != row.highest) return;
  const int segments = segments_of(args.columns);
  for (int i = ptx::thread(); i < segments; i += kFilterThreads) {
    shared.highest[i] = args.segments[static_cast<std::int64_t>(number) * segments + i].highest;
  }
  float floor = lowest_kept(row, rules, shared);
  std::uint32_t last = ordered(floor);
  int last_tie = INT32_MAX;
  if (rules.top_k != 0 || rules.top_p < 1.0f) {
    const double most = rules.top_p * row.total * static_cast<double>(kWeightOne);
    const auto most_mass = rules.top_p < 1.0f ? static_cast<std::uint64_t>(most) : UINT64_MAX;
    last = last_of_prefix(row, rules, floor, most_mass, shared);
    floor = from_ordered(last);
    const std::uint64_t weight = fixed_weight(rules.weight(floor, row.top));
    const std::uint64_t ties =
        kept_ties(rules, most_mass, weight, shared.above, shared.inside);
    if (ties < shared.inside.count) {
      last_tie = locate_in_row(
          row, shared, floor, [&](float logit, int) { return ordered(logit) == last ? 1u : 0u; },
          [&](std::uint64_t) { return ties - 1; });
    }
  }
  const std::uint64_t noise = noise_of(args.parameters, number);
  const int token = locate_in_row(
      row, shared, floor,
      [&](float logit, int column) -> std::uint64_t {
        const float weight = rules.weight(logit, row.top);
        const bool kept = weight >= rules.min_p && (ordered(logit) > last || column <= last_tie);
        return kept ? fixed_weight(weight) : 0;
      },
      [&](std::uint64_t all) { return share_of(noise, all); });
  if (ptx::thread() == 0) write_token(args, number, token, 0);
}

}  // namespace overstory

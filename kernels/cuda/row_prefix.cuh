// Where a prefix of values by descending order ends, without sorting: a histogram of counts and of
// integer weights says in which bin; the next one cuts that bin by logits as ordered integers;
// until it is narrow enough. Integer sums do not depend on their order: atomics, and yet bitwise
// repeatable.
#pragma once

#include "row_scan.cuh"

namespace overstory {

constexpr int kFewBins = 8, kManyBins = 9;  // their logarithms: for up to thousands of values
constexpr int kWordBits = 11;               // of a mass, of which a bin has kWords sums
constexpr int kWords = 4;

struct Tally {
  std::uint64_t mass;
  std::uint32_t count;
};

/// A mass of at most 2^44 in four words, each of which can be added up 2^20 times: shared memory
/// has atomic additions of 32 bits only.
struct PrefixShared {
  std::uint32_t count[1 << kManyBins];
  std::uint32_t words[kWords][1 << kManyBins];
};

/// What a scan over the threads of the block needs, and its results.
struct BlockScratch {
  Tally warps[kRowWarps];
  Tally above, inside;  // before the bin where the prefix ends; in it
  int found;
};

/// What may come before a value that is kept: fewer than `count` values of at most this mass.
struct PrefixBound {
  std::uint32_t count;
  std::uint64_t mass;
};

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
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) {
    if (i < ptx::warp()) {
      before.mass += warps[i].mass;
      before.count += warps[i].count;
    }
    total.mass += warps[i].mass;
    total.count += warps[i].count;
  }
  return before;
}

/// Ordered integers high - range .. high, cut into 2^BinsLog2 bins from the highest logit down.
template <int BinsLog2>
struct BinRule {
  static constexpr int kBins = 1 << BinsLog2;
  std::uint32_t high;
  std::uint32_t range;
  bool linear;
  int shift;      // a bin is 2^shift integers, or
  float highest;  // linear: the distance from `highest` times `scale`, the last bin without end
  float scale;

  /// Bins as fine as `step` allows over low .. high.
  __device__ static BinRule over(std::uint32_t low, std::uint32_t high, int step) {
    BinRule rule{high, high - low, false, 0, 0.0f, 0.0f};
    rule.cut(step);
    return rule;
  }

  /// A first cut of many logits down to `floor`, of equal width in logits down to `reach`.
  __device__ static BinRule logits(float floor, float highest, float reach) {
    const std::uint32_t high = ordered(highest);
    return {high, high - ordered(floor), true,
            0,    highest,               highest > reach ? kBins / (highest - reach) : 0.0f};
  }

  __device__ void cut(int step) {
    shift = 32 - BinsLog2 - ptx::leading_zeros(range);
    shift = shift > step ? shift : step;
  }

  /// Bins ascend as logits descend. No compiler may fuse this, or the bins' bounds would not be
  /// where `first_offset` finds them.
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

/// Whole block. each(add): add(logit, mass()) for every value, of which there are up to 2^20.
template <int BinsLog2, typename Each>
__device__ void fill_bins(const BinRule<BinsLog2>& bins, bool weighs, Each each,
                          PrefixShared& shared) {
  constexpr int kBins = 1 << BinsLog2;
  for (int i = ptx::thread(); i < kBins; i += kRowThreads) {
    shared.count[i] = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) shared.words[word][i] = 0;
  }
  ptx::sync_block();
  each([&](float logit, auto mass) {
    const std::uint32_t bin = bins.bin_of(logit);
    if (bin >= kBins) return;
    ptx::atomic_add(&shared.count[bin], 1u);
    if (!weighs) return;
    const std::uint64_t parts = mass();
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      auto part = static_cast<std::uint32_t>(parts >> (word * kWordBits));
      if (word < kWords - 1) part &= (1u << kWordBits) - 1;
      if (part != 0) ptx::atomic_add(&shared.words[word][bin], part);
    }
  });
  ptx::sync_block();
}

__device__ inline std::uint64_t mass_of(const PrefixShared& shared, int bin) {
  std::uint64_t mass = 0;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    mass += static_cast<std::uint64_t>(shared.words[word][bin]) << (word * kWordBits);
  }
  return mass;
}

/// tally(bin): what a bin holds.
/// The last bin that is not empty and whose first value is kept, with `above` before the first bin.
/// Moves scratch.above to before that bin and puts what it holds in scratch.inside; `all` is what
/// comes before the end of the last bin.
template <int BinsLog2, typename TallyOf>
__device__ std::uint32_t choose_bin(const PrefixBound& most, Tally above, TallyOf tally,
                                    BlockScratch& scratch, Tally& all) {
  constexpr int kBinsPerThread = (1 << BinsLog2) / kRowThreads;
  Tally mine{0, 0};
#pragma unroll 2
  for (int i = 0; i < kBinsPerThread; ++i) {
    const Tally bin = tally(ptx::thread() * kBinsPerThread + i);
    mine.mass += bin.mass;
    mine.count += bin.count;
  }
  if (ptx::thread() == 0) scratch.found = INT32_MAX;
  Tally before = scan_block(mine, scratch.warps, all);
  before.mass += above.mass;
  before.count += above.count;
  all.mass += above.mass;
  all.count += above.count;
  int last = -1;
  Tally last_above{0, 0}, last_inside{0, 0};
#pragma unroll 2
  for (int i = 0; i < kBinsPerThread; ++i) {
    const Tally bin = tally(ptx::thread() * kBinsPerThread + i);
    if (bin.count == 0) continue;
    if (before.count < most.count && before.mass <= most.mass) {
      last = ptx::thread() * kBinsPerThread + i;
      last_above = before;
      last_inside = bin;
    }
    before.mass += bin.mass;
    before.count += bin.count;
  }
  if (last >= 0) ptx::atomic_min(&scratch.found, -last);
  ptx::sync_block();
  const int bin = -scratch.found;
  if (last == bin) {
    scratch.above = last_above;
    scratch.inside = last_inside;
  }
  ptx::sync_block();
  return static_cast<std::uint32_t>(bin);
}

/// Where the prefix ends. Whole block; every thread the same.
struct PrefixEnd {
  std::uint32_t high, range;  // its last value is one of the ordered integers high - range .. high
  bool bounded;               // more values, even the lowest, would not be kept
};

/// Cuts until the last bin holds at most `enough` values or one logit (steps of 2^step). Values
/// beyond the end are in scratch.inside, those before the bin in scratch.above.
template <int BinsLog2, typename Each>
__device__ PrefixEnd find_prefix(BinRule<BinsLog2> bins, const PrefixBound& most, std::uint32_t enough,
                                 int step, Each each, PrefixShared& shared,
                                 BlockScratch& scratch) {
  Tally above{0, 0};
  bool bounded = false;
  for (bool first = true;; first = false) {
    Tally all;
    fill_bins(bins, most.mass != UINT64_MAX, each, shared);
    const auto tally = [&](int bin) { return Tally{mass_of(shared, bin), shared.count[bin]}; };
    bins.narrow(choose_bin<BinsLog2>(most, above, tally, scratch, all));
    if (first) bounded = all.count >= most.count || all.mass > most.mass;
    above = scratch.above;
    if (scratch.inside.count <= enough || (bins.range >> step) == 0) break;
    bins.cut(step);
  }
  return {bins.high, bins.range, bounded};
}

constexpr int kLogitBins = 11;

/// `find_prefix` for 16-bit logits, where a bin is one logit: counts say all, and one round does.
/// False where the highest 2^kLogitBins logits do not reach the end.
///   each   each(add): add(logit) for every value not below `floor`
template <typename T, typename Mass, typename Each>
__device__ bool find_by_logits(float floor, float highest, const PrefixBound& most, Mass mass,
                               Each each, PrefixShared& shared, BlockScratch& scratch,
                               PrefixEnd& end) {
  constexpr std::uint32_t kBins = 1u << kLogitBins;
  static_assert(sizeof(PrefixShared) >= kBins * sizeof(std::uint32_t), "counts only");
  auto* counts = reinterpret_cast<std::uint32_t*>(&shared);
  const std::uint32_t high = ordered(highest);
  for (std::uint32_t i = ptx::thread(); i < kBins; i += kRowThreads) counts[i] = 0;
  ptx::sync_block();
  each([&](float logit) {
    const std::uint32_t bin = (high - ordered(logit)) >> kStep<T>;
    if (bin < kBins) ptx::atomic_add(&counts[bin], 1u);
  });
  ptx::sync_block();
  const auto tally = [&](int bin) {
    const std::uint32_t count = counts[bin];
    const std::uint32_t key = logit_up_to<T>(high - (static_cast<std::uint32_t>(bin) << kStep<T>));
    return Tally{count == 0 ? 0 : count * mass(from_ordered(key)), count};
  };
  Tally all;
  const std::uint32_t bin = choose_bin<kLogitBins>(most, {0, 0}, tally, scratch, all);
  const bool bounded = all.count >= most.count || all.mass > most.mass;
  end = {high - (bin << kStep<T>), (1u << kStep<T>) - 1, bounded};
  return bounded || (high - ordered(floor)) >> kStep<T> < kBins;
}

/// A logit below which nothing is in the prefix, and not below `floor`; `bounded` says whether the
/// groups have bounded it. The highest logits of groups are values too: where the prefix of those
/// alone ends, nothing below is in.
///   mass   (logit) -> uint64
template <typename T, typename Mass>
__device__ float lowest_by_groups(const float* groups, int columns, RowBounds bounds, float floor,
                                  const PrefixBound& most, Mass mass, PrefixShared& shared,
                                  BlockScratch& scratch, bool& bounded) {
  constexpr std::uint32_t kEnough = 16;
  const float low = fmaxf(floor, bounds.lowest);
  const auto each = [&](auto add) {
    for (int i = ptx::thread(); i < groups_of(columns); i += kRowThreads) {
      const float logit = groups[i];
      if (logit >= low) add(logit, [&] { return mass(logit); });
    }
  };
  const auto bins =
      BinRule<kFewBins>::over(ordered(low), ordered(bounds.highest), kStep<T>);
  const PrefixEnd end = find_prefix(bins, most, kEnough, kStep<T>, each, shared, scratch);
  bounded = end.bounded;
  return bounded ? fmaxf(floor, from_ordered(end.high - end.range)) : floor;
}

}  // namespace overstory

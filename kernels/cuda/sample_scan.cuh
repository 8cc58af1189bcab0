// One row of logits as sampling sees it: what a first reading leaves of it, and reading parts again.
#pragma once

#include "sample_rules.cuh"

namespace overstory {

constexpr int kSampleWarps = 8;
constexpr int kSampleThreads = 32 * kSampleWarps;
constexpr int kMaxSegments = 512;
constexpr int kGroup = 256;  // columns of which the highest logit is kept
constexpr int kSegmentGroups = kSegment / kGroup;
constexpr int kMaxGroups = kMaxSegments * kSegmentGroups;

__host__ __device__ inline int groups_of(int columns) { return (columns + kGroup - 1) / kGroup; }

struct SegmentScan {
  float groups[kSegmentGroups];  // highest logits; NaN where there is one
  float sum;                     // of weights, of which the segment's highest logit's is 1
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
/// alone, so not on how rows are split.
template <typename T>
__device__ SegmentScan scan_segment(const Segment<T>& segment, const SampleRules& rules) {
  constexpr int kGroupLoads = Segment<T>::kLoads / kSegmentGroups;
  SegmentScan scan;
#pragma unroll
  for (int group = 0; group < kSegmentGroups; ++group) {
    float highest = -kInfinity;
#pragma unroll
    for (int i = 0; i < kGroupLoads; ++i) {
#pragma unroll
      for (int j = 0; j < Segment<T>::kPerLoad; ++j) {
        highest = ptx::max_nan(highest, segment.at(group * kGroupLoads + i, j));
      }
    }
    scan.groups[group] = warp_highest(highest);
  }
  const float highest = highest_of(scan.groups);
  scan.sum = 0.0f;
  if (!(highest > -kInfinity)) return scan;
  const float top = ptx::mul_rn(highest, rules.scale);
  if (fabsf(top) <= kFastExponent) {
    const float scale = rules.scale;
    scan.sum = sum_powers(segment, [=](float x) { return ptx::fma_rn(x, scale, -top); });
    // All exponents are too high by what the product `top` was rounded off by.
    const float excess = ptx::fma_rn(highest, scale, -top);
    scan.sum = ptx::fma_rn(-excess * kLn2, scan.sum, scan.sum);
  } else {
    const float quotient = rules.scaled(highest);
    scan.sum = sum_powers(segment, [&](float x) {
      // -inf divided is NaN: as good as the lowest number here.
      return fmaxf((rules.scaled(x) - quotient) * kLog2E, -FLT_MAX);
    });
  }
  return scan;
}

/// The groups of a row that may hold something, for the whole block to read again.
template <typename T>
struct GroupReader {
  const T* logits;
  int columns;
  bool aligned;
  const std::uint16_t* list;
  int listed;

  /// visit(logit, column) for what is not below `floor`, a warp per group; then done(group) by the
  /// whole warp.
  template <typename Visit, typename Done>
  __device__ void each(float floor, Visit visit, Done done) const {
    using Loads = Segment<T, kGroup>;
    constexpr int kBatch = 4 / Loads::kLoads;  // groups on their way at once
    for (int first = ptx::warp() * kBatch; first < listed; first += kSampleWarps * kBatch) {
      Loads batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < listed) {
          batch[i].load(logits, list[first + i] * kGroup, columns, aligned);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= listed) break;
        const int group = list[first + i];
#pragma unroll
        for (int load = 0; load < Loads::kLoads; ++load) {
          const int column = Loads::column(group * kGroup, load, ptx::lane());
#pragma unroll
          for (int j = 0; j < Loads::kPerLoad; ++j) {
            const float logit = batch[i].at(load, j);
            if (logit >= floor) visit(logit, column + j);
          }
        }
        done(group);
      }
    }
  }
};

}  // namespace overstory

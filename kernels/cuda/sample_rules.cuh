// What a row of sample_nodes is asked for: its parameters, its noise, the weight of a logit.
#pragma once

#include "logit_rows.cuh"

namespace overstory {

/// Bits of `status`.
constexpr int kBadLogits = 1;       // the highest logit is NaN or infinite
constexpr int kBadParameters = 2;   // NaN, min_p above 1, or logit / temperature overflows
constexpr int kFilterRefused = 4;   // the row has a filter, but the launch was told there is none
constexpr int kNoToken = -1;        // token of a row whose status is not 0

constexpr float kGreedyBelow = 1e-6f;
constexpr int kWeightBits = 44;
constexpr std::uint64_t kWeightOne = std::uint64_t{1} << kWeightBits;

struct SampleParameters {
  const float* temperature;       // [rows]; null: every row is greedy
  const int* top_k;               // [rows] or null, as the two below: no such filter
  const float* top_p;
  const float* min_p;
  const std::int64_t* seeds;      // [rows]
  const std::int64_t* positions;  // [rows]
};

struct SampleRules {
  float temperature;
  float reciprocal;
  float scale;  // to exponents of 2
  int top_k;    // 0: no filter
  float top_p;  // 1: no filter
  float min_p;  // 0: no filter
  bool greedy;
  bool wrong;

  __device__ SampleRules(const SampleParameters& from, int row, int columns) {
    const float given = from.temperature == nullptr ? 0.0f : from.temperature[row];
    const int k = from.top_k == nullptr ? 0 : from.top_k[row];
    const float p = from.top_p == nullptr ? 1.0f : from.top_p[row];
    const float m = from.min_p == nullptr ? 0.0f : from.min_p[row];
    greedy = given < kGreedyBelow || k == 1;
    wrong = !greedy && (given != given || p != p || !(m <= 1.0f));
    // Beyond this bound every quotient is 0 already, and the reciprocal stays a normal number.
    temperature = fminf(given, 1e30f);
    reciprocal = 1.0f / temperature;
    scale = reciprocal * kLog2E;
    top_k = k > 1 && k < columns ? k : 0;
    top_p = fminf(fmaxf(p, 0.0f), 1.0f);
    min_p = fmaxf(m, 0.0f);
  }

  /// More than the temperature changes the distribution.
  __device__ bool filtered() const { return top_k != 0 || top_p < 1.0f || min_p > 0.0f; }

  /// logit / temperature, rounded as the division is (up to rare last bits); NaN where it is
  /// infinite.
  __device__ float scaled(float logit) const {
    const float quotient = logit * reciprocal;
    return ptx::fma_rn(ptx::fma_rn(-quotient, temperature, logit), reciprocal, quotient);
  }

  /// exp(logit / temperature - top): 1 at top = scaled(logit), 0 for -inf.
  __device__ float weight(float logit, float top) const {
    return fmaxf(ptx::exp2_fast((scaled(logit) - top) * kLog2E), 0.0f);
  }
};

/// A weight as an integer: sums of these do not depend on their order. 163,840 fit in 64 bits;
/// what is below 2^-44 of the highest probability counts as 0.
__device__ inline std::uint64_t fixed_weight(float weight) {
  return static_cast<std::uint64_t>(weight * static_cast<float>(kWeightOne));
}

/// Finaliser of splitmix64.
__device__ inline std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/// 2^53 times the row's uniform number: `uniforms` of the reference.
__device__ inline std::uint64_t noise_bits(std::int64_t seed, std::int64_t position) {
  constexpr std::uint64_t golden = 0x9E3779B97F4A7C15u;
  const std::uint64_t start = mix(static_cast<std::uint64_t>(seed) + golden);
  return mix(start + (static_cast<std::uint64_t>(position) + 1) * golden) >> 11;
}

__device__ inline std::uint64_t noise_of(const SampleParameters& from, int row) {
  return noise_bits(from.seeds[row], from.positions[row]);
}

/// floor(u * total) of u = noise * 2^-53, exactly; below total, which must not be 0.
__device__ inline std::uint64_t share_of(std::uint64_t noise, std::uint64_t total) {
  return ptx::multiply_high(noise << 11, total);
}

/// First column of a segment at which the sum of the integer weights passes target(sum of all),
/// which must be below that sum; one whole warp, the result in every lane.
///   weight   (logit, column) -> uint64; 0 for -inf, which the columns from `end` on are
template <typename T, typename Weight, typename Target>
__device__ int locate_in_segment(const T* row, int first, int end, bool aligned, Weight weight,
                                 Target target) {
  using Loads = Segment<T>;
  Loads segment;
  segment.load(row, first, end, aligned);
  std::uint64_t through[Loads::kLoads];
#pragma unroll
  for (int i = 0; i < Loads::kLoads; ++i) {
    const int column = Loads::column(first, i, ptx::lane());
    through[i] = 0;
#pragma unroll 1  // run once: what is not in the instruction cache costs more than the loop
    for (int j = 0; j < Loads::kPerLoad; ++j) {
      through[i] += weight(element_at<T>(segment.raw[i], j), column + j);
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < Loads::kLoads; ++i) {
      const std::uint64_t other = ptx::shfl_up(through[i], step);
      if (ptx::lane() >= step) through[i] += other;
    }
  }
  std::uint64_t all = 0;
#pragma unroll
  for (int i = 0; i < Loads::kLoads; ++i) {
    through[i] += all;
    all = ptx::shfl(through[i], 31);
  }
  const std::uint64_t goal = target(all);
  int owner = -1, column = 0;
  std::uint64_t before = 0, sum = 0;  // of the loads before; before this lane's load
  uint4 raw = segment.raw[0];
#pragma unroll
  for (int i = 0; i < Loads::kLoads; ++i) {
    const std::uint32_t passed = ptx::ballot(through[i] > goal);
    if (owner >= 0) continue;
    if (passed != 0) {
      owner = ptx::lowest_bit(passed);
      sum = ptx::shfl_up(through[i], 1);
      if (ptx::lane() == 0) sum = before;
      column = Loads::column(first, i, ptx::lane());
      raw = segment.raw[i];
    }
    before = ptx::shfl(through[i], 31);
  }
  int found = kNoToken;
#pragma unroll 1
  for (int j = 0; j < Loads::kPerLoad; ++j) {
    sum += weight(element_at<T>(raw, j), column + j);
    if (found == kNoToken && sum > goal) found = column + j;
  }
  return ptx::shfl(found, owner);
}

}  // namespace overstory

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
///   weight   (logit, column) -> uint64
template <typename T, typename Weight, typename Target>
__device__ int locate_in_segment(const T* row, int first, int end, Weight weight, Target target) {
  constexpr int kPerLane = kSegment / 32;
  const int begin = first + ptx::lane() * kPerLane;
  std::uint64_t mine = 0;
  for (int i = 0; i < kPerLane; ++i) {
    if (begin + i < end) mine += weight(to_float(row[begin + i]), begin + i);
  }
  std::uint64_t through = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint64_t other = ptx::shfl_up(through, step);
    if (ptx::lane() >= step) through += other;
  }
  const std::uint64_t goal = target(ptx::shfl(through, 31));
  const int owner = ptx::lowest_bit(ptx::ballot(through > goal));
  int column = kNoToken;
  if (ptx::lane() == owner) {
    std::uint64_t sum = through - mine;
    for (int i = 0; i < kPerLane && column == kNoToken; ++i) {
      if (begin + i < end) sum += weight(to_float(row[begin + i]), begin + i);
      if (sum > goal) column = begin + i;
    }
  }
  return ptx::shfl(column, owner);
}

}  // namespace overstory

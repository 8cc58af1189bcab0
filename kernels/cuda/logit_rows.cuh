// Rows of logits as warps read them: segments of 1,024 columns, 32 per lane, in 16-byte loads.
#pragma once

#include <cfloat>
#include <cmath>

#include "ptx.cuh"

namespace overstory {

constexpr int kSegment = 1024;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kInfinity = INFINITY;

/// Codes of the launchers' `logit_type`.
constexpr int kLogitsBf16 = 0, kLogitsF16 = 1, kLogitsF32 = 2;

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

/// `run(T{})` of the type that a launcher's code means, `otherwise` where it means none.
template <typename Run>
int with_logit_type(int logit_type, const Run& run, int otherwise) {
  switch (logit_type) {
    case kLogitsBf16:
      return run(Bf16{});
    case kLogitsF16:
      return run(F16{});
    case kLogitsF32:
      return run(float{});
    default:
      return otherwise;
  }
}

__device__ inline float to_float(Bf16 value) { return ptx::bf16_to_float(value.bits); }
__device__ inline float to_float(F16 value) { return ptx::f16_to_float(value.bits); }
__device__ inline float to_float(float value) { return value; }

__device__ inline std::uint32_t raw_bits(Bf16 value) { return value.bits; }
__device__ inline std::uint32_t raw_bits(F16 value) { return value.bits; }
__device__ inline std::uint32_t raw_bits(float value) { return ptx::float_bits(value); }

/// Bits of -inf.
template <typename T>
__device__ constexpr std::uint32_t forbidden_bits();
template <>
__device__ constexpr std::uint32_t forbidden_bits<Bf16>() {
  return 0xFF80u;
}
template <>
__device__ constexpr std::uint32_t forbidden_bits<F16>() {
  return 0xFC00u;
}
template <>
__device__ constexpr std::uint32_t forbidden_bits<float>() {
  return 0xFF800000u;
}

/// Integers in the order of the floats; both zeros are one, and a positive NaN is the highest.
__device__ inline std::uint32_t ordered(float value) {
  const std::uint32_t bits = ptx::float_bits(value + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ inline float from_ordered(std::uint32_t key) {
  return ptx::bits_float((key >> 31) != 0 ? key & 0x7FFFFFFFu : ~key);
}

/// Element i of 16 bytes of logits; i is known when compiled, so nothing is addressed.
template <typename T>
__device__ inline float element_of(const uint4& raw, int i) {
  const int word = sizeof(T) == 4 ? i : i / 2;
  const std::uint32_t bits = word == 0 ? raw.x : word == 1 ? raw.y : word == 2 ? raw.z : raw.w;
  if constexpr (sizeof(T) == 4) {
    return ptx::bits_float(bits);
  } else {
    const T half{static_cast<std::uint16_t>(i % 2 == 0 ? bits & 0xFFFFu : bits >> 16)};
    return to_float(half);
  }
}

/// Element i where i is known only when run: a few selections, for code that need not be fast.
template <typename T>
__device__ inline float element_at(const uint4& raw, int i) {
  const int word = sizeof(T) == 4 ? i : i / 2;
  const std::uint32_t low = (word & 1) != 0 ? raw.y : raw.x;
  const std::uint32_t high = (word & 1) != 0 ? raw.w : raw.z;
  const std::uint32_t bits = (word & 2) != 0 ? high : low;
  if constexpr (sizeof(T) == 4) {
    return ptx::bits_float(bits);
  } else {
    return to_float(T{static_cast<std::uint16_t>((i & 1) != 0 ? bits >> 16 : bits)});
  }
}

/// Of two pairs of logits; NaN where there is one.
__device__ inline std::uint32_t higher_pair(Bf16, std::uint32_t a, std::uint32_t b) {
  return ptx::max_nan_bf16x2(a, b);
}
__device__ inline std::uint32_t higher_pair(F16, std::uint32_t a, std::uint32_t b) {
  return ptx::max_nan_f16x2(a, b);
}

/// The highest of 16 bytes of logits, NaN where there is one. Two to an instruction where they are
/// halves of a word.
template <typename T>
__device__ inline float highest_in(const uint4& raw) {
  if constexpr (sizeof(T) == 4) {
    return ptx::max_nan(ptx::max_nan(element_of<T>(raw, 0), element_of<T>(raw, 1)),
                        ptx::max_nan(element_of<T>(raw, 2), element_of<T>(raw, 3)));
  } else {
    const std::uint32_t pair =
        higher_pair(T{}, higher_pair(T{}, raw.x, raw.y), higher_pair(T{}, raw.z, raw.w));
    const uint4 both = make_uint4(pair, 0, 0, 0);
    return ptx::max_nan(element_of<T>(both, 0), element_of<T>(both, 1));
  }
}

/// One warp's segment of a row in registers, or `Columns` of it. Columns from the row's end on read
/// as -inf.
template <typename T, int Columns = kSegment>
struct Segment {
  static constexpr int kPerLoad = 16 / static_cast<int>(sizeof(T));
  static constexpr int kLoads = Columns / (32 * kPerLoad);
  uint4 raw[kLoads];

  /// Column of a lane's first element of a load; the other kPerLoad - 1 follow it.
  static __device__ int column(int first, int load, int lane) {
    return first + (load * 32 + lane) * kPerLoad;
  }

  /// `aligned`: every row starts at a multiple of 16 bytes.
  __device__ void load(const T* row, int first, int end, bool aligned) {
    if (aligned && first + Columns <= end) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        raw[i] = ptx::load_stream(row + column(first, i, ptx::lane()));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) raw[i] = partial(row, column(first, i, ptx::lane()), end);
    }
  }

  __device__ float at(int load, int i) const { return element_of<T>(raw[load], i); }
  __device__ float highest(int load) const { return highest_in<T>(raw[load]); }

 private:
  static __device__ std::uint32_t bits_at(const T* row, int column, int end) {
    return column < end ? raw_bits(row[column]) : forbidden_bits<T>();
  }

  static __device__ uint4 partial(const T* row, int column, int end) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = bits_at(row, column + i, end);
      } else {
        words[i] = bits_at(row, column + 2 * i, end) | bits_at(row, column + 2 * i + 1, end) << 16;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

/// Segments of a row that has `columns` of them to read.
__host__ __device__ inline int segments_of(int columns) {
  return (columns + kSegment - 1) / kSegment;
}

/// First segment of split `index` of `splits`.
__device__ inline int split_begin(int segments, int index, int splits) {
  return static_cast<int>(static_cast<std::int64_t>(segments) * index / splits);
}

/// How an op's blocks spend their time, in turns: what a warp takes for one segment while its block
/// is alone on its multiprocessor.
struct BlockCost {
  int warps;    // of a block
  float start;  // turns before the first segment is done
  float join;   // turns that the last block of a row needs for the results of the others,
  float part;   // and for each of them
  float crowd;  // of a turn, for each block of a multiprocessor: above 1 / crowd they share its rate
};

/// Blocks per row: of the choices up to `most`, the one that takes the fewest turns.
///   per_multiprocessor   blocks that run on one at once
inline int choose_splits(int rows, int segments, int multiprocessors, int per_multiprocessor,
                         BlockCost cost, int most) {
  const std::int64_t slots = static_cast<std::int64_t>(multiprocessors) * per_multiprocessor;
  float least = FLT_MAX;
  int best = 1;
  for (int splits = 1; splits <= most && splits <= segments; ++splits) {
    const std::int64_t blocks = static_cast<std::int64_t>(rows) * splits;
    const int share = (segments + splits - 1) / splits;
    const int turns = (share + cost.warps - 1) / cost.warps;
    const auto wave = [&](std::int64_t of) {
      const std::int64_t together = (of + multiprocessors - 1) / multiprocessors;
      const float turn = cost.crowd * static_cast<float>(together);
      return static_cast<float>(turns) * (turn > 1.0f ? turn : 1.0f) + cost.start;
    };
    float all = static_cast<float>(blocks / slots) * wave(slots);
    if (blocks % slots != 0) all += wave(blocks % slots);
    if (splits > 1) all += cost.join + cost.part * static_cast<float>(splits);
    if (all < least) {
      least = all;
      best = splits;
    }
  }
  return best;
}

/// The highest of the lanes' values; NaN if one is, and then a positive one in its lane.
__device__ inline float warp_highest(float value) {
  return from_ordered(ptx::warp_max(ordered(value)));
}

/// The same sum in every lane, always in the same order.
template <typename T>
__device__ inline T warp_sum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += ptx::shfl_xor(value, step);
  return value;
}

}  // namespace overstory

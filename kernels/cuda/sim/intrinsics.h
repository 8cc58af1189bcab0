// The functions of ptx.cuh on the simulated machine. Fragment layouts are those of the PTX ISA
// manual ("Matrix fragments for mma.m16n8k16 / m16n8k32", "ldmatrix").
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

#pragma GCC visibility push(hidden)

namespace overstory::ptx {

using sim::machine;
using sim::Where;

inline int thread() { return machine.thread(); }
inline int lane() { return machine.thread() % sim::kWarp; }
inline int warp() { return machine.thread() / sim::kWarp; }
inline int block() { return static_cast<int>(machine.block().x); }
inline int block_y() { return static_cast<int>(machine.block().y); }
inline int block_threads() { return machine.threads(); }
inline int grid_size() { return static_cast<int>(machine.grid().x); }
inline int grid_size_y() { return static_cast<int>(machine.grid().y); }

template <typename T>
T* shared_memory() {
  return reinterpret_cast<T*>(machine.shared());
}

inline int computed_here(int value) { return value; }

// ---- barriers

inline void sync_block(Where where = Where::here()) {
  machine.barrier("sync_block", where, 0, machine.threads());
}

inline bool sync_block_or(bool value, Where where = Where::here()) {
  return machine.barrier_or("sync_block_or", where, value);
}
inline void sync_named(int id, int threads, Where where = Where::here()) {
  if (id == 0) machine.fail_at("sync_named", where, "barrier 0 is that of sync_block");
  machine.barrier("sync_named", where, id, threads);
}

inline void arrive_named(int id, int threads, Where where = Where::here()) {
  if (id == 0) machine.fail_at("arrive_named", where, "barrier 0 is that of sync_block");
  machine.barrier("arrive_named", where, id, threads, false);
}

inline void sync_warp(std::uint32_t mask = ~0u, Where where = Where::here()) {
  int none = 0;
  machine.gather<int>("sync_warp", where, mask, none, [](int* const*, std::uint32_t) {});
}

// ---- shuffles and votes

namespace detail {

template <typename T>
struct Shuffle {
  T value;
  int from;
  T result;
};

template <typename T>
T shuffle(const char* op, T value, int from, std::uint32_t mask, Where where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  if (from < 0 || from >= sim::kWarp || (mask >> from & 1) == 0) {
    machine.fail_at(op, where, "the source lane is not in the mask");
  }
  Shuffle<T> mine{value, from, value};
  machine.gather<Shuffle<T>>(op, where, mask, mine,
                             [](Shuffle<T>* const* lanes, std::uint32_t named) {
                               for (int i = 0; i < sim::kWarp; ++i) {
                                 if ((named >> i & 1) != 0) {
                                   lanes[i]->result = lanes[lanes[i]->from]->value;
                                 }
                               }
                             });
  return mine.result;
}

struct Vote {
  bool value;
  std::uint32_t result;
};

inline std::uint32_t vote(const char* op, bool value, std::uint32_t mask, Where where) {
  Vote mine{value, 0};
  machine.gather<Vote>(op, where, mask, mine, [](Vote* const* lanes, std::uint32_t named) {
    std::uint32_t bits = 0;
    for (int i = 0; i < sim::kWarp; ++i) {
      if ((named >> i & 1) != 0 && lanes[i]->value) bits |= 1u << i;
    }
    for (int i = 0; i < sim::kWarp; ++i) {
      if ((named >> i & 1) != 0) lanes[i]->result = bits;
    }
  });
  return mine.result;
}

/// `join` of the lanes' values, in all of them.
template <typename T, typename F>
T reduce(const char* op, T value, std::uint32_t mask, Where where, F join) {
  struct Lane {
    T value;
    F join;
  } mine{value, join};
  machine.gather<Lane>(op, where, mask, mine, [](Lane* const* lanes, std::uint32_t named) {
    int first = 0;
    while ((named >> first & 1) == 0) ++first;
    T all = lanes[first]->value;
    for (int i = first + 1; i < sim::kWarp; ++i) {
      if ((named >> i & 1) != 0) all = lanes[i]->join(all, lanes[i]->value);
    }
    for (int i = first; i < sim::kWarp; ++i) {
      if ((named >> i & 1) != 0) lanes[i]->value = all;
    }
  });
  return mine.value;
}

}  // namespace detail

template <typename T>
T shfl(T value, int source, std::uint32_t mask = ~0u, Where where = Where::here()) {
  return detail::shuffle("shfl", value, source & 31, mask, where);
}
template <typename T>
T shfl_xor(T value, int lane_mask, std::uint32_t mask = ~0u, Where where = Where::here()) {
  return detail::shuffle("shfl_xor", value, lane() ^ lane_mask, mask, where);
}
/// The value of lane - delta; the first `delta` lanes keep their own.
template <typename T>
T shfl_up(T value, int delta, std::uint32_t mask = ~0u, Where where = Where::here()) {
  return detail::shuffle("shfl_up", value, lane() >= delta ? lane() - delta : lane(), mask, where);
}
/// The value of lane + delta; the last `delta` lanes keep their own.
template <typename T>
T shfl_down(T value, int delta, std::uint32_t mask = ~0u, Where where = Where::here()) {
  const int from = lane() + delta < sim::kWarp ? lane() + delta : lane();
  return detail::shuffle("shfl_down", value, from, mask, where);
}
inline std::uint32_t ballot(bool value, std::uint32_t mask = ~0u, Where where = Where::here()) {
  return detail::vote("ballot", value, mask, where);
}
inline bool any(bool value, std::uint32_t mask = ~0u, Where where = Where::here()) {
  return detail::vote("any", value, mask, where) != 0;
}
inline bool all(bool value, std::uint32_t mask = ~0u, Where where = Where::here()) {
  return detail::vote("all", value, mask, where) == mask;
}
inline std::uint32_t warp_max(std::uint32_t value, Where where = Where::here()) {
  return detail::reduce("warp_max", value, ~0u, where,
                        [](std::uint32_t a, std::uint32_t b) { return std::max(a, b); });
}
inline std::uint32_t warp_min(std::uint32_t value, Where where = Where::here()) {
  return detail::reduce("warp_min", value, ~0u, where,
                        [](std::uint32_t a, std::uint32_t b) { return std::min(a, b); });
}
inline int warp_sum(int value, Where where = Where::here()) {
  return detail::reduce("warp_sum", value, ~0u, where, [](int a, int b) { return a + b; });
}

// ---- memory

/// The source is read now, the destination poisoned now and written by the wait that covers it.
inline void cp_async_16(void* shared, const void* global, bool valid = true,
                        Where where = Where::here()) {
  machine.check_shared("cp_async_16", where, shared, 16, 16);
  if (valid && reinterpret_cast<std::uintptr_t>(global) % 16 != 0) {
    machine.fail_at("cp_async_16", where, "global address is not 16-byte aligned");
  }
  sim::Thread& me = machine.self();
  sim::Copy copy{static_cast<char*>(shared), me.groups, {}};
  if (valid) std::memcpy(copy.bytes, global, 16);
  sim::poison(copy.to, 16);
  me.copies.push_back(copy);
}

inline void cp_async_commit() { ++machine.self().groups; }

template <int N>
void cp_async_wait() {
  sim::Thread& me = machine.self();
  std::size_t kept = 0;
  for (const sim::Copy& copy : me.copies) {
    if (static_cast<std::uint64_t>(copy.group) + N < me.groups) {
      std::memcpy(copy.to, copy.bytes, 16);
    } else {
      me.copies[kept++] = copy;
    }
  }
  me.copies.resize(kept);
}

inline void mbarrier_init(std::uint64_t* barrier, int arrivals, Where where = Where::here()) {
  machine.init_mbarrier(where, barrier, arrivals);
}
inline void fence_async() {}
inline int uniform(int value, Where where = Where::here()) {
  return static_cast<int>(warp_max(static_cast<std::uint32_t>(value), where));
}
inline char* shared_here(char* shared) { return shared; }
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes,
                                   Where where = Where::here()) {
  machine.arrive(where, barrier, bytes);
}
inline void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity,
                          Where where = Where::here()) {
  machine.wait_mbarrier(where, barrier, parity);
}
inline void bulk_copy(void* shared, const void* global, int bytes, std::uint64_t* barrier,
                      Where where = Where::here()) {
  machine.copy_bulk(where, shared, global, bytes, barrier);
}
/// Memory that does not exist is no fault for this one.
inline void prefetch_l2(const void* global) { static_cast<void>(global); }

inline int atomic_add(int* at, int value) {
  const int before = *at;
  *at = before + value;
  return before;
}
inline int atomic_cas(int* at, int expected, int value) {
  const int before = *at;
  if (before == expected) *at = value;
  return before;
}
inline int atomic_min(int* at, int value) {
  const int before = *at;
  *at = std::min(before, value);
  return before;
}
inline std::uint32_t atomic_add(std::uint32_t* at, std::uint32_t value) {
  const std::uint32_t before = *at;
  *at = before + value;
  return before;
}
inline std::uint64_t atomic_add(std::uint64_t* at, std::uint64_t value) {
  const std::uint64_t before = *at;
  *at = before + value;
  return before;
}
inline void fence_device() {}
template <typename T>
T load_volatile(const T* at) {
  return *static_cast<const volatile T*>(at);
}
/// Read-only data: nobody may write it while the kernel runs.
template <typename T>
T load_readonly(const T* at) {
  return *at;
}
/// 16 aligned bytes of read-only data that is read once: past the L1 cache.
inline uint4 load_stream(const void* at, Where where = Where::here()) {
  if (reinterpret_cast<std::uintptr_t>(at) % 16 != 0) {
    machine.fail_at("load_stream", where, "address is not 16-byte aligned");
  }
  uint4 value;
  std::memcpy(&value, at, 16);
  return value;
}
/// 16 aligned bytes that are read once, of data that the kernel may write later.
inline uint4 load_once(const void* at, Where where = Where::here()) {
  return load_stream(at, where);
}
inline void pdl_wait() {}
inline void pdl_launch_dependents() {}

// ---- bits and numbers

inline int popcount(std::uint32_t bits) { return __builtin_popcount(bits); }
inline int popcount(std::uint64_t bits) { return __builtin_popcountll(bits); }
/// Index of the lowest set bit, -1 if there is none.
inline int lowest_bit(std::uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)) - 1; }
inline int lowest_bit(std::uint64_t bits) {
  return __builtin_ffsll(static_cast<long long>(bits)) - 1;
}
inline int leading_zeros(std::uint32_t bits) { return bits == 0 ? 32 : __builtin_clz(bits); }

inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float bits_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
/// Sum and product that no compiler may contract into a fused multiply-add.
inline float add_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float mul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
/// The larger one; NaN if one is (fmaxf would return the other).
inline float max_nan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return bits_float(0x7FFFFFFFu);
  return a > b ? a : b;
}
/// Upper 64 bits of the product.
inline std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
  __extension__ typedef unsigned __int128 Wide;
  return static_cast<std::uint64_t>((static_cast<Wide>(a) * b) >> 64);
}
inline float exp2_fast(float value) {
  const float result = std::exp2(value);
  return result < 1.17549435e-38f ? 0.0f : result;
}
inline float log2_fast(float value) { return std::log2(value); }

inline float f16_to_float(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value;
  if (exponent == 31) {
    value = bits_float(0x7F800000u | static_cast<std::uint32_t>(mantissa) << 13);
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    value = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}
inline std::uint16_t float_to_f16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return 0x7FFF;
  const float size = bits_float(rest);
  if (size >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7C00u);
  // A multiple of the last place: subnormal numbers have one of their own.
  int exponent;
  static_cast<void>(std::frexp(size, &exponent));
  const int last = size < 0x1p-14f ? -24 : exponent - 11;
  const float units = std::nearbyint(std::ldexp(size, -last));
  std::uint32_t half = static_cast<std::uint32_t>(units);
  if (last != -24) half += static_cast<std::uint32_t>(last + 24) << 10;
  return static_cast<std::uint16_t>(sign | half);
}
inline std::uint32_t pack_f16x2(float low, float high) {
  return float_to_f16(low) | static_cast<std::uint32_t>(float_to_f16(high)) << 16;
}
inline float bf16_to_float(std::uint16_t bits) {
  return bits_float(static_cast<std::uint32_t>(bits) << 16);
}
inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline std::uint32_t pack_bf16x2(float low, float high) {
  return float_to_bf16(low) | static_cast<std::uint32_t>(float_to_bf16(high)) << 16;
}
inline std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  const auto product = [](std::uint32_t x, std::uint32_t y) {
    return bf16_to_float(static_cast<std::uint16_t>(x)) *
           bf16_to_float(static_cast<std::uint16_t>(y));
  };
  return pack_bf16x2(product(a, b), product(a >> 16, b >> 16));
}

namespace detail {

/// Of the halves of two words as `to_float` reads them.
template <typename ToFloat>
std::uint32_t max_of_halves(std::uint32_t a, std::uint32_t b, ToFloat to_float) {
  std::uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto x = static_cast<std::uint16_t>(a >> shift);
    const auto y = static_cast<std::uint16_t>(b >> shift);
    const float first = to_float(x), second = to_float(y);
    const bool nan = std::isnan(first) || std::isnan(second);
    const std::uint32_t half = nan ? 0x7FFFu : first > second ? x : y;
    result |= half << shift;
  }
  return result;
}

}  // namespace detail

inline std::uint32_t max_nan_bf16x2(std::uint32_t a, std::uint32_t b) {
  return detail::max_of_halves(a, b, bf16_to_float);
}
inline std::uint32_t max_nan_f16x2(std::uint32_t a, std::uint32_t b) {
  return detail::max_of_halves(a, b, f16_to_float);
}

inline float e4m3_to_float(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float value;
  if (exponent == 15 && mantissa == 7) {
    value = bits_float(0x7FC00000u);
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), -9);
  } else {
    value = std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  }
  return (bits & 0x80) != 0 ? -value : value;
}
/// Round to nearest even, saturating at 448; NaN is 0x7F.
inline std::uint8_t float_to_e4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float size = std::fabs(value);
  if (size >= 448.0f) return sign | 0x7E;
  int exponent = 0;
  std::frexp(size, &exponent);
  exponent = std::max(exponent - 1, -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
  // `steps` is 8..16 for normal numbers (16 carries into the exponent), below 8 for others.
  const int code = steps < 8 ? steps : ((exponent + 7) << 3) + (steps - 8);
  return sign | static_cast<std::uint8_t>(std::min(code, 0x7E));
}
inline std::uint16_t pack_e4m3x2(float low, float high) {
  return static_cast<std::uint16_t>(float_to_e4m3(low) | float_to_e4m3(high) << 8);
}
inline void unpack_e4m3x2(std::uint16_t bits, float& low, float& high) {
  low = e4m3_to_float(static_cast<std::uint8_t>(bits & 0xFF));
  high = e4m3_to_float(static_cast<std::uint8_t>(bits >> 8));
}

// ---- matrices

namespace detail {

struct LoadMatrix {
  const std::uint16_t* row;
  std::uint32_t* result;
};

/// Lane 8 m + i names row i of matrix m. Lane l receives, of each matrix, elements 2 (l % 4) and
/// the next of row l / 4, or of column l / 4 when transposed; the lower index in the lower half.
template <int Matrices, bool Transposed>
void load_matrices(const char* op, std::uint32_t* result, const void* shared, Where where) {
  if (lane() < 8 * Matrices) machine.check_shared(op, where, shared, 16, 16);
  LoadMatrix mine{static_cast<const std::uint16_t*>(shared), result};
  machine.gather<LoadMatrix>(
      op, where, ~0u, mine, [](LoadMatrix* const* lanes, std::uint32_t) {
        for (int m = 0; m < Matrices; ++m) {
          const void* rows[8];
          for (int i = 0; i < 8; ++i) rows[i] = lanes[8 * m + i]->row;
          machine.count_matrix(rows);
          for (int l = 0; l < sim::kWarp; ++l) {
            const int major = l / 4, minor = 2 * (l % 4);
            std::uint32_t low, high;
            if (Transposed) {
              low = lanes[8 * m + minor]->row[major];
              high = lanes[8 * m + minor + 1]->row[major];
            } else {
              low = lanes[8 * m + major]->row[minor];
              high = lanes[8 * m + major]->row[minor + 1];
            }
            lanes[l]->result[m] = low | high << 16;
          }
        }
      });
}

struct Mma {
  float* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

/// 16 x 8 x K product of row-major a and column-major b; K elements of `Bits` bits, K * Bits = 256.
/// Register r of a: row l / 4 + 8 (r % 2), the l % 4-th 32-bit word of half r / 2 of the row.
/// Register r of b: column l / 4, the l % 4-th word of half r. d: rows l / 4 (+ 8), columns
/// 2 (l % 4) (+ 1). Products and sums in float32, k ascending, then added to d.
template <int K>
void multiply(Mma* const* lanes, float (*element)(std::uint32_t word, int index)) {
  typedef float Row __attribute__((vector_size(32)));  // 8 columns
  constexpr int kPerWord = K / 8;
  float a[16][K];
  Row b[K];
  for (int l = 0; l < sim::kWarp; ++l) {
    const int group = l / 4, word = l % 4;
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < kPerWord; ++i) {
        a[group + 8 * (r % 2)][(r / 2 * 4 + word) * kPerWord + i] = element(lanes[l]->a[r], i);
      }
    }
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < kPerWord; ++i) {
        b[(r * 4 + word) * kPerWord + i][group] = element(lanes[l]->b[r], i);
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    Row sum = {};
    for (int k = 0; k < K; ++k) sum += a[row][k] * b[k];
    for (int column = 0; column < 8; ++column) {
      const int l = (row % 8) * 4 + column / 2;
      lanes[l]->d[row / 8 * 2 + column % 2] += sum[column];
    }
  }
}

}  // namespace detail

inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* shared, Where where = Where::here()) {
  detail::load_matrices<4, false>("ldmatrix_x4", r, shared, where);
}
inline void ldmatrix_x2(std::uint32_t (&r)[2], const void* shared, Where where = Where::here()) {
  detail::load_matrices<2, false>("ldmatrix_x2", r, shared, where);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* shared,
                              Where where = Where::here()) {
  detail::load_matrices<4, true>("ldmatrix_x4_trans", r, shared, where);
}
inline void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* shared,
                              Where where = Where::here()) {
  detail::load_matrices<2, true>("ldmatrix_x2_trans", r, shared, where);
}

inline void mma_bf16_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                              const std::uint32_t (&b)[2], Where where = Where::here()) {
  detail::Mma mine{d, a, b};
  machine.gather<detail::Mma>("mma_bf16_m16n8k16", where, ~0u, mine,
                              [](detail::Mma* const* lanes, std::uint32_t) {
                                detail::multiply<16>(lanes, [](std::uint32_t word, int i) {
                                  return bits_float(i == 0 ? word << 16 : word & 0xFFFF0000u);
                                });
                              });
}

inline void mma_e4m3_m16n8k32(float (&d)[4], const std::uint32_t (&a)[4],
                              const std::uint32_t (&b)[2], Where where = Where::here()) {
  detail::Mma mine{d, a, b};
  machine.gather<detail::Mma>("mma_e4m3_m16n8k32", where, ~0u, mine,
                              [](detail::Mma* const* lanes, std::uint32_t) {
                                detail::multiply<32>(lanes, [](std::uint32_t word, int i) {
                                  return e4m3_to_float(
                                      static_cast<std::uint8_t>(word >> (8 * i)));
                                });
                              });
}

}  // namespace overstory::ptx

#pragma GCC visibility pop

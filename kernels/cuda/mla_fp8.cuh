// Keys in e4m3: 576 bytes a row, to bf16 where they stand in shared memory.
//
// Every e4m3 number is a bf16 number, so this rounds nothing; the scale of the cache goes into the
// scores and into the outputs (Args). A row comes to the second half of the place that its bf16
// takes, by the same copies; the warp that copied it widens it, from the front on, when it is there:
//
//   |............................|s0 s1 s2 ... s35|   after the copies: pieces of 16 numbers
//   |b0 b1 b2 ...   -->                           |   piece i goes to the 32 bytes at 32 i
//
// What is written in a round never reaches a piece of a later round, only such of its own and of
// earlier ones: the lanes of a row read, wait for each other, and write.
#pragma once

#include "mla_layout.cuh"
#include "ptx.cuh"

namespace overstory::mla {

constexpr int kFp8Bytes = kWidth;
constexpr int kFp8Place = 2 * kWidth - kFp8Bytes;  // not in the padding behind the row
static_assert(kFp8Place % 16 == 0, "copies take 16 bytes");

namespace detail {

// Two numbers, in the upper bytes of the halves, but for NaN. Exponent and mantissa moved to where
// bf16 has them give the number times 2^-120, those below 2^-6 too.
__device__ __forceinline__ uint32_t widen_pair(uint32_t x) {
  constexpr uint32_t k2To120 = 0x7b807b80u;
  return ptx::mul_bf16x2((x & 0x80008000u) | ((x >> 4) & 0x07f007f0u), k2To120);
}
// The bytes 0 and 1, or 2 and 3, of a word, in the upper bytes of the halves.
__device__ __forceinline__ uint32_t low_bytes(uint32_t w) {
  return (w << 8 & 0xff00u) | (w << 16 & 0xff000000u);
}
__device__ __forceinline__ uint32_t high_bytes(uint32_t w) {
  return (w >> 8 & 0xff00u) | (w & 0xff000000u);
}
// The upper bits of the bytes that are NaN.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t w) {
  return ((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}
// bf16 NaN over the halves whose upper bit is set in `which`.
__device__ __forceinline__ uint32_t with_nan(uint32_t pair, uint32_t which) {
  return pair | (which >> 15 & 0x00010001u) * 0x7fc0u;
}

}  // namespace detail

// Sixteen numbers.
__device__ __forceinline__ void widen(const uint4& from, uint4& first, uint4& second) {
  using namespace detail;
  const uint32_t w[4] = {from.x, from.y, from.z, from.w};
  uint32_t to[8];
  OVERSTORY_UNROLL
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = widen_pair(low_bytes(w[i]));
    to[2 * i + 1] = widen_pair(high_bytes(w[i]));
  }
  const uint32_t nan = nan_bytes(w[0]) | nan_bytes(w[1]) | nan_bytes(w[2]) | nan_bytes(w[3]);
  if (__builtin_expect(nan != 0, 0)) {
    OVERSTORY_UNROLL
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = with_nan(to[2 * i], low_bytes(nan_bytes(w[i])));
      to[2 * i + 1] = with_nan(to[2 * i + 1], high_bytes(nan_bytes(w[i])));
    }
  }
  first = make_uint4(to[0], to[1], to[2], to[3]);
  second = make_uint4(to[4], to[5], to[6], to[7]);
}

// A row, by `kLanes` lanes of one warp, of which this is number `lane`. All lanes of the warp call.
template <int kLanes>
__device__ __forceinline__ void widen_row(char* row, int lane) {
  constexpr int kPieces = kFp8Bytes / 16;
  OVERSTORY_UNROLL
  for (int first = 0; first < kPieces; first += kLanes) {
    const int piece = first + lane;
    const bool has = piece < kPieces;
    uint4 numbers = make_uint4(0, 0, 0, 0);
    if (has) numbers = *reinterpret_cast<const uint4*>(row + kFp8Place + piece * 16);
    ptx::sync_warp();
    if (!has) continue;
    uint4* to = reinterpret_cast<uint4*>(row + piece * 32);
    widen(numbers, to[0], to[1]);
  }
}

}  // namespace overstory::mla

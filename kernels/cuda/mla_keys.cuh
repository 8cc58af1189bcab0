// A block's share of the keys, where they are, and how they come to shared memory.
#pragma once

#include "mla_fp8.cuh"
#include "mla_layout.cuh"
#include "mla_schedule.cuh"
#include "ptx.cuh"

namespace overstory::mla {

// A block's share of an item. In shared memory, because registers are scarce.
struct alignas(16) Piece {
  int64_t first_index;  // of the request's prefix
  int prefix, keys;     // of the request; keys with the tail
  int begin, end;       // granules
  int plain_end;        // of those with keys of the prefix only
  int request;
  int tokens;           // of the request
  int first_token;      // row of q
  int first_row;        // of the row tile, within the request
  int whole;            // the piece is all of its item: no combining
  int slot;             // otherwise, where the part goes
  int next_unit, end_unit;  // of the block
  uint8_t wide_out_cache_loc;
  uint8_t parity;  // of its number among the block's pieces
};

// Where a key is: >= 0 a slot of the cache, kNoKey, or <= kDenseTail a row of args.tail.
constexpr int kNoKey = -1;
constexpr int kDenseTail = -2;

__device__ __forceinline__ int locate_key(const Args& args, const Piece& piece, int key) {
  if (key < piece.prefix) {
    return static_cast<int>(load_index(args.kv_indices, args.wide_kv_indices, piece.first_index + key));
  }
  if (key >= piece.keys) return kNoKey;
  const int token = piece.first_token + key - piece.prefix;
  if (args.tail != nullptr) return kDenseTail - token;
  return static_cast<int>(load_index(args.out_cache_loc, piece.wide_out_cache_loc != 0, token));
}

// Null for no key. One multiplication in the case that counts.
__device__ __forceinline__ const char* row_of(const Args& args, int where) {
  if (__builtin_expect(where >= 0, 1)) {
    return static_cast<const char*>(args.kv) +
           static_cast<uint64_t>(static_cast<uint32_t>(where)) * args.kv_row_bytes;
  }
  if (where == kNoKey) return nullptr;
  return static_cast<const char*>(args.tail) +
         static_cast<uint64_t>(static_cast<uint32_t>(kDenseTail - where)) * args.tail_row_bytes;
}

// This thread's part of a granule, by copies of `kCopiers` threads; zeros where there is no key.
// `thread`: of the copiers; `where`: of the granule's key thread / (kCopiers / 16).
// kFp8: to where `widen_row` finds the row.
template <int kCopiers, bool kFp8>
struct KeyCopy {
  static constexpr int kLanes = kCopiers / kGranule;  // of a key
  static constexpr int kStride = 16 * kLanes;
  static constexpr int kBytes = kFp8 ? kFp8Bytes : kKeyBytes;
  static constexpr int kPieces = (kBytes + kStride - 1) / kStride;
  const char* from;
  char* to;
  bool valid, none;

  // `plain`: the granule has keys of the prefix only.
  __device__ __forceinline__ KeyCopy(const Args& args, char* stage, int where, bool plain, int thread)
      : from(static_cast<const char*>(args.kv) + thread % kLanes * 16),
        to(stage + thread / kLanes * kRowBytes + (kFp8 ? kFp8Place : 0) + thread % kLanes * 16),
        valid(plain || where != kNoKey), none(false) {
    if (plain) {
      from += static_cast<uint64_t>(static_cast<uint32_t>(where)) * args.kv_row_bytes;
    } else if (valid) {
      from = row_of(args, where) + thread % kLanes * 16;
    }
  }
  __device__ __forceinline__ KeyCopy() : from(nullptr), to(nullptr), valid(false), none(true) {}
  // Where the last pieces are not enough for all lanes, the first ones take them.
  __device__ __forceinline__ void issue(int i, int thread) const {
    if (none) return;  // no granule
    if ((i + 1) * kStride <= kBytes || i * kStride + thread % kLanes * 16 < kBytes) {
      ptx::cp_async_16(to + i * kStride, from + i * kStride, valid);
    }
  }
  __device__ __forceinline__ void issue_all(int thread) const {
    OVERSTORY_UNROLL
    for (int i = 0; i < kPieces; ++i) issue(i, thread);
  }
};

// Not 0 if one of two bf16 is an infinity or NaN: one more in the exponent reaches the sign.
__device__ __forceinline__ uint32_t not_finite(uint32_t pair) {
  return ((pair & 0x7fff7fffu) + 0x00800080u) & 0x80008000u;
}

// Tail keys are seen by some rows only. Zeros in place of a key that is not finite keep it from the
// others; the rows that see it get NaN from its score (`broken`).
__device__ __forceinline__ void isolate_broken_keys(const Piece& piece, int granule, char* stage,
                                                    int thread, uint8_t* broken) {
  const int key = thread >> 4, part = thread & 15;
  const bool in_tail = granule * kGranule + key >= piece.prefix;
  char* row = stage + key * kRowBytes + part * 16;
  uint32_t bad = 0;
  for (int i = 0; i < (part < 8 ? 5 : 4); ++i) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + i * 256);
    bad |= not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
  }
  const uint32_t votes = ptx::ballot(bad != 0 && in_tail);
  const bool key_bad = ((votes >> (thread & 16)) & 0xffffu) != 0;
  if (key_bad) {
    for (int i = 0; i < (part < 8 ? 5 : 4); ++i) {
      *reinterpret_cast<uint4*>(row + i * 256) = make_uint4(0, 0, 0, 0);
    }
  }
  if (part == 0) broken[key] = key_bad ? 1 : 0;
}

}  // namespace overstory::mla

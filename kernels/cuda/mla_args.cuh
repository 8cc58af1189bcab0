// What the attention kernels get, and the numbers of the shape they are made for.
#pragma once

#include <cstdint>

#ifdef OVERSTORY_SIM
#define OVERSTORY_UNROLL
#define OVERSTORY_KEEP_LOOP
#else
#define OVERSTORY_KEEP_LOOP _Pragma("unroll 1")
#define OVERSTORY_UNROLL _Pragma("unroll")
#endif

namespace overstory::mla {

constexpr int kWidth = 576;          // columns of a key: 512 latent + 64 rope
constexpr int kValues = 512;         // leading columns that are its value
constexpr int kThreads = 256;        // per block, 8 warps
constexpr int kWarps = kThreads / 32;
constexpr int kGranule = 16;         // keys that one step works on
constexpr int kMaxTiles = 9;         // n8 tiles (of 8 rows) that fit one block's registers
constexpr int kMaxTail = 64;         // rows of a request: bits of a mask word
constexpr int kColumnPairs = kValues / 32;

// A row is one head of one token: row = token * heads + head, counted within its request. Eight
// rows are a tile, up to kMaxTiles tiles are a row tile, the share of one block.

enum MaskMode : int { kMaskBytes = 0, kMaskWords = 1, kMaskCausal = 2, kMaskNone = 3 };

struct Args {
  const void* q;              // bf16 [tokens, heads, 576], strides in elements
  int64_t q_token_stride;
  int64_t q_head_stride;
  const void* kv;             // bf16 or e4m3 [slots, >= 576], stride in bytes, multiple of 16
  uint32_t kv_row_bytes;
  const void* tail;           // the tail's keys, row = token; null: they are in kv at out_cache_loc
  uint32_t tail_row_bytes;
  const void* kv_indptr;      // [bs]: where a request's prefix begins in kv_indices
  const void* kv_ends;        // [bs], of the same type: and where it ends; ranges may overlap
  const void* kv_indices;
  const void* qo_indptr;      // [bs + 1]; null: decode, request b has the one row b and no tail
  const void* out_cache_loc;  // [tokens]
  const uint8_t* mask_bytes;  // FULL_MASK layout
  const int64_t* mask_indptr;
  const uint64_t* mask_words; // [tokens], bit j: sees row j of its request
  void* out;                  // bf16 [tokens, heads, 512], contiguous
  float* lse;                 // [tokens, heads] or null, natural logarithm
  void* partial;              // half [2 * blocks][tiles][16 pairs of column blocks][32 lanes][2][4]
  float* scales;              // [2 * blocks][warps]: a part's sums are `partial` times these
  float* stats;               // [2 * blocks][tiles * 8][2]: maximum (log2 units), sum
  float scale_log2;           // scale * log2(e), times the scale of an e4m3 cache
  float value_scale;          // that of an e4m3 cache, else 1
  int bs;
  int tokens;                 // rows of q and out, owned by a request or not
  int heads_shift;            // log2(heads)
  int blocks;                 // of the attention kernel
  int min_chunk;              // granules that a block takes at least; 0: see chunk_of
  int mask_mode;
  bool fp8;                   // kv and tail are e4m3
  bool wide_kv_indptr;        // int64 rather than int32
  bool wide_kv_indices;
  bool wide_qo_indptr;
  bool wide_out_cache_loc;
};

}  // namespace overstory::mla

// Launch layer of verify_attention and decode_attention.
//
// A call is two launches, the attention kernel and the combining one, whose grids depend on the
// arguments alone: not on lengths, which are read on the device. Capture with the largest bs,
// tokens and max_q; replay with any lengths, and with fewer rows per request than max_q.

#include "launch.cuh"
#include "mla_combine.cuh"
#include "mla_launch.cuh"
#ifdef OVERSTORY_SIM
#include "mla_attend_fp8.cuh"
#endif

namespace overstory::mla {
namespace {

// Tiles of a row tile: as few row tiles as possible, and then as few tiles in each.
int tiles_for(int heads, int max_q) {
  const int tiles = (heads * max_q + 7) / 8;
  const int row_tiles = (tiles + kMaxTiles - 1) / kMaxTiles;
  return (tiles + row_tiles - 1) / row_tiles;
}

int heads_shift_of(int heads) {
  for (int shift = 1; shift <= 4; ++shift) {
    if (heads == 1 << shift) return shift;
  }
  return -1;
}

// Of the workspace, in bytes.
struct PartSizes {
  int64_t partial, stats, scales;
  PartSizes(int tiles, int blocks)
      : partial(int64_t{2} * blocks * tiles * 8 * kValues * 2),
        stats(int64_t{2} * blocks * tiles * 8 * 2 * 4),
        scales(int64_t{2} * blocks * kWarps * 4) {}
  int64_t all() const { return partial + stats + scales; }
};

struct SharedBytes {
  template <int kTiles>
  int run() const {
    return Layout<kTiles, stages_for(kTiles)>::kBytes;
  }
};

// More blocks per tile while there are few tiles.
int column_groups(int tiles) {
  int groups = kColumnPairs;
  while (groups > 1 && groups * tiles > 256) groups /= 2;
  return groups;
}

int launch_combine(const Args& args, int tiles, void* stream) {
  const int heads = 1 << args.heads_shift;
  // Requests of less than 8 heads a token end in tiles that are not full.
  const int most = (args.tokens * heads + 7) / 8 + (heads < 8 ? args.bs : 0);
  return launch_dependent(combine, dim3(most, column_groups(most)), kThreads,
                          sizeof(Joining), stream, args, tiles);
}

int attend(Args& args, int heads, int max_q, void* workspace, int64_t workspace_bytes,
           void* stream) {
  args.heads_shift = heads_shift_of(heads);
  if (args.heads_shift < 0 || max_q < 1 || max_q > kMaxTail || args.blocks < 1 ||
      args.min_chunk < 0 || !(args.scale_log2 > 0.0f) || !(args.value_scale > 0.0f) ||
      args.kv_row_bytes % 16 != 0 || args.tail_row_bytes % 16 != 0 ||
      reinterpret_cast<uintptr_t>(args.q) % 16 != 0 || args.q_head_stride % 8 != 0 ||
      (args.tokens > 1 && args.q_token_stride % 8 != 0)) {
    return kInvalid;
  }
  if (args.bs == 0 || args.tokens == 0) return 0;
  const int tiles = tiles_for(heads, max_q);
  const PartSizes sizes(tiles, args.blocks);
  if (workspace_bytes < sizes.all()) return kInvalid;
  args.partial = workspace;
  args.stats = reinterpret_cast<float*>(static_cast<char*>(workspace) + sizes.partial);
  args.scales = args.stats + sizes.stats / 4;
  const Attend<false> attend{args, stream};
  const int error =
      args.fp8 ? attend_fp8(args, tiles, stream) : with_tiles<kMaxTiles>(tiles, attend);
  if (error != 0) return error;
  return launch_combine(args, tiles, stream);
}

constexpr float kLog2E = 1.44269504088896341f;

// Of a stride in elements; what `attend` refuses if it does not fit.
uint32_t row_bytes(int64_t stride, bool fp8) {
  return stride >= 0 && stride <= INT32_MAX ? static_cast<uint32_t>(stride * (fp8 ? 1 : 2)) : 1;
}

// Where prefixes are in kv_indices: one after another, unless their ends are given.
void set_prefixes(Args& args, const void* kv_indptr, const void* kv_ends, int bytes) {
  args.kv_indptr = kv_indptr;
  args.kv_ends = kv_ends != nullptr ? kv_ends : static_cast<const char*>(kv_indptr) + bytes;
  args.wide_kv_indptr = bytes == 8;
}

// The cache's type and what its numbers are multiplied by.
void set_cache(Args& args, float scale, int fp8, float kv_scale) {
  args.fp8 = fp8 != 0;
  args.scale_log2 = scale * kv_scale * kLog2E;
  args.value_scale = kv_scale;
}

}  // namespace
}  // namespace overstory::mla

// Blocks of the attention kernel that the current device runs at a time, per multiprocessor: times
// the number of multiprocessors it is the `blocks` to launch with. 0: the device refuses.
extern "C" int overstory_attention_blocks_per_sm(int heads, int max_q, int fp8) {
  using namespace overstory::mla;
  const int tiles = tiles_for(heads, max_q);
  return fp8 != 0 ? count_blocks_fp8(tiles) : with_tiles<kMaxTiles>(tiles, CountBlocks<false>{});
}

// Dynamic shared memory of such a block, in bytes.
extern "C" int overstory_attention_shared_bytes(int heads, int max_q) {
  using namespace overstory::mla;
  return with_tiles<kMaxTiles>(tiles_for(heads, max_q), SharedBytes{});
}

// Bytes of workspace that a launch with these numbers needs. More than an int holds from 14,445
// blocks of nine tiles on.
extern "C" int64_t overstory_attention_workspace(int heads, int max_q, int blocks) {
  using namespace overstory::mla;
  return PartSizes(tiles_for(heads, max_q), blocks).all();
}

// Attention of each request's rows to its prefix and, by mask, to its own rows (the tail).
//
// Shapes and layouts as in reference/attention.py; q and out bf16, kv and tail bf16 or (fp8 != 0)
// e4m3, whose numbers times kv_scale are keys and values; widths 576 and 512. Row strides in elements; rows of kv and tail begin at multiples of 16 bytes, so do rows of q.
//   tail         null: the tail's keys are in kv at out_cache_loc; else row i is the key of token i
//   *_bytes      4 or 8: the integer type of the array before
//   kv_ends      [bs] like kv_indptr: where prefixes end, which may then overlap; null: where the
//                next begins
//   kv_indices   slots (not pages)
//   mask_bytes   with mask_indptr (int64): FULL_MASK, only the tail columns are read; or
//   mask_words   one uint64 per token, bit j: it sees row j of its request; or neither, and
//   causal       row i sees the rows 0..i, or all of them
//   lse          float or null
//   max_q        no request has more rows, 1..64
//   blocks       of the attention kernel
//   min_chunk    granules of 16 keys that a block takes at least; 0: chosen on the device
// Rows of tokens that no request owns become 0 (lse -inf).
extern "C" int overstory_verify_attention(
    const void* q, int64_t q_token_stride, int64_t q_head_stride, const void* kv,
    int64_t kv_row_stride, const void* tail, int64_t tail_row_stride, const void* kv_indptr,
    int kv_indptr_bytes, const void* kv_ends, const void* kv_indices, int kv_indices_bytes,
    const void* qo_indptr, int qo_indptr_bytes, const void* out_cache_loc, int out_cache_loc_bytes,
    const void* mask_bytes, const void* mask_indptr, const void* mask_words, int causal, void* out,
    void* lse, void* workspace, int64_t workspace_bytes, int bs, int tokens, int heads, int max_q,
    float scale, int fp8, float kv_scale, int blocks, int min_chunk, void* stream) {
  using namespace overstory::mla;
  Args args{};
  args.q = q;
  args.q_token_stride = q_token_stride;
  args.q_head_stride = q_head_stride;
  args.kv = kv;
  args.kv_row_bytes = row_bytes(kv_row_stride, fp8 != 0);
  args.tail = tail;
  args.tail_row_bytes = row_bytes(tail_row_stride, fp8 != 0);
  set_prefixes(args, kv_indptr, kv_ends, kv_indptr_bytes);
  args.kv_indices = kv_indices;
  args.wide_kv_indices = kv_indices_bytes == 8;
  args.qo_indptr = qo_indptr;
  args.wide_qo_indptr = qo_indptr_bytes == 8;
  args.out_cache_loc = out_cache_loc;
  args.wide_out_cache_loc = out_cache_loc_bytes == 8;
  args.mask_bytes = static_cast<const uint8_t*>(mask_bytes);
  args.mask_indptr = static_cast<const int64_t*>(mask_indptr);
  args.mask_words = static_cast<const uint64_t*>(mask_words);
  args.mask_mode = mask_bytes != nullptr   ? kMaskBytes
                   : mask_words != nullptr ? kMaskWords
                   : causal != 0           ? kMaskCausal
                                           : kMaskNone;
  args.out = out;
  args.lse = static_cast<float*>(lse);
  set_cache(args, scale, fp8, kv_scale);
  args.bs = bs;
  args.tokens = tokens;
  args.blocks = blocks;
  args.min_chunk = min_chunk;
  return attend(args, heads, max_q, workspace, workspace_bytes, stream);
}

// One row per request, which sees all of its slots; arguments as above.
extern "C" int overstory_decode_attention(
    const void* q, int64_t q_token_stride, int64_t q_head_stride, const void* kv,
    int64_t kv_row_stride, const void* kv_indptr, int kv_indptr_bytes, const void* kv_indices,
    int kv_indices_bytes, void* out, void* lse, void* workspace, int64_t workspace_bytes, int bs,
    int heads, float scale, int fp8, float kv_scale, int blocks, int min_chunk, void* stream) {
  using namespace overstory::mla;
  Args args{};
  args.q = q;
  args.q_token_stride = q_token_stride;
  args.q_head_stride = q_head_stride;
  args.kv = kv;
  args.kv_row_bytes = row_bytes(kv_row_stride, fp8 != 0);
  set_prefixes(args, kv_indptr, nullptr, kv_indptr_bytes);
  args.kv_indices = kv_indices;
  args.wide_kv_indices = kv_indices_bytes == 8;
  args.mask_mode = kMaskNone;
  args.out = out;
  args.lse = static_cast<float*>(lse);
  set_cache(args, scale, fp8, kv_scale);
  args.bs = bs;
  args.tokens = bs;
  args.blocks = blocks;
  args.min_chunk = min_chunk;
  return attend(args, heads, 1, workspace, workspace_bytes, stream);
}

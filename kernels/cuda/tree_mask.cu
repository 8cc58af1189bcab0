#include "tree_mask.cuh"

#include "launch.cuh"

namespace {

using namespace overstory;

template <typename Length>
int launch_tree_mask(TreeMaskArgs<Length> args, void* stream) {
  const auto bs = static_cast<unsigned>(args.bs);
  const unsigned blocks = args.mask != nullptr && args.fill_prefix ? args.rows : 1;
  constexpr std::size_t kShared = kTreeRows * (sizeof(std::uint64_t) + sizeof(int));
  return launch(tree_mask_kernel<Length>, dim3(blocks, bs), kTreeMaskThreads, kShared, stream,
                args);
}

}  // namespace

/// Masks and positions of trees of `rows` rows; each of the four results may be null.
///
/// parents and depths [bs, rows]; seq_lens [bs] int64 if seq_lens_are_int64, else int32. mask:
/// FULL_MASK, rows * (seq_len + rows) bytes per request, requests after one another; without
/// fill_prefix only the last `rows` bytes of each row are written. mask_indptr [bs + 1]; packed
/// and positions [bs, rows]. Returns cudaErrorInvalidValue for rows outside of 1..64 or bs
/// outside of 0..65,535.
extern "C" int overstory_tree_mask(const int64_t* parents, const int64_t* depths,
                                   const void* seq_lens, uint8_t* mask, int64_t* mask_indptr,
                                   uint64_t* packed, int64_t* positions, int bs, int rows,
                                   int seq_lens_are_int64, int fill_prefix, void* stream) {
  if (rows < 1 || rows > kTreeRows || bs < 0 || bs > 65535) return kInvalidArgument;
  const bool fill = fill_prefix != 0;
  if (seq_lens_are_int64 != 0) {
    return launch_tree_mask<std::int64_t>({parents, depths, static_cast<const int64_t*>(seq_lens),
                                           mask, mask_indptr, packed, positions, bs, rows, fill},
                                          stream);
  }
  return launch_tree_mask<std::int32_t>({parents, depths, static_cast<const int32_t*>(seq_lens),
                                         mask, mask_indptr, packed, positions, bs, rows, fill},
                                        stream);
}

#include "tree_accept.cuh"

#include "launch.cuh"

/// The target's walk; the arguments are those of `tree_accept` of the reference.
///
/// tokens, parents, target_tokens [bs, rows], sizes [bs]; results accepted_rows and emitted
/// [bs, width], lengths and bonus [bs]. Returns cudaErrorInvalidValue for rows outside of 1..64 or
/// width below 1.
extern "C" int overstory_tree_accept(const int64_t* tokens, const int64_t* parents,
                                     const int64_t* sizes, const int64_t* target_tokens,
                                     int64_t* accepted_rows, int64_t* lengths, int64_t* bonus,
                                     int64_t* emitted, int bs, int rows, int width, void* stream) {
  using namespace overstory;
  if (bs < 0 || rows < 1 || rows > kTreeRows || width < 1) return kInvalidArgument;
  const TreeAcceptArgs args{tokens,  parents, sizes,   target_tokens, accepted_rows,
                            lengths, bonus,   emitted, rows,          width};
  auto* kernel = rows <= kWarpThreads ? tree_accept_kernel<1> : tree_accept_kernel<2>;
  return launch(kernel, static_cast<unsigned>(bs), kWarpThreads, 0, stream, args);
}

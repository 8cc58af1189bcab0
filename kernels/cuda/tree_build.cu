#include "tree_build.cuh"

#include "launch.cuh"

/// Best-first trees; the arguments are those of `tree_build` of the reference.
///
/// root_tokens [bs], logprobs and token_ids [bs, depth, k] contiguous, budgets [bs]; results
/// [bs, rows] and sizes [bs]; first_child and next_sibling may be null. Candidates that are NaN
/// never enter, a budget above rows - 1 counts as that. Returns cudaErrorInvalidValue for depth
/// above 16, min(width, k) above 16, rows outside of 1..64.
extern "C" int overstory_tree_build(const int64_t* root_tokens, const float* logprobs,
                                    const int64_t* token_ids, const int32_t* budgets,
                                    int64_t* tokens, int64_t* parents, int64_t* depths,
                                    int64_t* ranks, int64_t* sizes, int64_t* first_child,
                                    int64_t* next_sibling, int bs, int depth, int k, int width,
                                    int rows, int spine_first, void* stream) {
  using namespace overstory;
  width = width < k ? width : k;
  if (bs < 0 || depth < 0 || depth > kTreeDepth || width < 0 || width > kTreeWidth || rows < 1 ||
      rows > kTreeRows) {
    return kInvalidArgument;
  }
  if (width == 0) depth = 0;
  const TreeBuildArgs args{root_tokens, logprobs, token_ids,   budgets,      tokens, parents,
                           depths,      ranks,    sizes,       first_child,  next_sibling,
                           depth,       k,        width,       rows,         spine_first != 0};
  auto* kernel = rows <= kWarpThreads ? tree_build_kernel<1> : tree_build_kernel<2>;
  return launch(kernel, static_cast<unsigned>(bs), kWarpThreads, kTreeBuildShared, stream, args);
}

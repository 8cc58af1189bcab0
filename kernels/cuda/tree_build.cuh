// Best-first trees from per-depth candidates, one warp per request.
//
// Every row of the tree has one entry in the frontier: its next child, that is the best candidate
// of the next depth that is not a child of it yet. Lane l holds the entries of rows l and l + 32,
// so taking the best node is one warp minimum over the score's magnitude, and the two entries that
// change (the parent's next child, the new row's first) are updated by their own lanes. The order
// is that of the reference: higher score, lower depth, lexicographically lower path of ranks;
// only where scores tie are depth and path compared.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ptx.cuh"
#include "tree_limits.cuh"

namespace overstory {

struct TreeBuildArgs {
  const std::int64_t* root_tokens;  // [bs]
  const float* logprobs;            // [bs, depth, k]
  const std::int64_t* token_ids;    // [bs, depth, k]
  const std::int32_t* budgets;      // [bs], drafted rows; taken as at most rows - 1
  std::int64_t* tokens;             // [bs, rows], as all that follow but sizes [bs]
  std::int64_t* parents;
  std::int64_t* depths;
  std::int64_t* ranks;
  std::int64_t* sizes;
  std::int64_t* first_child;   // may be null
  std::int64_t* next_sibling;  // may be null
  int depth, k, width, rows;
  bool spine_first;
};

namespace detail {

constexpr std::uint32_t kNoChild = 0xFFFFFFFFu;
constexpr int kNoRow = 127;

struct TreeCandidates {
  const float* steps;  // [kTreeDepth, kTreeWidth], shared memory
  int depth, width;

  /// Magnitude of the score of candidate `rank` at `child_depth` (1..) below a row of `score`:
  /// scores are never positive, so the lower number is the better path; kNoChild if none enters.
  __device__ __forceinline__ std::uint32_t key(float score, int child_depth, int rank) const {
    if (child_depth > depth || rank >= width) return kNoChild;
    const float sum = ptx::add_rn(score, steps[(child_depth - 1) * kTreeWidth + rank]);
    return sum > ptx::bits_float(0xFF800000u) ? ptx::float_bits(sum) & 0x7FFFFFFFu : kNoChild;
  }
};

/// A row of the tree, in the registers of the lane that owns it.
struct TreeRow {
  std::uint32_t key = kNoChild;  // of its next child
  float score = 0.0f;
  std::uint64_t path = 0;  // its ranks from the root on, kTreeRankBits each
  int depth = 0;
  int next_rank = 0;  // of its next child
  int last_child = kNoRow;
  int parent = -1, rank = -1, first_child = -1, next_sibling = -1;
};

/// A row's next child, as the lane that owns the row sees it.
struct TreeContender {
  std::uint32_t key;
  std::uint64_t path;  // of the child
  int parent, depth, rank, elder;  // depth of the parent; elder: its child before, or kNoRow

  __device__ __forceinline__ TreeContender(const TreeRow& row, int index)
      : key(row.key),
        path(row.path << kTreeRankBits | static_cast<std::uint64_t>(row.next_rank)),
        parent(index),
        depth(row.depth),
        rank(row.next_rank),
        elder(row.last_child) {}

  __device__ __forceinline__ bool before(const TreeContender& other) const {
    if (key != other.key) return key < other.key;
    if (depth != other.depth) return depth < other.depth;
    return path < other.path;
  }

  /// Makes it that of lane `owner`.
  __device__ __forceinline__ void broadcast(int owner) {
    const int told = ptx::shfl(parent | depth << 6 | rank << 11 | elder << 16, owner);
    path = ptx::shfl(path, owner);
    parent = told & 63;
    depth = told >> 6 & 31;
    rank = told >> 11 & 31;
    elder = told >> 16;
  }
};

/// Of the lanes that contend, the one whose child is the least deep, then of least path.
__device__ __forceinline__ std::uint32_t break_tie(bool contends, const TreeContender& mine) {
  const auto high = static_cast<std::uint32_t>(mine.path >> 32);
  const auto low = static_cast<std::uint32_t>(mine.path);
  const std::uint32_t parts[3] = {static_cast<std::uint32_t>(mine.depth), high, low};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::uint32_t least = ptx::warp_min(contends ? parts[i] : 0xFFFFFFFFu);
    contends = contends && parts[i] == least;
  }
  return ptx::ballot(contends);
}

/// The best of both rows of the lane.
template <int kSlots>
__device__ __forceinline__ TreeContender contender(const TreeRow (&mine)[kSlots]) {
  TreeContender best(mine[0], ptx::lane());
  if constexpr (kSlots == 2) {
    const TreeContender other(mine[1], ptx::lane() + kWarpThreads);
    if (other.before(best)) best = other;
  }
  return best;
}

/// Puts `chosen` into the tree as row `added`.
template <int kSlots>
__device__ __forceinline__ void add_row(TreeRow (&mine)[kSlots], const TreeCandidates& candidates,
                                        const TreeContender& chosen, int added) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    TreeRow& row = mine[slot];
    const int index = ptx::lane() + kWarpThreads * slot;
    const bool is_parent = index == chosen.parent;
    if (is_parent) {
      if (chosen.elder == kNoRow) row.first_child = added;
      row.last_child = added;
      ++row.next_rank;
    } else if (index == added) {
      row.parent = chosen.parent;
      row.rank = chosen.rank;
      row.depth = chosen.depth + 1;
      row.path = chosen.path;
      row.score = -ptx::bits_float(chosen.key);
    }
    if (is_parent || index == added) {
      row.key = candidates.key(row.score, row.depth + 1, row.next_rank);
    }
    if (index == chosen.elder) row.next_sibling = added;
  }
}

/// Grows the tree of the warp's request to `budget` drafted rows; returns its rows.
template <int kSlots>
__device__ __forceinline__ int grow(TreeRow (&mine)[kSlots], const TreeCandidates& candidates,
                                    int budget, int spine) {
  int size = 1;
  // Rows 0 to `spine` - 1 each take their first child, which is the next row.
  for (; size <= spine; ++size) {
    TreeContender chosen(mine[0], ptx::lane());
    chosen.key = ptx::shfl(chosen.key, size - 1);
    if (chosen.key == kNoChild) break;
    chosen.broadcast(size - 1);
    add_row(mine, candidates, chosen, size);
  }
  for (; size <= budget; ++size) {
    TreeContender chosen = contender(mine);
    const std::uint32_t key = ptx::warp_min(chosen.key);
    if (key == kNoChild) break;
    const bool contends = chosen.key == key;
    std::uint32_t owners = ptx::ballot(contends);
    if ((owners & (owners - 1)) != 0) owners = break_tie(contends, chosen);
    chosen.key = key;
    chosen.broadcast(ptx::lowest_bit(owners));
    add_row(mine, candidates, chosen, size);
  }
  return size;
}

}  // namespace detail

constexpr int kTreeCandidates = kTreeDepth * kTreeWidth;

/// Bytes of shared memory of `tree_build_kernel`.
constexpr std::size_t kTreeBuildShared = kTreeCandidates * (sizeof(std::int64_t) + sizeof(float));

namespace detail {

/// Candidates of one request to shared memory, all loads in flight at once.
__device__ __forceinline__ void load_candidates(const TreeBuildArgs& args, int request,
                                                float* steps, std::int64_t* tokens) {
  constexpr int kLoads = kTreeCandidates / kWarpThreads;
  constexpr int kDepthsPerLoad = kWarpThreads / kTreeWidth;
  const int rank = ptx::lane() % kTreeWidth;
  const std::int64_t base = static_cast<std::int64_t>(request) * args.depth * args.k + rank;
  float step[kLoads];
  std::int64_t token[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int depth = ptx::lane() / kTreeWidth + kDepthsPerLoad * i;
    const bool exists = depth < args.depth && rank < args.width;
    step[i] = exists ? args.logprobs[base + depth * args.k] : 0.0f;
    token[i] = exists ? args.token_ids[base + depth * args.k] : 0;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = ptx::lane() + kWarpThreads * i;
    steps[at] = step[i] > 0.0f ? 0.0f : step[i];  // NaN stays, and never enters
    tokens[at] = token[i];
  }
}

}  // namespace detail

/// One warp per request. kSlots: 1 for at most 32 rows, 2 for at most 64.
template <int kSlots>
__global__ void __launch_bounds__(kWarpThreads) tree_build_kernel(TreeBuildArgs args) {
  const int lane = ptx::lane(), request = ptx::block();
  auto* tokens = ptx::shared_memory<std::int64_t>();
  auto* steps = reinterpret_cast<float*>(tokens + kTreeCandidates);
  int budget = args.budgets[request];
  const std::int64_t root_token = args.root_tokens[request];
  detail::load_candidates(args, request, steps, tokens);
  budget = budget < args.rows - 1 ? budget : args.rows - 1;
  ptx::sync_warp();

  const detail::TreeCandidates candidates{steps, args.depth, args.width};
  detail::TreeRow mine[kSlots];
  if (lane == 0) mine[0].key = candidates.key(0.0f, 1, 0);
  const int spine = args.spine_first ? (budget < args.depth ? budget : args.depth) : 0;
  const int size = detail::grow(mine, candidates, budget, spine);

  const std::int64_t first = static_cast<std::int64_t>(request) * args.rows;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int row = lane + kWarpThreads * slot;
    if (row >= args.rows) continue;
    const detail::TreeRow& of = mine[slot];
    const std::int64_t at = first + row;
    args.tokens[at] =
        of.rank < 0 ? root_token : tokens[(of.depth - 1) * kTreeWidth + of.rank];
    args.parents[at] = of.parent;
    args.depths[at] = of.depth;
    args.ranks[at] = of.rank;
    if (args.first_child != nullptr) args.first_child[at] = of.first_child;
    if (args.next_sibling != nullptr) args.next_sibling[at] = of.next_sibling;
  }
  if (lane == 0) args.sizes[request] = size;
}

}  // namespace overstory

// Ancestor masks and positions of a tree: SGLang's FULL_MASK layout, one packed word per row.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "tree_limits.cuh"

namespace overstory {

constexpr int kTreeMaskThreads = 256;

template <typename Length>
struct TreeMaskArgs {
  const std::int64_t* parents;  // [bs, rows]
  const std::int64_t* depths;   // [bs, rows]; read for positions only
  const Length* seq_lens;       // [bs]
  std::uint8_t* mask;           // FULL_MASK, all requests; may be null, as all that follow
  std::int64_t* mask_indptr;    // [bs + 1]
  std::uint64_t* packed;        // [bs, rows]
  std::int64_t* positions;      // [bs, rows]
  int bs, rows;
  bool fill_prefix;
};

namespace detail {

/// Sum of the lengths of requests 0 to `count` - 1, in every lane of the warp.
template <typename Length>
__device__ __forceinline__ std::int64_t sum_of_lengths(const Length* seq_lens, int count) {
  std::int64_t sum = 0;
  for (int b = ptx::lane(); b < count; b += kWarpThreads) sum += seq_lens[b];
#pragma unroll
  for (int step = kWarpThreads / 2; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
  return sum;
}

/// Sets `count` bytes to 1 with all threads of the block.
__device__ __forceinline__ void fill_with_ones(std::uint8_t* at, std::int64_t count) {
  const int thread = ptx::thread(), threads = ptx::block_threads();
  const auto unaligned = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(at) & 15);
  const std::int64_t head = unaligned < count ? unaligned : count;
  for (std::int64_t i = thread; i < head; i += threads) at[i] = 1;
  const std::int64_t vectors = (count - head) / 16;
  auto* body = reinterpret_cast<uint4*>(at + head);
  constexpr unsigned kOnes = 0x01010101u;
  for (std::int64_t i = thread; i < vectors; i += threads) {
    body[i] = make_uint4(kOnes, kOnes, kOnes, kOnes);
  }
  for (std::int64_t i = head + 16 * vectors + thread; i < count; i += threads) at[i] = 1;
}

}  // namespace detail

/// Block (x, b) writes rows x, x + gridDim.x, ... of request b's mask; block (0, b) all else.
template <typename Length>
__global__ void __launch_bounds__(kTreeMaskThreads) tree_mask_kernel(TreeMaskArgs<Length> args) {
  const int thread = ptx::thread(), lane = ptx::lane(), request = ptx::block_y();
  const int rows = args.rows;
  auto* words = ptx::shared_memory<std::uint64_t>();
  auto* parents = reinterpret_cast<int*>(words + kTreeRows);
  const std::int64_t first = static_cast<std::int64_t>(request) * rows;
  // All loads first: each is the latency of the whole kernel.
  const std::int64_t length = args.seq_lens[request];
  const int parent = thread < rows ? static_cast<int>(args.parents[first + thread]) : -1;
  const bool writes_positions = thread < rows && ptx::block() == 0 && args.positions != nullptr;
  const std::int64_t depth = writes_positions ? args.depths[first + thread] : 0;
  const std::int64_t before = detail::sum_of_lengths(args.seq_lens, request);
  const std::int64_t start = rows * (before + static_cast<std::int64_t>(request) * rows);

  if (thread < rows) parents[thread] = parent;
  if (writes_positions) args.positions[first + thread] = length + depth;
  if (ptx::block() == 0 && thread == 0 && args.mask_indptr != nullptr) {
    args.mask_indptr[request] = start;
    if (request == args.bs - 1) args.mask_indptr[args.bs] = start + rows * (length + rows);
  }
  ptx::sync_block();
  if (thread < rows) {
    std::uint64_t word = std::uint64_t{1} << thread;
    int row = thread;
    // A parent that does not precede its child (no tree) ends the walk instead of hanging it.
    for (int above = parents[row]; above >= 0 && above < row; above = parents[row]) {
      word |= std::uint64_t{1} << above;
      row = above;
    }
    words[thread] = word;
    if (ptx::block() == 0 && args.packed != nullptr) args.packed[first + thread] = word;
  }
  if (args.mask == nullptr) return;
  ptx::sync_block();
  const std::int64_t columns = length + rows;
  const int step = ptx::grid_size();
  constexpr int kWarps = kTreeMaskThreads / kWarpThreads;
  for (int row = ptx::block() + step * ptx::warp(); row < rows; row += step * kWarps) {
    std::uint8_t* tail = args.mask + start + row * columns + length;
    const std::uint64_t word = words[row];
    for (int column = lane; column < rows; column += kWarpThreads) {
      tail[column] = static_cast<std::uint8_t>(word >> column & 1);
    }
  }
  if (args.fill_prefix) {
    for (int row = ptx::block(); row < rows; row += step) {
      detail::fill_with_ones(args.mask + start + row * columns, length);
    }
  }
}

}  // namespace overstory

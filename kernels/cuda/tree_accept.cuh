// The walk down a verified tree, one warp per request.
//
// A row matches if its token is the one that the target chose after its parent. From the root on,
// a vote finds the lowest matching row below the current one; its index is the next current row.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "tree_limits.cuh"

namespace overstory {

struct TreeAcceptArgs {
  const std::int64_t* tokens;         // [bs, rows]
  const std::int64_t* parents;        // [bs, rows]
  const std::int64_t* sizes;          // [bs]
  const std::int64_t* target_tokens;  // [bs, rows]
  std::int64_t* accepted_rows;        // [bs, width]
  std::int64_t* lengths;              // [bs]
  std::int64_t* bonus;                // [bs]
  std::int64_t* emitted;              // [bs, width]
  int rows, width;
};

/// kSlots: 1 for at most 32 rows, 2 for at most 64.
template <int kSlots>
__global__ void __launch_bounds__(kWarpThreads) tree_accept_kernel(TreeAcceptArgs args) {
  const int lane = ptx::lane(), request = ptx::block();
  const std::int64_t first = static_cast<std::int64_t>(request) * args.rows;
  const std::int64_t size = args.sizes[request];
  std::int64_t tokens[kSlots], targets[kSlots];
  int parents[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int row = lane + kWarpThreads * slot;
    const bool holds = row < args.rows;
    tokens[slot] = holds ? args.tokens[first + row] : 0;
    targets[slot] = holds ? args.target_tokens[first + row] : 0;
    parents[slot] = holds ? static_cast<int>(args.parents[first + row]) : -1;
  }
  // Parent of a row that matches, else -1: no walk can come there.
  int below[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int row = lane + kWarpThreads * slot;
    const bool drafted = row > 0 && row < size && parents[slot] >= 0 && parents[slot] < row;
    const std::int64_t wanted = of_row(targets, drafted ? parents[slot] : 0);
    below[slot] = drafted && tokens[slot] == wanted ? parents[slot] : -1;
  }

  int path[kSlots];  // element `lane` and, with two slots, `lane` + 32
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) path[slot] = -1;
  if (lane == 0) path[0] = 0;
  int current = 0, length = 1;
  for (; length < args.width; ++length) {
    const std::uint32_t low = ptx::ballot(below[0] == current);
    const std::uint32_t high = kSlots == 2 ? ptx::ballot(below[kSlots - 1] == current) : 0;
    if ((low | high) == 0) break;
    current = low != 0 ? ptx::lowest_bit(low) : kWarpThreads + ptx::lowest_bit(high);
    if (lane == length % kWarpThreads) path[kSlots == 2 ? length / kWarpThreads : 0] = current;
  }

  const std::int64_t out = static_cast<std::int64_t>(request) * args.width;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const std::int64_t token = of_row(targets, path[slot] < 0 ? 0 : path[slot]);
    const int column = lane + kWarpThreads * slot;
    if (column < args.width) {
      args.accepted_rows[out + column] = path[slot];
      args.emitted[out + column] = path[slot] < 0 ? -1 : token;
    }
  }
  for (int column = lane + kWarpThreads * kSlots; column < args.width; column += kWarpThreads) {
    args.accepted_rows[out + column] = -1;
    args.emitted[out + column] = -1;
  }
  const std::int64_t bonus = of_row(targets, current);
  if (lane == 0) {
    args.lengths[request] = length - 1;
    args.bonus[request] = bonus;
  }
}

}  // namespace overstory

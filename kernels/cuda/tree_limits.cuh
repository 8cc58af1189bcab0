// What the tree kernels can hold: a tree is one warp's registers.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace overstory {

constexpr int kTreeRows = 64;        // two rows per lane; one 64-bit word is a row of the mask
constexpr int kTreeDepth = 16;       // with kTreeWidth: a path of ranks is one 64-bit number
constexpr int kTreeWidth = 16;
constexpr int kTreeRankBits = 4;
constexpr int kWarpThreads = 32;
constexpr int kInvalidArgument = 1;  // cudaErrorInvalidValue

/// Value of row `row` where lane l holds those of rows l and, with two slots, l + 32.
template <int kSlots, typename T>
__device__ __forceinline__ T of_row(const T (&slots)[kSlots], int row) {
  T value = ptx::shfl(slots[0], row % kWarpThreads);
  if constexpr (kSlots == 2) {
    const T upper = ptx::shfl(slots[1], row % kWarpThreads);
    if (row >= kWarpThreads) value = upper;
  }
  return value;
}

}  // namespace overstory

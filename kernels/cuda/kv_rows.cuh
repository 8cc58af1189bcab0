// Rows of some slots of every layer's buffer to a dense buffer, or from there: KV that goes to, or
// comes from, another replica. Nothing is read and written both, so there is nothing to wait for.
#pragma once

#include "ptx.cuh"

namespace overstory {

constexpr int kRowsUnit = 16;  // bytes
constexpr int kRowsThreads = 256;
constexpr int kRowsMaxBlocks = 4096;      // of one layer; more units take turns
constexpr int kRowsMaxUnits = 1 << 30;    // of one layer: counted in 32 bits

struct RowsArgs {
  void* const* layers;  // [layers] base addresses, 16-byte aligned
  const void* slots;    // [rows] Slot
  char* dense;          // [layers, rows, row_units] units, 16-byte aligned, apart from the layers
  int* status;          // [1], set to 1 by a slot that is not in the buffers
  int rows;
  int row_units;
  std::int64_t layer_slots;
};

/// Grid: x = blocks that share a layer's units, y = layers.
template <typename Slot, bool Scatter>
__global__ void __launch_bounds__(kRowsThreads) kv_rows_kernel(RowsArgs args) {
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();
  const int units = args.rows * args.row_units;
  const std::int64_t row_bytes = static_cast<std::int64_t>(args.row_units) * kRowsUnit;
  char* layer = static_cast<char*>(args.layers[ptx::block_y()]);
  char* part = args.dense + static_cast<std::int64_t>(ptx::block_y()) * args.rows * row_bytes;
  const int stride = ptx::grid_size() * ptx::block_threads();
  for (int unit = ptx::block() * ptx::block_threads() + ptx::thread(); unit < units;
       unit += stride) {
    const int row = unit / args.row_units;
    const auto slot =
        static_cast<std::int64_t>(ptx::load_readonly(static_cast<const Slot*>(args.slots) + row));
    if (slot < 0 || slot >= args.layer_slots) {
      *args.status = 1;
      continue;
    }
    char* place = layer + slot * row_bytes + (unit - row * args.row_units) * kRowsUnit;
    char* packed = part + static_cast<std::int64_t>(unit) * kRowsUnit;
    *reinterpret_cast<uint4*>(Scatter ? place : packed) = ptx::load_once(Scatter ? packed : place);
  }
}

}  // namespace overstory

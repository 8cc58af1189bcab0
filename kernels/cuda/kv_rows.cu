// Launch layer of kv_rows.cuh.
#include "kv_rows.cuh"

#include <algorithm>

#include "launch.cuh"

namespace overstory {
namespace {

template <typename Slot>
int launch_rows(const RowsArgs& args, int layers, bool scatter, void* stream) {
  const int units = args.rows * args.row_units;
  const int blocks = std::min(kRowsMaxBlocks, (units + kRowsThreads - 1) / kRowsThreads);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(layers));
  return scatter
             ? launch_dependent(kv_rows_kernel<Slot, true>, grid, kRowsThreads, 0, stream, args)
             : launch_dependent(kv_rows_kernel<Slot, false>, grid, kRowsThreads, 0, stream, args);
}

}  // namespace
}  // namespace overstory

/// Row i of every layer's part of `dense` becomes row slots[i] of that layer; the other way round
/// if `scatter`, where a slot named twice is not seen and has either row.
///   layers      device array of num_layers addresses, multiples of 16
///   row_bytes   a multiple of 16
///   slots       [rows] int32, or int64 if wide_slots; one outside of 0 .. layer_slots - 1 leaves
///               its row undone and sets `status`
///   dense       [num_layers, rows, row_bytes], apart from the layers, a multiple of 16
///   status      [1] int32, left alone where all is well
/// More than 2^30 units of 16 bytes in a layer: cudaErrorInvalidValue.
extern "C" int overstory_kv_rows(void* const* layers, int num_layers, int64_t row_bytes,
                                 int64_t layer_slots, const void* slots, bool wide_slots, int rows,
                                 void* dense, bool scatter, int* status, void* stream) {
  using namespace overstory;
  constexpr int kInvalid = 1;  // cudaErrorInvalidValue
  if (row_bytes <= 0 || row_bytes % kRowsUnit != 0 || row_bytes > (1 << 24) || rows < 0 ||
      num_layers < 0 || num_layers > 65535 || status == nullptr ||
      reinterpret_cast<std::uintptr_t>(dense) % kRowsUnit != 0 ||
      row_bytes / kRowsUnit * rows > kRowsMaxUnits) {
    return kInvalid;
  }
  if (rows == 0 || num_layers == 0) return 0;
  const RowsArgs args{layers, slots,
                      static_cast<char*>(dense),
                      status, rows,
                      static_cast<int>(row_bytes / kRowsUnit),
                      layer_slots};
  return wide_slots ? launch_rows<std::int64_t>(args, num_layers, scatter, stream)
                    : launch_rows<std::int32_t>(args, num_layers, scatter, stream);
}

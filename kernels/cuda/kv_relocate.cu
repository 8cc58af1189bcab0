// Launch layer of kv_relocate.cuh.
#include "kv_relocate.cuh"

#include <algorithm>

#include "launch.cuh"

namespace overstory {
namespace {

constexpr int kInvalid = 1;  // cudaErrorInvalidValue
constexpr int kMinThreads = 128;
constexpr int kNarrow = 2048;  // moves from which on slices are narrow
constexpr int kPreferredSliceLog2 = 3;  // 128 bytes: whole cache lines while the moves allow it

template <typename Slot>
int launch_relocate(const RelocateArgs& args, int layers, void* stream) {
  if (args.overlap != nullptr) {
    constexpr std::size_t kShared = (kRelocateTable + 1) * sizeof(int);
    int error = raise_shared_limit<kv_overlap_kernel<Slot>>(kShared);
    if (error == 0) {
      error = launch_dependent(kv_overlap_kernel<Slot>, dim3(1), kRelocateThreads, kShared, stream,
                               args);
    }
    if (error != 0) return error;
  }
  const int total = args.moves << args.slice_log2;
  // Few moves: one unit per thread, so that latencies overlap; many: up to 1,024 threads of 8.
  const int units = total <= 1024 ? 1 : total <= 2048 ? 2 : total <= 4096 ? 4 : 8;
  const int threads = std::max(kMinThreads, ((total + units - 1) / units + 31) / 32 * 32);
  const int slice = 1 << args.slice_log2;
  const dim3 grid(static_cast<unsigned>((args.row_units + slice - 1) / slice),
                  static_cast<unsigned>(layers));
  switch (units) {
    case 1:
      return launch_dependent(kv_relocate_kernel<Slot, 1>, grid, threads, 0, stream, args);
    case 2:
      return launch_dependent(kv_relocate_kernel<Slot, 2>, grid, threads, 0, stream, args);
    case 4:
      return launch_dependent(kv_relocate_kernel<Slot, 4>, grid, threads, 0, stream, args);
    default:
      return launch_dependent(kv_relocate_kernel<Slot, 8>, grid, threads, 0, stream, args);
  }
}

}  // namespace
}  // namespace overstory

/// Most moves that one launch takes.
extern "C" int overstory_kv_relocate_max_moves() { return overstory::kMaxMoves; }

/// Row target_slots[i] of every layer becomes what row source_slots[i] was before the launch.
///
/// Safe for every overlap: chains, cycles, swaps, a source named any number of times. Not safe, and
/// not seen: a target named twice, and layers that share memory (a pool that hands out its values
/// as a view of its keys must be passed once). A move with slot -1 is padding; one with another
/// slot outside of 0 .. slots - 1 is not made and sets `status`.
///   layers        device array of num_layers addresses, multiples of 16
///   row_bytes     a multiple of 16
///   source_slots, target_slots   [moves] int32, or int64 if wide_slots
///   scratch       [1] int32, any value. Launches that share it must not overlap in time.
///   status        [1] int32, left alone where all is well
/// More than overstory_kv_relocate_max_moves() moves: cudaErrorInvalidValue. They cannot be split
/// freely: a later launch must not read what an earlier one wrote.
extern "C" int overstory_kv_relocate(void* const* layers, int num_layers, int64_t row_bytes,
                                     int64_t slots, const void* source_slots,
                                     const void* target_slots, bool wide_slots, int moves,
                                     int* scratch, int* status, void* stream) {
  using namespace overstory;
  if (row_bytes <= 0 || row_bytes % kRelocateUnit != 0 || row_bytes > (1 << 24) || moves < 0 ||
      moves > kMaxMoves || num_layers < 0 || num_layers > 65535 || slots > INT32_MAX ||
      (row_bytes / kRelocateUnit) * static_cast<int64_t>(moves) > INT32_MAX ||
      scratch == nullptr || status == nullptr) {
    return kInvalid;
  }
  if (moves == 0) return 0;
  int slice_log2 = kPreferredSliceLog2;
  while ((moves << slice_log2) > kRelocateMaxUnits) --slice_log2;
  const RelocateArgs args{layers,
                          source_slots,
                          target_slots,
                          moves > kNarrow ? scratch : nullptr,
                          status,
                          moves,
                          static_cast<int>(row_bytes / kRelocateUnit),
                          slice_log2,
                          slots};
  return wide_slots ? launch_relocate<std::int64_t>(args, num_layers, stream)
                    : launch_relocate<std::int32_t>(args, num_layers, stream);
}

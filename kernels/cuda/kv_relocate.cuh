// Moves rows between slots in every layer's buffer, in one op, for any overlap of sources and
// destinations.
//
// A block owns one column slice of one layer for all moves: it reads every source slice into
// registers, passes one barrier, and only then writes. No other block touches those bytes, so
// chains, cycles, swaps and sources named more than once need no plan and no order. The price is a
// bound on the moves of one launch (kMaxMoves), and that a slice is as narrow as the moves are
// many: 32 bytes, one sector of DRAM, for up to 4,096 moves.
//
// Where slices would be that narrow, a kernel before asks whether any row is a source and a
// destination. If none is, there is nothing to wait for: blocks share whole rows instead.
#pragma once

#include "ptx.cuh"

namespace overstory {

constexpr int kRelocateUnit = 16;             // bytes
constexpr int kRelocateUnitsPerThread = 8;    // 32 registers
constexpr int kRelocateMaxUnits = 1024 * kRelocateUnitsPerThread;
constexpr int kMaxMoves = kRelocateMaxUnits;  // one unit of each row in a block
constexpr int kRelocateTableLog2 = 14;        // twice as many places as sources
constexpr int kRelocateTable = 1 << kRelocateTableLog2;
constexpr int kRelocateThreads = 1024;

struct RelocateArgs {
  void* const* layers;   // [layers] base addresses, 16-byte aligned, not overlapping
  const void* sources;   // [moves] Slot
  const void* targets;   // [moves] Slot, distinct where not skipped
  int* overlap;          // [1] or null; null: not known. 1: some row is source and destination
  int* status;           // [1], set to 1 by a slot that is neither -1 nor in the buffers
  int moves;
  int row_units;
  int slice_log2;        // units of one row that a block moves
  std::int64_t slots;    // rows of a layer, below 2^31
};

/// A move's rows; both -1 for a move that is none: padding, or in place already.
struct Move {
  int source;
  int target;
};

template <typename Slot>
__device__ Move load_move(const RelocateArgs& args, int move) {
  const auto source =
      static_cast<std::int64_t>(ptx::load_readonly(static_cast<const Slot*>(args.sources) + move));
  const auto target =
      static_cast<std::int64_t>(ptx::load_readonly(static_cast<const Slot*>(args.targets) + move));
  const bool inside = source >= 0 && source < args.slots && target >= 0 && target < args.slots;
  if (!inside || source == target) return {-1, -1};
  return {static_cast<int>(source), static_cast<int>(target)};
}

/// One block, one thread per move and turn: reports slots outside of the buffers.
template <typename Slot>
__device__ void check_slots(const RelocateArgs& args) {
  for (int move = ptx::thread(); move < args.moves; move += ptx::block_threads()) {
    const auto source = static_cast<std::int64_t>(static_cast<const Slot*>(args.sources)[move]);
    const auto target = static_cast<std::int64_t>(static_cast<const Slot*>(args.targets)[move]);
    const bool padding = source == -1 || target == -1;
    const bool inside = source >= 0 && source < args.slots && target >= 0 && target < args.slots;
    if (!padding && !inside) *args.status = 1;
  }
}

/// First place to look for a slot.
__device__ inline int table_place(int slot) {
  return static_cast<int>(static_cast<std::uint32_t>(slot) * 2654435769u >>
                          (32 - kRelocateTableLog2));
}

/// One block: whether the row of any target is a source too, to *args.overlap.
template <typename Slot>
__global__ void __launch_bounds__(kRelocateThreads) kv_overlap_kernel(RelocateArgs args) {
  int* table = ptx::shared_memory<int>();  // kRelocateTable slots, -1 where there is none
  int* found = table + kRelocateTable;
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();
  for (int i = ptx::thread(); i < kRelocateTable; i += kRelocateThreads) table[i] = -1;
  if (ptx::thread() == 0) *found = 0;
  ptx::sync_block();
  for (int i = ptx::thread(); i < args.moves; i += kRelocateThreads) {
    const int slot = load_move<Slot>(args, i).source;
    if (slot < 0) continue;
    int place = table_place(slot);
    for (;;) {
      const int there = ptx::atomic_cas(&table[place], -1, slot);
      if (there == -1 || there == slot) break;
      place = (place + 1) % kRelocateTable;
    }
  }
  ptx::sync_block();
  for (int i = ptx::thread(); i < args.moves; i += kRelocateThreads) {
    const int slot = load_move<Slot>(args, i).target;
    if (slot < 0) continue;
    int place = table_place(slot);
    while (table[place] != -1 && table[place] != slot) place = (place + 1) % kRelocateTable;
    if (table[place] == slot) ptx::atomic_cas(found, 0, 1);
  }
  ptx::sync_block();
  if (ptx::thread() == 0) *args.overlap = *found;
}

/// Units first .. end of a layer's moves, row after row.
template <typename Slot, int Units>
__device__ void move_rows(const RelocateArgs& args, char* layer, int first, int end) {
  const std::int64_t row_bytes = static_cast<std::int64_t>(args.row_units) * kRelocateUnit;
  for (int base = first + ptx::thread(); base < end; base += Units * ptx::block_threads()) {
    char* targets[Units];
    uint4 held[Units];
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      const int unit = base + i * ptx::block_threads();
      targets[i] = nullptr;
      if (unit >= end) continue;
      const Move move = load_move<Slot>(args, unit / args.row_units);
      if (move.source < 0) continue;
      char* part = layer + unit % args.row_units * kRelocateUnit;
      targets[i] = part + move.target * row_bytes;
      held[i] = ptx::load_once(part + move.source * row_bytes);
    }
#pragma unroll
    for (int i = 0; i < Units; ++i) {
      if (targets[i] != nullptr) *reinterpret_cast<uint4*>(targets[i]) = held[i];
    }
  }
}

/// Grid: x = slices of a row, y = layers. Each thread moves `Units` units: unit u of the block is
/// part u % slice of move u / slice.
template <typename Slot, int Units>
__global__ void __launch_bounds__(1024) kv_relocate_kernel(RelocateArgs args) {
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();
  char* layer = static_cast<char*>(args.layers[ptx::block_y()]);
  if (ptx::block() == 0 && ptx::block_y() == 0) check_slots<Slot>(args);
  if (args.overlap != nullptr && ptx::load_volatile(args.overlap) == 0) {
    const std::int64_t units = static_cast<std::int64_t>(args.moves) * args.row_units;
    const int first = static_cast<int>(units * ptx::block() / ptx::grid_size());
    const int end = static_cast<int>(units * (ptx::block() + 1) / ptx::grid_size());
    move_rows<Slot, (Units > 4 ? 4 : Units)>(args, layer, first, end);
    return;
  }
  const int total = args.moves << args.slice_log2;
  const int part = (ptx::block() << args.slice_log2) +
                   (ptx::thread() & ((1 << args.slice_log2) - 1));  // of a row, for all units
  const std::int64_t row_bytes = static_cast<std::int64_t>(args.row_units) * kRelocateUnit;
  layer += part * kRelocateUnit;
  // All slots before the first row, or each row would wait for its own.
  Move moves[Units];
#pragma unroll
  for (int i = 0; i < Units; ++i) {
    const int unit = i * ptx::block_threads() + ptx::thread();
    moves[i] = {-1, -1};
    if (unit < total && part < args.row_units) {
      moves[i] = load_move<Slot>(args, unit >> args.slice_log2);
    }
  }
  uint4 held[Units];
#pragma unroll
  for (int i = 0; i < Units; ++i) {
    if (moves[i].source >= 0) held[i] = ptx::load_once(layer + moves[i].source * row_bytes);
  }
  ptx::sync_block();
#pragma unroll
  for (int i = 0; i < Units; ++i) {
    if (moves[i].target >= 0) {
      *reinterpret_cast<uint4*>(layer + moves[i].target * row_bytes) = held[i];
    }
  }
}

}  // namespace overstory

// Shared memory of a block of the attention kernel.
#pragma once

#include "mla_args.cuh"

namespace overstory::mla {

// 16 bytes of padding move each key by four banks: the eight rows of an 8x8 matrix, read along or
// across keys, lie in 32 different banks.
constexpr int kRowBytes = 2 * kWidth + 16;
constexpr int kStageBytes = kGranule * kRowBytes;
constexpr int kFragmentBytes = 32 * 16;  // a 16 x 8 float tile as the lanes of a warp hold it

// Steps of 16 columns in which a warp multiplies scores; those for the odd tile are 5 in the first
// half of the warps and 4 in the second.
constexpr int kStepsQK = 9;
constexpr int kStepsOdd = 5;

// How granules go through a block.
enum class Flow {
  pipelined,   // one barrier a granule, keys by bulk copies
  two_phases,  // two barriers, keys by 16-byte copies of all threads
};

template <int kTiles, int kStages, Flow kFlow>
struct Layout {
  static constexpr int kPairs = kTiles / 2;  // tiles whose scores each half of the warps computes
  static constexpr bool kOdd = kTiles % 2 != 0;  // one more, for which the halves share the columns
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kWeightBytes = kTiles * kGranule * 8 * 2;

  // A tile's scores are the sum of the parts of four warps, eight for the odd tile. Pipelined, the
  // warp that adds them up keeps its own.
  static constexpr bool kOwn = kFlow == Flow::pipelined;
  static constexpr int kParts = kOwn ? 3 : 4;
  static constexpr int kScores = kStages * kStageBytes;
  static constexpr int kScoreBytes = (2 * kPairs * kParts + (kOdd ? 8 : 0)) * kFragmentBytes;
  // Twice, for granules of even and odd number:
  static constexpr int kWeights = kScores + kScoreBytes;  // bf16 [tile][key][row]
  static constexpr int kScaling = kWeights + 2 * kWeightBytes;  // float [row]
  static constexpr int kMoved = kScaling + 2 * kRows * 4;  // uint8 [16], by tile
  static constexpr int kBroken = kMoved + 2 * 16;          // uint8 [16], by key
  static constexpr int kVisible = kBroken + 2 * 16;        // uint64 [token of the row tile]
  static constexpr int kPiece = kVisible + (kRows / 2 + 2) / 2 * 2 * 8;  // Piece
  // Where registers do not suffice (three tiles: for two blocks of a multiprocessor), a thread
  // keeps these here, for itself.
  static constexpr bool kFull = kTiles > kWarps;
  static constexpr bool kTight = kTiles >= kWarps || (kOwn && (kTiles == 3 || kTiles == 7));
  static constexpr int kSpared = kOwn ? 4 : 2;  // last steps of the last pair of tiles
  static constexpr int kLanded = kPiece + 64;             // mbarrier [stage]
  static constexpr int kStates = kLanded + 64;            // float4 [tile][lane]
  static constexpr int kQueries = kStates + (kTight ? kTiles * kFragmentBytes : 0);
  static constexpr int kBytes =                           // uint2 [step][thread]
      kQueries + (kFull ? (kStepsOdd + kSpared) * kThreads * 8 : 0);
  static_assert(kStages <= 8 && kBytes <= 101376, "more than a block may have on sm_120");
};

}  // namespace overstory::mla

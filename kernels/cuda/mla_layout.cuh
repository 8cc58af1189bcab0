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
// half of the warps and 4 in the second, whose fifth has no queries.
constexpr int kStepsQK = 9;
constexpr int kStepsOdd = 5;

template <int kTiles, int kStages>
struct Layout {
  static constexpr int kPairs = kTiles / 2;  // tiles whose scores each half of the warps computes
  static constexpr bool kOdd = kTiles % 2 != 0;  // one more, for which the halves share the columns
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kWeightBytes = kTiles * kGranule * 8 * 2;

  // A tile's scores are the sum of the parts of four warps, of which the one that adds them up keeps
  // its own; eight for the odd tile.
  static constexpr int kParts = 3;
  static constexpr int kScores = kStages * kStageBytes;
  static constexpr int kScoreBytes = (2 * kPairs * kParts + (kOdd ? 8 : 0)) * kFragmentBytes;
  // Twice, for granules of even and odd number:
  static constexpr int kWeights = kScores + kScoreBytes;  // bf16 [tile][key][row]
  static constexpr int kScaling = kWeights + 2 * kWeightBytes;  // float [row]
  static constexpr int kMoved = kScaling + 2 * kRows * 4;  // uint8 [16], by tile, 8.. by odd row
  static constexpr int kBroken = kMoved + 2 * 16;          // uint8 [16], by key
  static constexpr int kVisible = kBroken + 2 * 16;        // uint64 [token of the row tile]
  static constexpr int kPiece = kVisible + (kRows / 2 + 2) / 2 * 2 * 8;  // Piece
  // Where registers do not suffice (three tiles: for two blocks of a multiprocessor), a thread
  // keeps these here, for itself.
  static constexpr bool kFull = kTiles > kWarps;
  static constexpr bool kTight = kTiles >= kWarps || kTiles == 3 || kTiles == 7;
  static constexpr int kSpared = 5;  // last steps of the last pair of tiles
  static constexpr int kMaxima = kPiece + 64;  // float [tile][row]
  static constexpr int kSums = kMaxima + (kTight ? 2 * kPairs * 32 : 0);  // float2 [tile][lane]
  static constexpr int kOddStates = kSums + (kTight ? 2 * kPairs * 256 : 0);
  static constexpr int kQueries =  // maxima by row, sums by row and key
      kOddStates + (kTight && kOdd ? 8 * 4 + 8 * 8 * 4 : 0);
  static constexpr int kBytes =                           // uint2 [step][thread]
      kQueries + (kFull ? (kStepsOdd + kSpared) * kThreads * 8 : 0);
  // Queries pass through the last stages, and those of a ninth tile through the states; `kEarly`
  // stages take keys meanwhile.
  static constexpr int kStagedRows = kFull ? 64 : kRows;
  static constexpr int kQueryStages = (kStagedRows + kGranule - 1) / kGranule;
  static constexpr int kEarly = kStages > kQueryStages ? kStages - kQueryStages : 0;
  static constexpr int kStaged = kEarly * kStageBytes;
  static_assert(kStaged + kStagedRows * kRowBytes <= kScaling, "queries over what is in use");
  static_assert(!kFull || kMaxima + (kRows - 64) * kRowBytes <= kBytes, "queries beyond the end");
  static_assert(kStages >= 3 && kBytes <= 101376, "more than a block may have on sm_120");
};

}  // namespace overstory::mla

// Shared memory of a block of the attention kernel.
#pragma once

#include "mla_args.cuh"

namespace overstory::mla {

// 16 bytes of padding move each key by four banks: the eight rows of an 8x8 matrix, read along or
// across keys, lie in 32 different banks.
constexpr int kKeyBytes = 2 * kWidth;
constexpr int kRowBytes = kKeyBytes + 16;
constexpr int kStageBytes = kGranule * kRowBytes;
constexpr int kFragmentBytes = 32 * 16;  // a 16 x 8 float tile as the lanes of a warp hold it

constexpr int kStepsQK = 9;  // of 16 columns, in which a warp multiplies scores

template <int kTiles, int kStages>
struct Layout {
  static constexpr int kPairs = kTiles / 2;  // tiles whose scores each half of the warps computes
  static constexpr bool kOdd = kTiles % 2 != 0;  // one more, for the first half
  static constexpr int kRows = 8 * kTiles;
  // Who copies keys: the second half of the warps where the first has an odd tile to multiply.
  static constexpr int kCopiers = kOdd ? kThreads / 2 : kThreads;
  static constexpr int kCopiedKeys = 32 * kGranule / kCopiers;  // of a granule, by one warp
  static constexpr int kAhead = 32 / kCopiedKeys;               // granules whose slots it holds
  static constexpr bool kSpread = kPairs >= 2 && kTiles <= kWarps;  // copies between scores
  static constexpr int kWeightBytes = kTiles * kGranule * 8 * 2;

  // A tile's scores are the sum of the parts of four warps, of which the one that adds them up keeps
  // its own. Those of the odd tile are added up by all four, two rows each.
  static constexpr int kParts = 3;
  static constexpr int kScores = kStages * kStageBytes;
  static constexpr int kScoreBytes = (2 * kPairs * kParts + (kOdd ? 4 : 0)) * kFragmentBytes;
  // Twice, for granules of even and odd number:
  static constexpr int kWeights = kScores + kScoreBytes;  // bf16 [tile][key][row]
  static constexpr int kScaling = kWeights + 2 * kWeightBytes;  // float [row]
  static constexpr int kMoved = kScaling + 2 * kRows * 4;
  // int [16], by tile, 8.. by warp of the odd tile: in which granule its maxima last moved
  static constexpr int kBroken = kMoved + 2 * 16 * 4;      // uint8 [16], by key
  static constexpr int kPiece = kBroken + 2 * 16;          // Piece
  // In the padding of the stages' rows: uint64 [token of the row tile], kRowBytes apart
  static constexpr int kVisible = kKeyBytes;
  static_assert(kRows / 2 + 1 <= kStages * kGranule, "more tokens than rows of stages");
  // Where registers do not suffice (three tiles: for two blocks of a multiprocessor), a thread
  // keeps these here, for itself.
  static constexpr bool kFull = kTiles > kWarps;
  static constexpr bool kTight = kTiles >= kWarps || kTiles == 3 || kTiles == 7;
  static constexpr int kSpared = kFull ? 6 : 0;  // last steps of the last pair of tiles,
  static constexpr bool kSparedHalf = kFull;     // and half of the step before them
  static constexpr bool kOddSpared = kFull || kTiles == 3;
  static constexpr int kArrivals = kPiece + 64;            // mbarrier of the queries
  static constexpr int kMaxima = kArrivals + 16;  // float [tile][row]
  static constexpr int kSums = kMaxima + (kTight ? 2 * kPairs * 32 : 0);  // float2 [tile][lane]
  static constexpr int kOddStates = kSums + (kTight ? 2 * kPairs * 256 : 0);
  static constexpr int kOddQueries =  // maxima by row, sums by row and key
      kOddStates + (kTight && kOdd ? 8 * 4 + 8 * 16 * 4 : 0);
  static constexpr int kQueries =  // bf16 [row of the odd tile][kRowBytes / 2]
      kOddQueries + (kOddSpared ? 8 * kRowBytes : 0);
  static constexpr int kHalfQueries = kQueries + kSpared * kThreads * 8;  // after uint2 [step][thread]
  static constexpr int kBytes = kHalfQueries + (kSparedHalf ? kThreads * 4 : 0);  // uint32 [thread]
  // Queries pass through the last stages, unless they stay in shared memory; `kEarly` stages take
  // keys meanwhile.
  static constexpr int kStagedRows = kOddSpared ? kRows - 8 : kRows;
  static constexpr int kQueryStages = (kStagedRows + kGranule - 1) / kGranule;
  static constexpr int kEarly = kStages > kQueryStages ? kStages - kQueryStages : 0;
  // Stages with keys when the first granule is multiplied; the others are filled one by one.
  static constexpr int kFilled = kEarly > kStages - 2 ? kEarly : kStages - 2;
  static constexpr int kStaged = kEarly * kStageBytes;
  static_assert(kStaged + kStagedRows * kRowBytes <= kScaling, "queries over what is in use");
  static_assert(kStages >= 3 && kBytes <= 101376, "more than a block may have on sm_120");
};

}  // namespace overstory::mla

// Starting the attention kernel, one of nine widths over one of two kinds of cache. Each kind is
// compiled in a source of its own, side by side.
#pragma once

#include "launch.cuh"
#include "mla_attention.cuh"

namespace overstory::mla {

#ifdef OVERSTORY_SIM
constexpr int kInvalid = sim::kInvalidValue;
#else
constexpr int kInvalid = cudaErrorInvalidValue;
#endif

constexpr int stages_for(int tiles) { return tiles <= 2 ? 5 : tiles <= 8 ? 4 : 3; }

// Starts the kernel of `tiles` tiles, 1..kMaxTiles (mla_attend_fp8.cuh).
int attend_fp8(const Args& args, int tiles, void* stream);
// Of its blocks, how many a multiprocessor of the current device runs at a time.
int count_blocks_fp8(int tiles);

namespace {

template <int kTiles, bool kFp8>
int launch_attention(const Args& args, void* stream) {
  constexpr int kStages = stages_for(kTiles);
  constexpr int kBytes = Layout<kTiles, kStages>::kBytes;
  if (int error = raise_shared_limit<attention<kTiles, kStages, kFp8>>(kBytes)) return error;
  return launch_dependent(attention<kTiles, kStages, kFp8>, dim3(args.blocks), kThreads, kBytes,
                          stream, args);
}

template <int kTiles, bool kFp8>
int blocks_per_sm() {
#ifdef OVERSTORY_SIM
  return 1;
#else
  constexpr int kStages = stages_for(kTiles);
  constexpr int kBytes = Layout<kTiles, kStages>::kBytes;
  if (raise_shared_limit<attention<kTiles, kStages, kFp8>>(kBytes)) return 0;
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, attention<kTiles, kStages, kFp8>,
                                                kThreads, kBytes);
  return blocks;
#endif
}

// Calls f.template run<tiles>() for a number known at run time; C++17 has no such lambdas.
template <int kTiles, typename F>
int with_tiles(int tiles, const F& f) {
  if constexpr (kTiles == 0) {
    return kInvalid;
  } else {
    return tiles == kTiles ? f.template run<kTiles>() : with_tiles<kTiles - 1>(tiles, f);
  }
}

template <bool kFp8>
struct Attend {
  const Args& args;
  void* stream;
  template <int kTiles>
  int run() const {
    return launch_attention<kTiles, kFp8>(args, stream);
  }
};

template <bool kFp8>
struct CountBlocks {
  template <int kTiles>
  int run() const {
    return blocks_per_sm<kTiles, kFp8>();
  }
};

}  // namespace
}  // namespace overstory::mla

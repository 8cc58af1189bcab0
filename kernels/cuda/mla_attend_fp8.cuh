// What mla_attention.cu calls for a cache in e4m3.
#pragma once

#include "mla_launch.cuh"

namespace overstory::mla {

int attend_fp8(const Args& args, int tiles, void* stream) {
  return with_tiles<kMaxTiles>(tiles, Attend<true>{args, stream});
}

int count_blocks_fp8(int tiles) { return with_tiles<kMaxTiles>(tiles, CountBlocks<true>{}); }

}  // namespace overstory::mla

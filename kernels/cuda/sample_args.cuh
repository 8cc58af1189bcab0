// What the kernels of sample_nodes share: arguments, and writing a result.
#pragma once

#include "sample_scan.cuh"

namespace overstory {

struct GreedyBest {
  float logit;
  int column;  // first of the 16-byte load in which it stands
};

template <typename T>
struct SampleArgs {
  const T* logits;  // [rows, row_stride]
  std::int64_t row_stride;
  int columns;
  int splits;
  bool aligned;
  bool filters;  // rows may have filters
  SampleParameters parameters;
  float* groups;         // [rows, segments, kSegmentGroups], as in SegmentScan; only with splits
  float* sums;           // [rows, segments]
  GreedyBest* greedy;    // [rows, splits]
  int* arrived;          // [rows], 0 before and after
  std::int64_t* tokens;  // [rows]
  int* status;           // [rows]
};

template <typename T>
__device__ void write_token(const SampleArgs<T>& args, int row, int token, int status) {
  args.tokens[row] = token;
  args.status[row] = status;
}

}  // namespace overstory

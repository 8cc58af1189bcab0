// What the kernels of sample_nodes share: arguments, and writing a result.
#pragma once

#include "row_scan.cuh"
#include "sample_rules.cuh"

namespace overstory {

struct GreedyBest {
  float logit;
  int column;  // first of the 16-byte load in which it stands
};

template <typename T>
struct SampleArgs : RowArgs<T> {
  bool filters;  // rows may have filters
  SampleParameters parameters;
  GreedyBest* greedy;    // [rows, splits]
  std::int64_t* tokens;  // [rows]
  int* status;           // [rows]
};

template <typename T>
__device__ void write_token(const SampleArgs<T>& args, int row, int token, int status) {
  args.tokens[row] = token;
  args.status[row] = status;
}

}  // namespace overstory

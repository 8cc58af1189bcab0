// Launch layer of sample_nodes.cuh.
#include "launch.cuh"
#include "sample_nodes.cuh"

namespace overstory {
namespace {

constexpr int kInvalid = 1;  // cudaErrorInvalidValue

std::int64_t greedy_bytes(int rows, int splits) {
  return splits <= 1 ? 0 : rows * std::int64_t{sizeof(GreedyBest)} * splits;
}

template <typename T>
int launch_sample(SampleArgs<T> args, int rows, void* workspace, void* stream) {
  prepare_rows(args, rows, workspace);
  args.greedy = reinterpret_cast<GreedyBest*>(static_cast<char*>(workspace) +
                                              row_scan_bytes(rows, args.columns, args.splits));
  const auto blocks = static_cast<unsigned>(rows) * static_cast<unsigned>(args.splits);
  const std::size_t shared = args.filters ? sizeof(SampleShared) : offsetof(SampleShared, filter);
  return launch_dependent(sample_nodes_kernel<T>, dim3(blocks), kRowThreads, shared, stream,
                          args);
}

}  // namespace
}  // namespace overstory

/// A good `splits` for overstory_sample_nodes; 1 .. 32.
extern "C" int overstory_sample_nodes_splits(int rows, int columns, int multiprocessors) {
  using namespace overstory;
  return choose_splits(rows, segments_of(columns), multiprocessors, kRowBlocks<Bf16>, kRowCost,
                       kRowSplits);
}

/// Most columns that a row may have.
extern "C" int overstory_sample_nodes_max_columns() {
  return overstory::kMaxSegments * overstory::kSegment;
}

/// Bytes of `workspace`, which need no first value; 0 where splits is 1.
extern "C" int64_t overstory_sample_nodes_workspace(int rows, int columns, int splits) {
  using namespace overstory;
  return row_scan_bytes(rows, columns, splits) + greedy_bytes(rows, splits);
}

/// The token after each row: `sample_nodes` of the reference, in one kernel.
///   logits       [rows, row_stride], of type logit_type: 0 bfloat16, 1 float16, 2 float32; the
///                first `columns` of a row are read. 16-byte aligned rows are read fastest.
///   temperature, top_p, min_p [rows] float32, top_k [rows] int32; below 1e-6 or top_k = 1 is
///                greedy. Null: temperature 0, no filter.
///   seeds, positions [rows] int64; null only where temperature is
///   filters      whether a row may have 1 < top_k < columns, top_p < 1 or min_p > 0; without it
///                such a row is refused. Unfiltered rows get the same token either way.
///   splits       blocks per row; the tokens do not depend on it
///   workspace    overstory_sample_nodes_workspace bytes, 16-byte aligned
///   arrived      [rows] int32, zero before the first launch; each launch leaves it so. Launches
///                that share it or the workspace must not overlap in time.
///   tokens       [rows] int64; -1 where status is not 0
///   status       [rows] int32: 0; 1 where the highest logit is NaN or infinite (every token
///                forbidden); 2 where a parameter is NaN, min_p is above 1 or the highest logit
///                divided by the temperature overflows; 4 where the row has a filter but not the
///                launch
extern "C" int overstory_sample_nodes(const void* logits, int logit_type, int rows, int columns,
                                      int64_t row_stride, const float* temperature,
                                      const int* top_k, const float* top_p, const float* min_p,
                                      const int64_t* seeds, const int64_t* positions, bool filters,
                                      int splits, void* workspace, int* arrived, int64_t* tokens,
                                      int* status, void* stream) {
  using namespace overstory;
  if (rows < 0 || columns < 1 || columns > kMaxSegments * kSegment || splits < 1 ||
      splits > kRowSplits || static_cast<int64_t>(rows) * splits > INT32_MAX ||
      (splits > 1 && (workspace == nullptr || arrived == nullptr)) ||
      (temperature != nullptr && (seeds == nullptr || positions == nullptr))) {
    return kInvalid;
  }
  const auto run = [&](auto type) {
    SampleArgs<decltype(type)> args;
    args.logits = static_cast<const decltype(type)*>(logits);
    args.row_stride = row_stride;
    args.columns = columns;
    args.splits = splits;
    args.filters = filters;
    args.parameters = {temperature, top_k, top_p, min_p, seeds, positions};
    args.arrived = arrived;
    args.tokens = tokens;
    args.status = status;
    return launch_sample(args, rows, workspace, stream);
  };
  return with_logit_type(logit_type, run, kInvalid);
}

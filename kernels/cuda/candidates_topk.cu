// Launch layer of candidates_topk.cuh.
#include "candidates_topk.cuh"

#include "launch.cuh"

namespace overstory {
namespace {

constexpr int kInvalid = 1;  // cudaErrorInvalidValue

template <typename T>
int launch_candidates(CandidatesArgs<T> args, int rows, void* workspace, void* stream) {
  prepare_rows(args, rows, workspace);
  const auto blocks = static_cast<unsigned>(rows) * static_cast<unsigned>(args.splits);
  return launch_dependent(candidates_topk_kernel<T>, dim3(blocks), kRowThreads,
                          sizeof(CandidatesShared), stream, args);
}

}  // namespace
}  // namespace overstory

/// A good `splits` for overstory_candidates_topk; 1 .. 32.
extern "C" int overstory_candidates_topk_splits(int rows, int columns, int multiprocessors) {
  using namespace overstory;
  return choose_splits(rows, segments_of(columns), multiprocessors, kRowBlocks<Bf16>, kRowCost,
                       kRowSplits);
}

/// Most columns that a row may have.
extern "C" int overstory_candidates_topk_max_columns() {
  return overstory::kMaxSegments * overstory::kSegment;
}

/// Bytes of `workspace`, which need no first value; 0 where splits is 1.
extern "C" int64_t overstory_candidates_topk_workspace(int rows, int columns, int splits) {
  return overstory::row_scan_bytes(rows, columns, splits);
}

/// The k best of each row with their float32 logits, the lowest id first among equals, and the
/// row's logsumexp; what is missing in a row of fewer than k columns is -inf with id -1.
///   logits       [rows, row_stride], of type logit_type: 0 bfloat16, 1 float16, 2 float32; the
///                first `columns` of a row are read. 16-byte aligned rows are read fastest.
///   k            1 .. 16
///   splits       blocks per row; the results do not depend on it
///   workspace    overstory_candidates_topk_workspace bytes, 16-byte aligned
///   arrived      [rows] int32, zero before the first launch; each launch leaves it so. Launches
///                that share it or the workspace must not overlap in time.
///   best_logits, token_ids [rows, k] float32, int64; logsumexp [rows] float32
///   status       [rows] int32: 0, or 1 where the row holds NaN or +inf. Its logsumexp is NaN then,
///                and it has no candidates.
extern "C" int overstory_candidates_topk(const void* logits, int logit_type, int rows, int columns,
                                         int64_t row_stride, int k, int64_t first_token_id,
                                         int splits, void* workspace, int* arrived,
                                         float* best_logits, int64_t* token_ids, float* logsumexp,
                                         int* status, void* stream) {
  using namespace overstory;
  const int64_t blocks = static_cast<int64_t>(rows) * splits;
  if (k < 1 || k > kMaxCandidates || rows < 0 || columns < 0 || splits < 1 ||
      splits > kRowSplits || blocks > INT32_MAX || columns > kMaxSegments * kSegment ||
      (splits > 1 && (workspace == nullptr || arrived == nullptr))) {
    return kInvalid;
  }
  const auto run = [&](auto type) {
    CandidatesArgs<decltype(type)> args;
    args.logits = static_cast<const decltype(type)*>(logits);
    args.row_stride = row_stride;
    args.columns = columns;
    args.k = k;
    args.splits = splits;
    args.first_token_id = first_token_id;
    args.arrived = arrived;
    args.best_logits = best_logits;
    args.token_ids = token_ids;
    args.logsumexp = logsumexp;
    args.status = status;
    return launch_candidates(args, rows, workspace, stream);
  };
  return with_logit_type(logit_type, run, kInvalid);
}

/// Candidates of `shards` vocabulary shards to the k best of the vocabulary with log-probabilities.
///   logits, token_ids   [shards, rows, width] float32, int64, as overstory_candidates_topk leaves
///                       them; ids below 2^31 - 1; width 1 .. 16
///   logsumexp           [shards, rows] float32
///   logprobs, best      [rows, k] float32 (never above 0), int64; -inf and -1 past the last
///   status              [rows] int32: 0, or 2 where nothing is allowed or a logsumexp is NaN or
///                       +inf; that row has no candidates
extern "C" int overstory_merge_candidates(const float* logits, const int64_t* token_ids,
                                          const float* logsumexp, int shards, int rows, int width,
                                          int k, float* logprobs, int64_t* best, int* status,
                                          void* stream) {
  using namespace overstory;
  if (shards < 1 || rows < 0 || width < 1 || width > kMaxCandidates || k < 1 ||
      k > kMaxCandidates) {
    return kInvalid;
  }
  const MergeArgs args{logits, token_ids, logsumexp, shards, rows, width, k, logprobs, best, status};
  const auto blocks = static_cast<unsigned>((rows + kMergeWarps - 1) / kMergeWarps);
  return launch_dependent(merge_candidates_kernel, dim3(blocks), 32 * kMergeWarps, 0, stream,
                          args);
}

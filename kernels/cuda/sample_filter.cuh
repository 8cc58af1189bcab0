// The draw of a row with top-k, top-p or min-p, by the last block of the row.
//
// All three filters keep a prefix of the tokens by descending logit, the lower id first among
// equals. The highest logits of the groups of 256 columns are tokens too: where the prefix of those
// alone ends, nothing below is kept. Only groups that reach that bound are read again (from the L2
// cache, where the scan has just left them), and nearly always few tokens do: each counts what
// comes before it, which says whether it is kept, and then the weights of the kept tokens of lower
// id, which says whether it is drawn. Of more tokens than the block has threads, histograms find the
// end of the prefix (sample_prefix.cuh), and sums per segment the token; the tokens are listed in
// shared memory, or, where there are too many, read from the cache each time.
#pragma once

#include "sample_prefix.cuh"

namespace overstory {

constexpr int kFewTokens = kSampleThreads;
constexpr int kListedTokens = 1024;

struct Token {
  std::uint32_t key;  // ordered(logit)
  int column;
};

struct Candidate {
  std::uint64_t rank;  // larger: earlier in the prefix; the lower half is ~column
  std::uint64_t mass;
};

struct FilterShared {
  BlockScratch scratch;
  std::uint64_t rest;
  int listed;  // groups
  int found;   // tokens
  std::uint16_t list[kMaxGroups];
  union {  // one after the other
    PrefixShared prefix;
    Candidate candidates[kFewTokens];
    std::uint64_t segments[kMaxSegments];
  };
};

/// What the block works on.
template <typename T>
struct FilterRow {
  const T* logits;
  int columns;
  bool aligned;
  float* groups;          // shared, kMaxGroups: highest logits; later the tokens
  float highest, lowest;  // of the groups that hold more than -inf
  float top;              // scaled(highest)
  double total;           // of weights

  /// Room for kListedTokens where the groups' logits were, which nobody needs once groups are
  /// listed.
  __device__ Token* tokens() const { return reinterpret_cast<Token*>(groups); }
};
static_assert(kListedTokens * sizeof(Token) <= kMaxGroups * sizeof(float), "they share memory");

/// A logit below which no token is kept, and not below the lowest number: -inf is never looked at.
///
/// top-p: all tokens of weight below (1 - top_p) total / V together miss 1 - top_p, so the sum
/// before any of them is above top_p. Bounds from logarithms are lowered by more than these can be
/// wrong.
template <typename T>
__device__ float lowest_by_weight(const FilterRow<T>& row, const SampleRules& rules) {
  float least = rules.min_p;
  if (rules.top_p < 1.0f) {
    const float share = static_cast<float>(row.total) / static_cast<float>(row.columns);
    least = fmaxf(least, (1.0f - rules.top_p) * share);
  }
  if (!(least > 0.0f)) return -FLT_MAX;
  const float distance = ptx::log2_fast(fminf(least, 1.0f)) * kLn2 * rules.temperature;
  const float slack = 1e-3f * rules.temperature + 1e-5f * (fabsf(row.highest) - distance);
  return fmaxf(-FLT_MAX, fminf(row.highest + distance - slack, row.highest));
}

/// The same by the prefix of the groups' highest logits, and not below `floor`.
template <typename T>
__device__ float lowest_by_groups(const FilterRow<T>& row, const SampleRules& rules, float floor,
                                  const PrefixBound& most, FilterShared& shared) {
  constexpr std::uint32_t kEnough = 16;
  const float low = fmaxf(floor, row.lowest);
  const auto each = [&](auto add) {
    for (int i = ptx::thread(); i < groups_of(row.columns); i += kSampleThreads) {
      const float logit = row.groups[i];
      if (logit >= low) add(logit, [&] { return fixed_weight(rules.weight(logit, row.top)); });
    }
  };
  const PrefixEnd end =
      find_prefix(BinRule::over(ordered(low), ordered(row.highest), kStep<T>), most, kEnough,
                  kStep<T>, each, shared.prefix, shared.scratch);
  return end.bounded ? fmaxf(floor, from_ordered(end.high - end.range)) : floor;
}

/// Lists the groups that reach `floor`. Whole block; in any order.
template <typename T>
__device__ GroupReader<T> list_groups(const FilterRow<T>& row, float floor, FilterShared& shared) {
  if (ptx::thread() == 0) shared.listed = 0;
  ptx::sync_block();
  for (int first = 0; first < groups_of(row.columns); first += kSampleThreads) {
    const int group = first + ptx::thread();
    const bool reaches = group < groups_of(row.columns) && row.groups[group] >= floor;
    const std::uint32_t those = ptx::ballot(reaches);
    if (those == 0) continue;
    int at = 0;
    if (ptx::lane() == 0) at = ptx::atomic_add(&shared.listed, ptx::popcount(those));
    at = ptx::shfl(at, 0) + ptx::popcount(those & ((1u << ptx::lane()) - 1));
    if (reaches) shared.list[at] = static_cast<std::uint16_t>(group);
  }
  ptx::sync_block();
  return {row.logits, row.columns, row.aligned, shared.list, shared.listed};
}

/// Lists the tokens of at least `floor` and min_p, in any order; how many there are, which may be
/// more than are listed, and more than are kept.
template <typename T>
__device__ int list_tokens(const FilterRow<T>& row, const GroupReader<T>& reader,
                           const SampleRules& rules, float floor, FilterShared& shared) {
  if (ptx::thread() == 0) shared.found = 0;
  ptx::sync_block();
  Token* tokens = row.tokens();
  reader.each(
      floor,
      [&](float logit, int column) {
        if (!(rules.weight(logit, row.top) >= rules.min_p)) return;
        const int at = ptx::atomic_add(&shared.found, 1);
        if (at < kListedTokens) tokens[at] = {ordered(logit), column};
      },
      [](int) {});
  ptx::sync_block();
  return shared.found;
}

/// The draw from at most kFewTokens candidates: every one looks at every other, shared by as many
/// neighbouring threads as there are for one.
template <typename T>
__device__ void draw_of_few(const SampleArgs<T>& args, int number, const FilterRow<T>& row,
                            const SampleRules& rules, int count, const PrefixBound& most,
                            FilterShared& shared) {
  if (ptx::thread() < count) {
    const Token token = row.tokens()[ptx::thread()];
    const std::uint64_t high = token.key;
    shared.candidates[ptx::thread()] = {
        high << 32 | ~static_cast<std::uint32_t>(token.column),
        fixed_weight(rules.weight(from_ordered(token.key), row.top))};
  }
  ptx::sync_block();
  int parts = 1;
  while (parts < 16 && parts * 2 * count <= kSampleThreads) parts *= 2;
  const int index = ptx::thread() / parts, part = ptx::thread() % parts;
  const bool exists = index < count;
  Candidate mine{0, 0};
  if (exists) mine = shared.candidates[index];
  Tally above{0, 0};
  if (exists) {
    for (int i = part; i < count; i += parts) {
      const Candidate other = shared.candidates[i];
      if (other.rank > mine.rank) {
        above.mass += other.mass;
        ++above.count;
      }
    }
  }
  for (int step = 1; step < parts; step *= 2) {
    above.mass += ptx::shfl_xor(above.mass, step);
    above.count += ptx::shfl_xor(above.count, step);
  }
  if (above.count >= most.count || above.mass > most.mass) mine.mass = 0;
  ptx::sync_block();
  if (exists && part == 0) shared.candidates[index].mass = mine.mass;
  ptx::sync_block();

  const std::uint32_t order = static_cast<std::uint32_t>(mine.rank);  // falls as columns rise
  std::uint64_t before = 0, all = 0;
  if (exists) {
    for (int i = part; i < count; i += parts) {
      const Candidate other = shared.candidates[i];
      all += other.mass;
      if (static_cast<std::uint32_t>(other.rank) > order) before += other.mass;
    }
  }
  for (int step = 1; step < parts; step *= 2) {
    before += ptx::shfl_xor(before, step);
    all += ptx::shfl_xor(all, step);
  }
  const std::uint64_t goal = share_of(noise_of(args.parameters, number), all);
  if (exists && part == 0 && before <= goal && goal - before < mine.mass) {
    write_token(args, number, static_cast<int>(~order), 0);
  }
}

/// Many tokens, in shared memory.
template <typename T>
struct TokenList {
  const Token* tokens;
  int count;

  __device__ BinRule first_bins(const FilterRow<T>& row, const SampleRules& rules,
                                float floor) const {
    return BinRule::over(ordered(floor), ordered(row.highest), kStep<T>);
  }

  /// visit(logit, column) for what is not below `floor`.
  template <typename Visit>
  __device__ void each(float floor, Visit visit) const {
    for (int i = ptx::thread(); i < count; i += kSampleThreads) {
      const Token token = tokens[i];
      const float logit = from_ordered(token.key);
      if (logit >= floor) visit(logit, token.column);
    }
  }

  /// Adds weight(logit, column) to the sums of their segments.
  template <typename Weight>
  __device__ void add_up(float floor, Weight weight, std::uint64_t* segments) const {
    each(floor, [&](float logit, int column) {
      ptx::atomic_add(&segments[column / kSegment], std::uint64_t{weight(logit, column)});
    });
  }
};

/// More tokens than can be listed, read again each time; the interface of TokenList.
template <typename T>
struct TokenStream {
  const GroupReader<T>& reader;

  /// Equal widths, so that few of the many atomics meet; as far as it seems worth it.
  __device__ BinRule first_bins(const FilterRow<T>& row, const SampleRules& rules,
                                float floor) const {
    const float span = fmaxf(4.0f * (row.highest - row.lowest), 16.0f * rules.temperature);
    return BinRule::logits(floor, row.highest, fmaxf(floor, row.highest - span));
  }

  template <typename Visit>
  __device__ void each(float floor, Visit visit) const {
    reader.each(floor, visit, [](int) {});
  }

  template <typename Weight>
  __device__ void add_up(float floor, Weight weight, std::uint64_t* segments) const {
    std::uint64_t sum = 0;
    reader.each(
        floor, [&](float logit, int column) { sum += weight(logit, column); },
        [&](int group) {
          sum = warp_sum(sum);
          if (ptx::lane() == 0) ptx::atomic_add(&segments[group / kSegmentGroups], sum);
          sum = 0;
        });
  }
};

/// First column at which the sum of weights of what is not below `floor` passes
/// target(sum of all). Whole block, the result in every thread.
template <typename T, typename Tokens, typename Weight, typename Target>
__device__ int locate_in_row(const FilterRow<T>& row, const Tokens& tokens, FilterShared& shared,
                             float floor, Weight weight, Target target) {
  constexpr int kPerThread = kMaxSegments / kSampleThreads;
  for (int i = ptx::thread(); i < kMaxSegments; i += kSampleThreads) shared.segments[i] = 0;
  ptx::sync_block();
  tokens.add_up(floor, weight, shared.segments);
  ptx::sync_block();
  std::uint64_t mine[kPerThread];
  Tally through{0, 0}, total;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    mine[i] = shared.segments[ptx::thread() * kPerThread + i];
    through.mass += mine[i];
  }
  std::uint64_t before = scan_block(through, shared.scratch.warps, total).mass;
  const std::uint64_t goal = target(total.mass);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (before <= goal && goal - before < mine[i]) {
      shared.found = ptx::thread() * kPerThread + i;
      shared.rest = goal - before;
    }
    before += mine[i];
  }
  ptx::sync_block();
  const std::uint64_t rest = shared.rest;
  const int segment = shared.found;
  ptx::sync_block();
  if (ptx::warp() == 0) {
    const int column = locate_in_segment(
        row.logits, segment * kSegment, row.columns, row.aligned,
        [&](float logit, int at) { return logit >= floor ? weight(logit, at) : 0; },
        [&](std::uint64_t) { return rest; });
    if (ptx::lane() == 0) shared.found = column;
  }
  ptx::sync_block();
  return shared.found;
}

/// How many of the ties at the end of the prefix are kept; at least 1.
__device__ inline std::uint64_t kept_ties(const PrefixBound& most, std::uint64_t weight,
                                          Tally above, Tally inside) {
  std::uint64_t kept = inside.count;
  const std::uint64_t places = most.count - above.count;
  kept = places < kept ? places : kept;
  if (most.mass != UINT64_MAX && weight != 0) {
    const std::uint64_t covered = (most.mass - above.mass) / weight + 1;
    kept = covered < kept ? covered : kept;
  }
  return kept;
}

/// The draw where more than kFewTokens reach the bound.
template <typename T, typename Tokens>
__device__ void draw_of_many(const SampleArgs<T>& args, int number, const FilterRow<T>& row,
                             const Tokens& tokens, const SampleRules& rules, float floor,
                             const PrefixBound& most, FilterShared& shared) {
  std::uint32_t last = ordered(floor);
  int last_tie = INT32_MAX;
  if (rules.top_k != 0 || rules.top_p < 1.0f) {
    const auto each = [&](auto add) {
      tokens.each(floor, [&](float logit, int) {
        add(logit, [&] { return fixed_weight(rules.weight(logit, row.top)); });
      });
    };
    const PrefixEnd end = find_prefix(tokens.first_bins(row, rules, floor), most, 1, kStep<T>,
                                      each, shared.prefix, shared.scratch);
    // One value, which is at or above the bin's lowest integer, or one logit.
    last = shared.scratch.inside.count == 1 ? end.high - end.range : logit_up_to<T>(end.high);
    floor = from_ordered(last);
    const std::uint64_t weight = fixed_weight(rules.weight(floor, row.top));
    const Tally inside = shared.scratch.inside;
    const std::uint64_t ties = kept_ties(most, weight, shared.scratch.above, inside);
    if (ties < inside.count) {
      last_tie = locate_in_row(
          row, tokens, shared, floor,
          [&](float logit, int) { return std::uint64_t{ordered(logit) == last}; },
          [&](std::uint64_t) { return ties - 1; });
    }
  }
  const std::uint64_t noise = noise_of(args.parameters, number);
  const int token = locate_in_row(
      row, tokens, shared, floor,
      [&](float logit, int column) -> std::uint64_t {
        const float weight = rules.weight(logit, row.top);
        const bool kept = weight >= rules.min_p && (ordered(logit) > last || column <= last_tie);
        return kept ? fixed_weight(weight) : 0;
      },
      [&](std::uint64_t all) { return share_of(noise, all); });
  if (ptx::thread() == 0) write_token(args, number, token, 0);
}

/// Whole block.
template <typename T>
__device__ void draw_filtered(const SampleArgs<T>& args, int number, const FilterRow<T>& row,
                              const SampleRules& rules, FilterShared& shared) {
  PrefixBound most{UINT32_MAX, UINT64_MAX};
  if (rules.top_k != 0) most.count = static_cast<std::uint32_t>(rules.top_k);
  if (rules.top_p < 1.0f) {
    most.mass = static_cast<std::uint64_t>(rules.top_p * row.total *
                                           static_cast<double>(kWeightOne));
  }
  float floor = lowest_by_weight(row, rules);
  if (rules.top_k != 0 || rules.top_p < 1.0f) {
    floor = lowest_by_groups(row, rules, floor, most, shared);
  }
  const GroupReader<T> reader = list_groups(row, floor, shared);
  const int count = list_tokens(row, reader, rules, floor, shared);
  if (count <= kFewTokens) {
    draw_of_few(args, number, row, rules, count, most, shared);
  } else if (count <= kListedTokens) {
    const TokenList<T> tokens{row.tokens(), count};
    draw_of_many(args, number, row, tokens, rules, floor, most, shared);
  } else {
    const TokenStream<T> tokens{reader};
    draw_of_many(args, number, row, tokens, rules, floor, most, shared);
  }
}

}  // namespace overstory

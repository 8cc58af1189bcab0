// The draw of a row with top-k, top-p or min-p, by the last block of the row.
//
// All three filters keep a prefix of the tokens by descending logit, the lower id first among
// equals. The highest logits of the groups of 256 columns are tokens too: where the prefix of those
// alone ends, nothing below is kept. Only groups that reach that bound are read again (from the L2
// cache, where the scan has just left them), and nearly always few tokens do: each counts what
// comes before it, which says whether it is kept, and then the weights of the kept tokens of lower
// id, which says whether it is drawn. Of more tokens than the block has threads, histograms find the
// end of the prefix (row_prefix.cuh), and sums per segment the token; the tokens are listed in
// shared memory, or, where there are too many, read from the cache each time.
#pragma once

#include "row_prefix.cuh"
#include "sample_args.cuh"

namespace overstory {

constexpr int kFewTokens = kRowThreads;

struct Candidate {
  std::uint64_t rank;  // larger: earlier in the prefix; the lower half is ~column
  std::uint64_t mass;
};

struct FilterShared {
  BlockScratch scratch;
  std::uint64_t noise, rest;
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
  RowBounds bounds;
  float top;     // scaled(highest)
  double total;  // of weights
  Token* tokens;
};

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
  const float slack = 1e-3f * rules.temperature + 1e-5f * (fabsf(row.bounds.highest) - distance);
  return fmaxf(-FLT_MAX, fminf(row.bounds.highest + distance - slack, row.bounds.highest));
}

/// The draw from at most kFewTokens candidates: every one looks at every other, shared by as many
/// neighbouring threads as there are for one.
template <typename T>
__device__ void draw_of_few(const SampleArgs<T>& args, int number, const FilterRow<T>& row,
                            const SampleRules& rules, int count, const PrefixBound& most,
                            FilterShared& shared) {
  if (ptx::thread() < count) {
    const Token token = row.tokens[ptx::thread()];
    const std::uint64_t high = token.key;
    shared.candidates[ptx::thread()] = {
        high << 32 | ~static_cast<std::uint32_t>(token.column),
        fixed_weight(rules.weight(from_ordered(token.key), row.top))};
  }
  ptx::sync_block();
  int parts = 1;
  while (parts < 16 && parts * 2 * count <= kRowThreads) parts *= 2;
  const int index = ptx::thread() / parts, part = ptx::thread() % parts;
  const bool exists = index < count;
  Candidate mine{0, 0};
  if (exists) mine = shared.candidates[index];
  Tally above{0, 0};
  if (exists) {
#pragma unroll 2
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
#pragma unroll 2
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
  const std::uint64_t goal = share_of(shared.noise, all);
  if (exists && part == 0 && before <= goal && goal - before < mine.mass) {
    write_token(args, number, static_cast<int>(~order), 0);
  }
}

/// Many tokens: in shared memory, or more than can be listed and read again each time.
template <typename T>
struct ManyTokens {
  const Token* list;
  int count;
  const GroupReader<T>& reader;

  __device__ bool listed() const { return count <= kListedTokens; }

  /// Equal widths for many, so that few of their atomics meet, as far as it seems worth it.
  __device__ BinRule<kManyBins> first_bins(const FilterRow<T>& row, const SampleRules& rules,
                                           float floor) const {
    if (listed()) return BinRule<kManyBins>::over(ordered(floor), ordered(row.bounds.highest),
                                                  kStep<T>);
    const float span =
        fmaxf(4.0f * (row.bounds.highest - row.bounds.lowest), 16.0f * rules.temperature);
    return BinRule<kManyBins>::logits(floor, row.bounds.highest,
                                      fmaxf(floor, row.bounds.highest - span));
  }

  /// visit(logit, column) for what is not below `floor`.
  template <typename Visit>
  __device__ void each(float floor, Visit visit) const {
    if (listed()) {
      visit_list(floor, visit);
    } else {
      reader.template each<GroupReader<T>::kMany>(floor, visit, [](int) {});
    }
  }

  /// Adds weight(logit, column) to the sums of their segments.
  template <typename Weight>
  __device__ void add_up(float floor, Weight weight, std::uint64_t* segments) const {
    if (listed()) {
      visit_list(floor, [&](float logit, int column) {
        ptx::atomic_add(&segments[column / kSegment], weight(logit, column));
      });
      return;
    }
    std::uint64_t sum = 0;
    reader.template each<1>(
        floor, [&](float logit, int column) { sum += weight(logit, column); },
        [&](int group) {
          sum = warp_sum(sum);
          if (ptx::lane() == 0) ptx::atomic_add(&segments[group / kSegmentGroups], sum);
          sum = 0;
        });
  }

 private:
  template <typename Visit>
  __device__ void visit_list(float floor, Visit visit) const {
#pragma unroll 1
    for (int i = ptx::thread(); i < count; i += kRowThreads) {
      const Token token = list[i];
      const float logit = from_ordered(token.key);
      if (logit >= floor) visit(logit, token.column);
    }
  }
};

/// What a token weighs in a search: 1 for each tie at the end of the prefix, or its weight if it is
/// kept.
template <typename T>
struct SearchWeight {
  const FilterRow<T>& row;
  const SampleRules& rules;
  std::uint32_t last;  // key of the prefix' last logit
  int last_tie;        // its last column that is kept
  bool ties;

  __device__ std::uint64_t operator()(float logit, int column) const {
    const std::uint32_t key = ordered(logit);
    if (ties) return key == last ? 1 : 0;
    const float weight = rules.weight(logit, row.top);
    const bool kept =
        weight >= rules.min_p && (key > last || (key == last && column <= last_tie));
    return kept ? fixed_weight(weight) : 0;
  }
};

/// First column at which the sum of weights of what is not below `floor` passes what is looked for:
/// `places` ties, or the noise's share of all. Whole block, the result in every thread.
template <typename T>
__device__ int locate_in_row(const FilterRow<T>& row, const ManyTokens<T>& tokens,
                             FilterShared& shared, float floor, const SearchWeight<T>& weight,
                             std::uint64_t places) {
  constexpr int kPerThread = kMaxSegments / kRowThreads;
  for (int i = ptx::thread(); i < kMaxSegments; i += kRowThreads) shared.segments[i] = 0;
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
  const std::uint64_t goal = weight.ties ? places - 1 : share_of(shared.noise, total.mass);
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
template <typename T>
__device__ void draw_of_many(const SampleArgs<T>& args, int number, const FilterRow<T>& row,
                             const ManyTokens<T>& tokens, const SampleRules& rules, float floor,
                             const PrefixBound& most, FilterShared& shared) {
  SearchWeight<T> weight{row, rules, ordered(floor), INT32_MAX, false};
  std::uint64_t places = 0;
  if (rules.top_k != 0 || rules.top_p < 1.0f) {
    const auto mass = [&](float logit) { return fixed_weight(rules.weight(logit, row.top)); };
    PrefixEnd end;
    bool found = false;
    if constexpr (kStep<T> != 0) {
      if (!tokens.listed()) {
        found = find_by_logits<T>(
            floor, row.bounds.highest, most, mass,
            [&](auto add) { tokens.each(floor, [&](float logit, int) { add(logit); }); },
            shared.prefix, shared.scratch, end);
      }
    }
    if (!found) {
      const auto each = [&](auto add) {
        tokens.each(floor, [&](float logit, int) { add(logit, [&] { return mass(logit); }); });
      };
      end = find_prefix(tokens.first_bins(row, rules, floor), most, 1, kStep<T>, each,
                        shared.prefix, shared.scratch);
    }
    // One value, which is at or above the bin's lowest integer, or one logit.
    const Tally inside = shared.scratch.inside;
    weight.last = inside.count == 1 ? end.high - end.range : logit_up_to<T>(end.high);
    floor = from_ordered(weight.last);
    // Of one value its key may be above `last`, and then it is no tie.
    places = kept_ties(most, fixed_weight(rules.weight(floor, row.top)), shared.scratch.above,
                       inside);
    weight.ties = places < inside.count;
  }
  for (;;) {
    const int column = locate_in_row(row, tokens, shared, floor, weight, places);
    if (weight.ties) {
      weight.ties = false;
      weight.last_tie = column;
      continue;
    }
    if (ptx::thread() == 0) write_token(args, number, column, 0);
    return;
  }
}

/// Whole block; overwrites the scan's groups.
template <typename T>
__device__ void draw_filtered(const SampleArgs<T>& args, int number, RowScan& scan,
                              const FilterRow<T>& row, const SampleRules& rules,
                              FilterShared& shared) {
  // Asked for now, needed at the end.
  if (ptx::thread() == kRowThreads - 1) shared.noise = noise_of(args.parameters, number);
  PrefixBound most{UINT32_MAX, UINT64_MAX};
  if (rules.top_k != 0) most.count = static_cast<std::uint32_t>(rules.top_k);
  if (rules.top_p < 1.0f) {
    most.mass = static_cast<std::uint64_t>(rules.top_p * row.total *
                                           static_cast<double>(kWeightOne));
  }
  float floor = lowest_by_weight(row, rules);
  if (rules.top_k != 0 || rules.top_p < 1.0f) {
    bool bounded = false;
    floor = lowest_by_groups<T>(
        scan.groups, row.columns, row.bounds, floor, most,
        [&](float logit) { return fixed_weight(rules.weight(logit, row.top)); }, shared.prefix,
        shared.scratch, bounded);
  }
  const GroupReader<T> reader =
      list_groups<T>(args, number, scan.groups, floor, shared.list, shared.listed);
  const int count = list_tokens(
      reader, floor, [&](float logit) { return rules.weight(logit, row.top) >= rules.min_p; },
      row.tokens, shared.found);
  if (count <= kFewTokens) {
    draw_of_few(args, number, row, rules, count, most, shared);
  } else {
    const ManyTokens<T> tokens{row.tokens, count, reader};
    draw_of_many(args, number, row, tokens, rules, floor, most, shared);
  }
}

}  // namespace overstory

#include "slices.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

namespace adasum {

namespace {

constexpr int64_t kLineBytes = 64;

}  // namespace

Range SliceOf(Range range, int lane, int lanes, int64_t item_bytes) {
  const int64_t line = kLineBytes / item_bytes, lines = (range.size() + line - 1) / line;
  const auto boundary = [&](int64_t i) {
    return std::min(range.end, range.begin + lines * i / lanes * line);
  };
  return {boundary(lane), boundary(lane + 1)};
}

std::vector<Range> SlicesOf(const Layout& layout, int lanes, int64_t item_bytes) {
  std::vector<Range> slices;
  int64_t begin = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    int64_t end = SliceOf(layout.whole(), lane, lanes, item_bytes).end;
    const int64_t near = layout.size() / lanes / 8, tensor = layout.NearestTensor(end);
    if (std::abs(tensor - end) <= near) end = tensor;
    slices.push_back({begin, end});
    begin = end;
  }
  return slices;
}

Slices::Slices(Device& device, const Kernels& kernels, const Layout& layout, Op op, Order order,
               int members, std::vector<Range> slices, int lane)
    : kernels_(kernels),
      layout_(layout),
      op_(op),
      members_(members),
      levels_(Levels(order, members)),
      slice_(slices[lane]),
      combiner_(device, kernels, op, kernels.piece_bytes) {
  if (op != Op::kAdasum) {
    // Tensors make no difference.
    if (slice_.size() > 0) whole_.push_back({slice_, {{0, slice_}}, {0}, 1});
    return;
  }
  // All ranks know which tensors are cut, so all give them the same rows.
  std::vector<int64_t> cut;
  for (const Range& slice : slices) {
    layout.ForEachPart(slice, [&](const Part& part) {
      if (!layout.is_whole(part) && (cut.empty() || cut.back() != part.tensor)) {
        cut.push_back(part.tensor);
      }
    });
  }
  const std::vector<Part> parts = layout.Parts(slice_);
  cut_.range = slice_;
  cut_.all_rows = static_cast<int>(cut.size());
  int64_t bytes = 0;
  for (const Part& part : parts) {
    if (!layout.is_whole(part)) {
      cut_.parts.push_back(part);
      cut_.rows.push_back(
          static_cast<int>(std::lower_bound(cut.begin(), cut.end(), part.tensor) - cut.begin()));
      continue;
    }
    const int64_t more = part.range.size() * kernels.item_bytes;
    if (whole_.empty() || bytes + more > kernels.piece_bytes) {
      whole_.push_back({{part.range.begin, part.range.begin}, {}, {}, 0});
      bytes = 0;
    }
    Work& work = whole_.back();
    work.range.end = part.range.end;
    work.parts.push_back(part);
    work.rows.push_back(work.all_rows++);
    bytes += more;
  }
}

TensorNorms Slices::Combine(const SliceVectors& vectors, char* scratch,
                            const Combiner::OverRanks& over_ranks) {
  if (members_ == 1) {
    if (slice_.size() == 0) return {};
    if (vectors.fill) vectors.fill(slice_);
    kernels_.Copy(vectors.vectors[0], slice_.size(), vectors.out);
    if (vectors.emit) vectors.emit(slice_);
    return {};
  }
  TensorNorms norms;
  if (op_ == Op::kAdasum) {
    norms.inputs.assign(layout_.tensors(), std::numeric_limits<double>::quiet_NaN());
    norms.combined = norms.inputs;
  }
  for (const Work& work : whole_) CombineWork(work, vectors, scratch, {}, &norms);
  // Also where none of the cut ones is here: the others' sums need all ranks.
  if (cut_.all_rows > 0) CombineWork(cut_, vectors, scratch, over_ranks, &norms);
  return norms;
}

void Slices::CombineWork(const Work& work, const SliceVectors& vectors, char* scratch,
                         const Combiner::OverRanks& over_ranks, TensorNorms* norms) {
  const int64_t at = (work.range.begin - slice_.begin) * kernels_.item_bytes;
  const int64_t bytes = work.range.size() * kernels_.item_bytes;
  current_.clear();
  for (const char* vector : vectors.vectors) current_.push_back(vector + at);
  own_.assign(members_, nullptr);
  behind_.assign(members_, 1);
  if (op_ == Op::kAdasum) {
    for (const Part& part : work.parts) norms->inputs[part.tensor] = 0;
  }
  const Combiner::Visit nothing;
  for (size_t level = 0; level < levels_.size(); ++level) {
    const bool is_last = level + 1 == levels_.size();
    bool reads_own = false;
    pairs_.clear();
    for (const auto [a, b] : levels_[level]) {
      reads_own = reads_own || ((a == vectors.own || b == vectors.own) &&
                                behind_[vectors.own] == 1 && own_[vectors.own] == nullptr);
      if (!is_last && own_[a] == nullptr) {
        own_[a] = scratch;
        scratch += bytes;
      }
      char* out = is_last ? vectors.out + at : own_[a];
      pairs_.push_back({current_[a], current_[b], out, behind_[a], behind_[b]});
    }
    const Combiner::Visit& fill = reads_own ? vectors.fill : nothing;
    combiner_.Measure(work, pairs_, over_ranks, fill);
    combiner_.Combine(work.range, fill, is_last ? vectors.emit : nothing);
    for (size_t p = 0; p < pairs_.size(); ++p) {
      const auto [a, b] = levels_[level][p];
      for (size_t i = 0; op_ == Op::kAdasum && i < work.parts.size(); ++i) {
        const Norms& of_pair = combiner_.norms(p, work.rows[i]);
        const int64_t tensor = work.parts[i].tensor;
        if (behind_[a] == 1) norms->inputs[tensor] += of_pair.a;
        if (behind_[b] == 1) norms->inputs[tensor] += of_pair.b;
        norms->combined[tensor] = of_pair.combined;
      }
      current_[a] = pairs_[p].out;
      behind_[a] += behind_[b];
    }
  }
}

}  // namespace adasum

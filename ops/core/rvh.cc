#include "rvh.h"

#include <algorithm>

#include "faults.h"

namespace adasum {

namespace {

// Room for the larger half of so many bytes, in whole lines of the cache.
int64_t HalfBytes(int64_t bytes) {
  constexpr int64_t kLineBytes = 64;
  const int64_t lines = (bytes + kLineBytes - 1) / kLineBytes;
  return (lines + 1) / 2 * kLineBytes;
}

}  // namespace

// Two areas, for a level and the next one, whose half comes while this one's is still in use.
int64_t Rvh::ReceivedBytes(int64_t x_bytes) {
  return HalfBytes(x_bytes) + HalfBytes(HalfBytes(x_bytes));
}

Rvh::Rvh(Transport& transport, Device& device, const Kernels& kernels, const Layout& layout, Op op,
         Leaves leaves, Range x, RvhBuffers buffers, Transport::Stream stream)
    : transport_(transport),
      kernels_(kernels),
      layout_(layout),
      op_(op),
      combiner_(device, kernels, op, kernels.message_bytes),
      leaves_(std::move(leaves)),
      whole_(x),
      x_(buffers.x),
      received_(buffers.received),
      stream_(stream),
      tree_leaves_(LeavesOfTree(leaves_.group.size())),
      pairs_(leaves_.group.size() - tree_leaves_),
      leaf_(is_paired() ? leaves_.group.place / 2 : leaves_.group.place - pairs_) {}

void Rvh::Begin() {
  if (is_paired()) {
    Exchange(PairLevel());
  } else if (tree_leaves_ > 1) {
    Exchange(TreeLevel(whole_, 1));
  }
}

TensorNorms Rvh::Finish(TensorNorms leaf_norms, const OverLanes& over_lanes, const Emit& emit) {
  norms_ = std::move(leaf_norms);
  leaves_are_ranks_ = norms_.inputs.empty();
  over_lanes_ = over_lanes;
  emit_ = emit;
  if (is_paired()) {
    RunPaired(PairLevel());
  } else if (tree_leaves_ > 1) {
    Tree(TreeLevel(whole_, 1), 1);
  } else {
    final_ = whole_;
  }
  EmitFinal();
  return norms_;
}

// A leaf that is combined with its neighbour before the tree: the even one of the two goes on into
// the tree with the result.
void Rvh::RunPaired(const Level& pair) {
  HalveAndCombine(pair, nullptr);
  if (pair.left) {
    Start({0, 0}, pair.halves.theirs, At(pair.halves.theirs), pair.nghr)->Await();
    if (tree_leaves_ > 1) {
      const Level level = TreeLevel(whole_, 1);
      Exchange(level);
      Tree(level, 1);
    } else {
      final_ = whole_;
    }
    const auto result = Start(whole_, {0, 0}, nullptr, pair.nghr);
    EmitFinal();
    result->Await();
  } else {
    Start(pair.halves.mine, {0, 0}, nullptr, pair.nghr)->Await();
    ReceiveAndEmit(*Start({0, 0}, whole_, At(whole_), pair.nghr), whole_);
  }
  for (std::vector<double>* of_tensors : {&norms_.inputs, &norms_.combined}) {
    const int64_t bytes = static_cast<int64_t>(of_tensors->size() * sizeof(double));
    if (pair.left) {
      transport_.Send(of_tensors->data(), bytes, pair.nghr);
    } else {
      transport_.Receive(of_tensors->data(), bytes, pair.nghr);
    }
  }
}

// Algorithm 1. Its line numbers stand at the right; lines 1 to 3 and 8 are TreeLevel's.
void Rvh::Tree(const Level& level, int d) {
  const Range x = level.halves.mine;
  if (2 * d < tree_leaves_) {
    const Level next = TreeLevel(x, 2 * d);
    HalveAndCombine(level, &next);  // 4-18
    Tree(next, 2 * d);              // 19
  } else {
    HalveAndCombine(level, nullptr);  // 4-18
    final_ = x;
  }
  Gather(level, d == 1 && !is_paired());  // 22-24
}

// The exchange of the level's halves is under way. Leaves the combined half in place.
void Rvh::HalveAndCombine(const Level& level, const Level* next) {
  const Range mine = level.halves.mine;
  const char* own = At(mine);
  const char* a = level.left ? own : level.received;  // 5, 10
  const char* b = level.left ? level.received : own;  // 6, 11
  const Pair pair{a, b, At(mine), level.weight_a, level.weight_b};
  // A name of its own, since the next level's exchange starts before this one is combined.
  const std::unique_ptr<Transfer> exchanged = std::move(exchange_);
  const auto await = [&](Range piece) {
    exchanged->AwaitPiece((piece.begin - mine.begin) * kernels_.item_bytes /
                          kernels_.message_bytes);
  };
  const auto over_ranks = [&](Reduction reduction, double* values, size_t count) {
    exchanged->Await();
    FaultPlace("dots");
    ReduceOverGroup(level, reduction, values, count);  // 16, 17
  };
  const Work work = WorkOn(mine);
  combiner_.Measure(work, {pair}, over_ranks, await);  // 15
  NoteNorms(level);
  if (next != nullptr) {
    combiner_.Combine(next->halves.theirs, await, {});  // 18
    Exchange(*next);
    combiner_.Combine(next->halves.mine, await, {});
  } else {
    combiner_.Combine(mine, await, {});
  }
  exchanged->Await();
}

Work Rvh::WorkOn(Range range) const {
  Work work{range, {}, {}, static_cast<int>(layout_.tensors())};
  if (op_ == Op::kAdasum) {
    work.parts = layout_.Parts(range);
  } else if (range.size() > 0) {
    work.parts = {{0, range}};  // tensors make no difference
  }
  for (const Part& part : work.parts) work.rows.push_back(static_cast<int>(part.tensor));
  return work;
}

void Rvh::ReduceOverGroup(const Level& level, Reduction reduction, double* values, size_t count) {
  if (over_lanes_) over_lanes_(reduction, values, count);
  if (reduction == Reduction::kMax) {
    GroupAllreduce(transport_, level.group, reduction, values, count);
    return;
  }
  // With them goes what is known of the norms. The leaves of a side know the same sum, so each
  // brings its share.
  const double share = 2.0 / level.group.size();
  std::vector<double> all(values, values + count);
  for (const double inputs : norms_.inputs) all.push_back(inputs * share);
  all.resize(count + layout_.tensors(), 0.0);
  GroupAllreduce(transport_, level.group, reduction, all.data(), all.size());
  std::copy_n(all.begin(), count, values);
  group_inputs_.assign(all.begin() + static_cast<int64_t>(count), all.end());
}

void Rvh::NoteNorms(const Level& level) {
  if (group_inputs_.empty()) return;  // without dot products
  norms_.inputs.resize(layout_.tensors());
  norms_.combined.resize(layout_.tensors());
  for (int64_t t = 0; t < layout_.tensors(); ++t) {
    const Norms& of_pair = combiner_.norms(0, t);
    norms_.inputs[t] = group_inputs_[t];
    if (leaves_are_ranks_ && level.leaves_a == 1) norms_.inputs[t] += of_pair.a;
    if (leaves_are_ranks_ && level.leaves_b == 1) norms_.inputs[t] += of_pair.b;
    norms_.combined[t] = of_pair.combined;
  }
}

void Rvh::Gather(const Level& level, bool is_last) {
  FaultPlace("gather");
  const Range theirs = level.halves.theirs;
  const auto transfer = Start(level.halves.mine, theirs, At(theirs), level.nghr);
  EmitFinal();
  if (is_last) {
    ReceiveAndEmit(*transfer, theirs);
  } else {
    transfer->Await();
    final_ = theirs;
  }
}

void Rvh::ReceiveAndEmit(Transfer& transfer, Range range) {
  const int64_t size = kernels_.message_bytes / kernels_.item_bytes;
  for (Range piece{range.begin, 0}; piece.begin < range.end; piece.begin = piece.end) {
    piece.end = std::min(piece.begin + size, range.end);
    transfer.AwaitPiece((piece.begin - range.begin) / size);
    final_ = piece;
    EmitFinal();
  }
  transfer.Await();
}

void Rvh::EmitFinal() {
  if (emit_ && final_.size() > 0) emit_(final_);
  final_ = {0, 0};
}

Rvh::Level Rvh::PairLevel() const {
  const int place = leaves_.group.place, even = place / 2 * 2;
  const bool left = place == even;
  const std::vector<int>& ranks = leaves_.group.ranks;
  return {left,
          ranks[left ? even + 1 : even],
          Halve(whole_, left),
          {{ranks[even], ranks[even + 1]}, place - even},
          1,
          1,
          leaves_.weights[even],
          leaves_.weights[even + 1],
          received_};
}

Rvh::Level Rvh::TreeLevel(Range x, int d) const {
  const bool left = leaf_ / d % 2 == 0;                       // 2
  const int nghr = RankOfLeaf(left ? leaf_ + d : leaf_ - d);  // 3, 8
  // Line 16: the leaves floor(leaf / 2d) 2d + i for i in 0 ... 2d - 1.
  const int first = leaf_ / (2 * d) * (2 * d);
  Level level{left, nghr, Halve(x, left), {{}, leaf_ - first}, 0, 0, 0, 0, received_};  // 1
  for (int i = 0; i < 2 * d; ++i) {
    const int place = PlaceOfLeaf(first + i), places = first + i < pairs_ ? 2 : 1;
    level.group.ranks.push_back(leaves_.group.ranks[place]);
    (i < d ? level.leaves_a : level.leaves_b) += places;
    for (int p = place; p < place + places; ++p) {
      (i < d ? level.weight_a : level.weight_b) += leaves_.weights[p];
    }
  }
  // Every other level uses the second area. d is 2 to the power of the level.
  const bool is_odd = (d & 0x2aaaaaaa) != 0;
  if (is_odd) level.received += HalfBytes(Bytes(whole_));
  return level;
}

Rvh::Halves Rvh::Halve(Range x, bool left) const {
  const Range first = SliceOf(x, 0, 2, kernels_.item_bytes);
  const Range second{first.end, x.end};
  return left ? Halves{first, second} : Halves{second, first};
}

void Rvh::Exchange(const Level& level) {
  FaultPlace("halve");
  exchange_ = Start(level.halves.theirs, level.halves.mine, level.received, level.nghr);  // 4-11
}

std::unique_ptr<Transfer> Rvh::Start(Range send, Range receive, char* receive_at, int nghr) const {
  return transport_.Start(At(send), Bytes(send), nghr, receive_at, Bytes(receive), nghr,
                          kernels_.message_bytes, stream_);
}

}  // namespace adasum

#include <algorithm>
#include <cmath>

#include "expected.h"
#include "ops/core/partition.h"
#include "steps.h"

namespace core_test {

using adasum::Algorithm;
using adasum::DType;
using adasum::ErrorKind;
using adasum::Hosts;
using adasum::Op;
using adasum::PartitionPlace;

namespace {

// Gradients that are reduced to the layers' owners; layers that are shared; and then the hosts'
// changes of them, until all hosts flush.
class Partitioned : public Step {
 public:
  Partitioned(Random& random, const World& world)
      : world_(world),
        hosts_(Hosts::From(world.host_of)),
        op_(random.Of<Op>({Op::kAdasum, Op::kAdasum, Op::kSum, Op::kAverage})),
        threshold_(random.Of<int64_t>({1, 1000, 64 << 20})),
        ranks_(world.size()) {
    const DType dtype = RandomDType(random);
    const std::vector<Dims> shapes = RandomShapes(random, 6);
    lanes_ = PartitionPlace::Of(0, hosts_).lanes;
    for (const std::vector<int>& host : hosts_.ranks) {
      host_worlds_.push_back(std::make_unique<adasum::ThreadWorld>(std::vector<int>(host.size(), 0),
                                                                   world.share_memory));
    }
    for (int lane = 0; lane < lanes_; ++lane) {
      std::vector<int> apart(hosts_.ranks.size());
      for (size_t host = 0; host < apart.size(); ++host) apart[host] = static_cast<int>(host);
      lane_worlds_.push_back(std::make_unique<adasum::ThreadWorld>(apart, world.share_memory));
    }
    bad_host_ = random.OneIn(2) ? random.Below(static_cast<int64_t>(hosts_.ranks.size())) : -1;
    raises_ = bad_host_ >= 0 && random.OneIn(4);
    starts_apart_ = random.OneIn(2);
    const int hosts = static_cast<int>(hosts_.ranks.size());
    for (size_t t = 0; t < shapes.size(); ++t) {
      owner_of_.push_back(static_cast<int>(random.Below(lanes_)));
      const int64_t count = CountOf(shapes[t]);
      const std::vector<Vector> gradients = RandomVectors(random, world.size(), count);
      Vector start(count);
      for (double& value : start) value = static_cast<double>(random.Between(-255, 255)) / 256;
      starts_.push_back(Tensor::Of(dtype, shapes[t], start));
      const std::vector<Vector> changes = RandomVectors(random, hosts, count);
      for (int rank = 0; rank < world.size(); ++rank) {
        const int host = hosts_.host_of[rank];
        Rank& own = ranks_[rank];
        own.gradients.push_back(Tensor::Of(dtype, shapes[t], gradients[rank]));
        const Vector values = Sum(starts_[t].Values(), changes[host]);
        const bool is_mine = owner_of_[t] == LaneOf(rank);
        // What others own is whatever it was.
        own.values.push_back(
            Tensor::Of(dtype, shapes[t], is_mine ? values : Vector(count, rank + 0.5)));
        of_host_.push_back(Tensor::Of(dtype, shapes[t], values));
      }
    }
    MakeBad(random);
    for (Rank& rank : ranks_) {
      rank.owned = LikeOf(rank.gradients);
      rank.starts = rank.new_starts = starts_;
    }
  }

  const char* name() const override { return raises_ ? "nonfinite partition" : "partition"; }

  void Run(Place& place) override {
    const int host = hosts_.host_of[place.rank], lane = LaneOf(place.rank);
    const auto communicator = [](adasum::ThreadWorld& world, int rank) {
      return std::make_unique<adasum::Communicator>(world.Join(rank));
    };
    auto of_host = communicator(*host_worlds_[host], lane);
    std::unique_ptr<adasum::Communicator> of_lane;
    if (lane < lanes_) of_lane = communicator(*lane_worlds_[lane], host);
    const bool all_lanes = lanes_ * static_cast<int>(hosts_.ranks.size()) == world_.size();
    adasum::Partition partition(std::move(of_host), std::move(of_lane), all_lanes, true);

    Rank& rank = ranks_[place.rank];
    const double one = place.rank + 1;
    partition.HostSum(&one, &rank.sum, 1, "sum");
    partition.ReduceToOwners(SpecsOf(rank.gradients), Read(rank.gradients).data(),
                             Write(rank.owned).data(), owner_of_, threshold_, "gradients");
    rank.shared = rank.values;
    partition.ShareFromOwners(SpecsOf(rank.shared), Write(rank.shared).data(), owner_of_,
                              threshold_, "share");
    rank.result = rank.values;
    // In place, or with the memory that was given left as it is.
    Tensors& result_starts = starts_apart_ ? rank.new_starts : rank.starts;
    const std::vector<const void*> values = Read(rank.result), starts = Read(rank.starts),
                                   later_starts = Read(result_starts);
    const std::vector<void*> new_values = Write(rank.result), new_starts = Write(result_starts);
    adasum::SyncTensors tensors{SpecsOf(rank.result),
                                values.data(),
                                starts.data(),
                                new_values.data(),
                                new_starts.data(),
                                {},
                                nullptr,
                                nullptr};
    adasum::SyncOptions options{};
    options.reduce.op = op_;
    options.reduce.fusion_threshold = threshold_;
    options.pending = true;
    options.raise_nonfinite = raises_;
    // Host 0 comes once before its last time; the others are there to the end.
    options.flush = host != 0;
    const auto sync = [&] {
      rank.done = partition.Sync(tensors, owner_of_, options, "sync");
      if (host != 0) return;
      tensors.starts = later_starts.data();
      options.flush = true;
      options.pending = false;
      rank.done = partition.Sync(tensors, owner_of_, options, "sync");
    };
    if (raises_) {
      ExpectError(ErrorKind::kInvalidArgument, "a sync of NaN", sync);
    } else {
      sync();
    }
  }

  void Check() const override {
    const int hosts = static_cast<int>(hosts_.ranks.size());
    for (int rank = 0; rank < world_.size(); ++rank) {
      const std::vector<int>& host = hosts_.ranks[hosts_.host_of[rank]];
      double sum = 0;
      for (const int other : host) sum += other + 1;
      Require(ranks_[rank].sum == sum, "a host's sum is wrong");
    }
    for (size_t t = 0; t < starts_.size(); ++t) {
      std::vector<Vector> changes;
      for (int host = 0; host < hosts; ++host) {
        const Tensor& moved = OfHost(t, hosts_.ranks[host][0]);
        changes.push_back(Difference(moved.Values(), starts_[t].Values()));
        if (host == bad_host_) changes.back().assign(changes.back().size(), 0.0);
      }
      const std::vector<int> apart(hosts, 0);
      const Vector want = Sum(starts_[t].Values(), Expected(op_, Algorithm::kRvh, apart, changes));
      for (int rank = 0; rank < world_.size(); ++rank) {
        CheckGradient(rank, t);
        CheckShared(rank, t);
        if (raises_) continue;
        // One host alone keeps its weights, but not a bad change.
        const bool alone = hosts == 1 && bad_host_ < 0;
        CheckNear(ranks_[rank].result[t], alone ? OfHost(t, rank).Values() : want, changes);
        Require(ranks_[rank].result[t].data == ranks_[0].result[t].data, "ranks differ");
        const bool is_mine = owner_of_[t] == LaneOf(rank);
        const Tensor& start = (starts_apart_ ? ranks_[rank].new_starts : ranks_[rank].starts)[t];
        Require(!is_mine || start.data == ranks_[rank].result[t].data, "a start is not the result");
        Require(is_mine || start.data == starts_[t].data,
                "a start of another's tensor was written");
      }
    }
  }

 private:
  struct Rank {
    Tensors gradients, owned, values, shared, starts, new_starts, result;
    double sum = 0;
    adasum::SyncResult done;
  };

  int LaneOf(int rank) const { return PartitionPlace::Of(rank, hosts_).lane; }

  const Tensor& OfHost(size_t t, int rank) const { return of_host_[t * ranks_.size() + rank]; }

  void MakeBad(Random& random) {
    if (bad_host_ < 0) return;
    for (size_t tries = 0; tries < starts_.size(); ++tries) {
      const size_t t = random.Below(static_cast<int64_t>(starts_.size()));
      const int owner = hosts_.ranks[bad_host_][owner_of_[t]];
      Tensor& value = ranks_[owner].values[t];
      if (value.data.empty()) continue;
      Vector values = value.Values();
      values[0] = NAN;
      value = Tensor::Of(value.dtype, value.dims, values);
      return;
    }
    bad_host_ = -1;
    raises_ = false;
  }

  void CheckGradient(int rank, size_t t) const {
    const Tensor& owned = ranks_[rank].owned[t];
    if (owner_of_[t] != LaneOf(rank)) {
      Require(owned.data == LikeOf({owned})[0].data, "another's gradient was written");
      return;
    }
    std::vector<Vector> parts;
    Vector want(CountOf(owned.dims), 0.0);
    for (const int other : hosts_.ranks[hosts_.host_of[rank]]) {
      parts.push_back(ranks_[other].gradients[t].Values());
      want = Sum(want, parts.back());
    }
    CheckNear(owned, want, parts);
  }

  void CheckShared(int rank, size_t t) const {
    const int owner = hosts_.ranks[hosts_.host_of[rank]][owner_of_[t]];
    Require(ranks_[rank].shared[t].data == ranks_[owner].values[t].data,
            "what was shared is not the owner's");
  }

  static void CheckNear(const Tensor& got, const Vector& want, const std::vector<Vector>& parts) {
    double size = Norm(want);
    for (const Vector& part : parts) size += Norm(part);
    const double error = Norm(Difference(got.Values(), want));
    Require(error <= 8 * Precision(got.dtype) * size,
            "a result is wrong by " + std::to_string(error) + " of " + std::to_string(size));
  }

  const World world_;
  const Hosts hosts_;
  const Op op_;
  const int64_t threshold_;
  int lanes_ = 1;
  int64_t bad_host_ = -1;
  bool raises_ = false, starts_apart_ = false;
  std::vector<std::unique_ptr<adasum::ThreadWorld>> host_worlds_, lane_worlds_;
  std::vector<int> owner_of_;
  Tensors starts_, of_host_;
  std::vector<Rank> ranks_;
};

}  // namespace

std::unique_ptr<Step> MakePartition(Random& random, const World& world) {
  return std::make_unique<Partitioned>(random, world);
}

}  // namespace core_test

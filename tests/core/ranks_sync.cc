#include <algorithm>
#include <cmath>
#include <utility>

#include "expected.h"
#include "placed.h"
#include "steps.h"

namespace core_test {

using adasum::Algorithm;
using adasum::DType;
using adasum::ErrorKind;
using adasum::Op;
using adasum::SyncOptions;
using adasum::SyncResult;
using adasum::SyncTensors;

namespace {

// What one rank syncs.
struct Weights {
  Tensors values, starts, states;
};

std::vector<Dims> SmallShapes(Random& random) { return RandomShapes(random, 4); }

// Values between -1 and 1, equal on all ranks.
Tensors RandomStarts(Random& random, const std::vector<Dims>& shapes, DType dtype) {
  Tensors starts;
  for (const Dims& dims : shapes) {
    Vector values(CountOf(dims));
    for (double& value : values) value = static_cast<double>(random.Between(-255, 255)) / 256;
    starts.push_back(Tensor::Of(dtype, dims, values));
  }
  return starts;
}

// start + change, rounded.
Tensor Moved(const Tensor& start, const Vector& change) {
  return Tensor::Of(start.dtype, start.dims, Sum(start.Values(), change));
}

Vector ChangeOf(const Tensor& value, const Tensor& start) {
  return Difference(value.Values(), start.Values());
}

bool IsZero(const Vector& vector) {
  return std::all_of(vector.begin(), vector.end(), [](double x) { return x == 0; });
}

class Sync : public Step {
 public:
  Sync(Random& random, const World& world)
      : world_(world), reduce_(RandomReduceOptions(random)), ranks_(world.size()) {
    const DType dtype = RandomDType(random);
    const std::vector<Dims> shapes = SmallShapes(random);
    values_are_changes_ = random.OneIn(4);
    flush_ = !values_are_changes_ && random.OneIn(3);
    const bool idle = random.OneIn(8), alike = random.OneIn(6);
    Tensors starts = RandomStarts(random, shapes, dtype);
    if (values_are_changes_) {
      for (Tensor& start : starts)
        start = Tensor::Of(dtype, start.dims, Vector(CountOf(start.dims)));
    }
    for (Rank& rank : ranks_) rank.weights.starts = starts;
    for (const Tensor& start : starts) {
      std::vector<Vector> changes = RandomVectors(random, world.size(), CountOf(start.dims));
      for (int rank = 0; rank < world.size(); ++rank) {
        if (idle) changes[rank].assign(changes[rank].size(), 0.0);
        ranks_[rank].weights.values.push_back(Moved(start, changes[alike ? 0 : rank]));
      }
    }
    for (const Dims& dims : random.OneIn(2) ? SmallShapes(random) : std::vector<Dims>()) {
      for (const Vector& vector : RandomVectors(random, world.size(), CountOf(dims))) {
        ranks_[states_++ % ranks_.size()].weights.states.push_back(
            Tensor::Of(DType::kFloat32, dims, vector));
      }
    }
    for (Rank& rank : ranks_) {
      rank.pending = !idle && random.OneIn(2);
      rank.in_place = random.OneIn(2);
      rank.writes_starts = flush_ || (!values_are_changes_ && random.OneIn(2));
    }
    MakeSomeNonfinite(random);
    if (dtype == DType::kFloat32 && !world.on_device && random.OneIn(2)) {
      // At some scales a change overflows.
      wire_.dtype = random.OneIn(2) ? DType::kFloat16 : DType::kBFloat16;
      wire_.scale = {random.Between(-3, 16), random.Below(200)};
    }
    for (Rank& rank : ranks_) {
      rank.given = rank.weights;
      rank.result = {LikeOf(rank.given.values), LikeOf(rank.given.starts),
                     LikeOf(rank.given.states)};
    }
  }

  const char* name() const override { return is_error_ ? "nonfinite sync" : "sync"; }

  void Run(Place& place) override {
    Rank& rank = ranks_[place.rank];
    Weights& from = rank.weights;
    Weights& to = rank.in_place ? from : rank.result;
    adasum::Device& device = place.device;
    Placed values(device, from.values), starts(device, from.starts), states(device, from.states);
    Placed new_values(device, to.values), new_starts(device, to.starts),
        new_states(device, to.states);
    const auto written = [&](Placed& before, Placed& apart) -> Placed& {
      return rank.in_place ? before : apart;
    };
    const SyncTensors tensors{SpecsOf(from.values),
                              values.read(),
                              values_are_changes_ ? nullptr : starts.read(),
                              written(values, new_values).write(),
                              rank.writes_starts ? written(starts, new_starts).write() : nullptr,
                              SpecsOf(from.states),
                              states.read(),
                              written(states, new_states).write(),
                              77};
    adasum::ReduceOptions reduce = reduce_;
    reduce.device = &device;
    const SyncOptions options{reduce, rank.pending, flush_, raise_, rank.skips, wire_};
    const auto sync = [&] { rank.done = place.communicator.Sync(tensors, options, "sync"); };
    if (is_error_) {
      ExpectError(ErrorKind::kInvalidArgument, "a sync of NaN", sync);
    } else {
      sync();
    }
    written(values, new_values).Return();
    written(starts, new_starts).Return();
    written(states, new_states).Return();
    if (rank.in_place) rank.result = from;
  }

  void Check() const override {
    if (is_error_) {
      for (const Rank& rank : ranks_) Require(IsUntouched(rank), "an error wrote a result");
      return;
    }
    const bool any_pending = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
      return rank.pending || (!rank.nonfinite && !HasNoChange(rank));
    });
    const bool any_skips =
        std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.nonfinite; });
    bool alike = true, nonzero = false;
    for (size_t t = 0; t < ranks_[0].given.values.size(); ++t) {
      std::vector<Vector> changes;
      for (const Rank& rank : ranks_) {
        const Vector change = ChangeOf(rank.given.values[t], rank.given.starts[t]);
        changes.push_back(rank.nonfinite ? Vector(change.size(), 0.0) : change);
        alike = alike && changes.back() == changes.front();
        nonzero = nonzero || !IsZero(changes.back());
      }
      for (const Rank& rank : ranks_) CheckTensor(rank, t, changes, any_pending);
    }
    for (const Rank& rank : ranks_) {
      Require(rank.done.syncs == (any_pending ? 1 : 0), "the number of syncs is wrong");
      Require(rank.done.skipped == rank.nonfinite, "skipped is wrong");
      const adasum::Scale scale = rank.done.scale, first = ranks_[0].done.scale;
      Require(scale.exponent == first.exponent && scale.good == first.good, "the scales differ");
      const bool is_next = scale.exponent <= wire_.scale.exponent + 1;
      Require(wire_.is_narrow() ? is_next : scale.exponent == 0, "the scale is wrong");
      CheckIdentical(rank.done, alike && nonzero && any_pending);
      CheckStates(rank, any_pending && !any_skips);
    }
  }

 private:
  struct Rank {
    Weights weights, given, result;
    bool pending = true, in_place = false, writes_starts = true, nonfinite = false;
    int64_t skips = 0;
    SyncResult done;
  };

  void MakeSomeNonfinite(Random& random) {
    if (!random.OneIn(3)) return;
    for (Rank& rank : ranks_) {
      if (!random.OneIn(3) || rank.weights.values.empty()) continue;
      Tensor& tensor = rank.weights.values[random.Below(rank.weights.values.size())];
      if (tensor.data.empty()) continue;
      Vector values = tensor.Values();
      values[random.Below(values.size())] = random.Of<double>({NAN, INFINITY, -INFINITY});
      tensor = Tensor::Of(tensor.dtype, tensor.dims, values);
      rank.nonfinite = rank.pending = true;
      rank.skips = random.Of<int64_t>({0, 0, 0, 1, 2, 100});
      is_error_ = is_error_ || rank.skips >= 2;
    }
    raise_ = random.OneIn(3);
    is_error_ =
        is_error_ || (raise_ && std::any_of(ranks_.begin(), ranks_.end(),
                                            [](const Rank& rank) { return rank.nonfinite; }));
  }

  bool IsUntouched(const Rank& rank) const {
    const auto is = [&](const Tensors& result, const Tensors& given) {
      return SameBytes(result, rank.in_place ? given : LikeOf(given));
    };
    return is(rank.result.values, rank.given.values) && is(rank.result.starts, rank.given.starts) &&
           is(rank.result.states, rank.given.states);
  }

  static bool HasNoChange(const Rank& rank) {
    for (size_t t = 0; t < rank.given.values.size(); ++t) {
      if (!IsZero(ChangeOf(rank.given.values[t], rank.given.starts[t]))) return false;
    }
    return true;
  }

  void CheckTensor(const Rank& rank, size_t t, const std::vector<Vector>& changes,
                   bool any_pending) const {
    const Tensor &value = rank.result.values[t], &start = rank.given.starts[t];
    const std::string what = "new value " + std::to_string(t);
    Require(value.data == ranks_[0].result.values[t].data || !any_pending, what + "s differ");
    if (rank.writes_starts) {
      Require(rank.result.starts[t].data == value.data, what + " is not the new start");
    }
    if (!any_pending) {
      Require(value.data == rank.given.values[t].data, what + " is another one");
      return;
    }
    const DType sent_as = wire_.is_narrow() ? wire_.dtype : value.dtype;
    CheckReduced(reduce_, world_, changes, ChangeOf(value, start), sent_as, Norm(start.Values()),
                 what);
    const bool is_plain =
        reduce_.algorithm == Algorithm::kRvh || reduce_.algorithm == Algorithm::kRing;
    double inputs = 0;
    for (const Vector& change : changes) inputs += Norm(change) * Norm(change);
    if (reduce_.op != Op::kAdasum || !is_plain || inputs == 0 || world_.size() == 1) return;
    const double combined = Norm(Expected(reduce_.op, reduce_.algorithm, world_.host_of, changes));
    const double want = combined * combined / inputs, got = rank.done.report.orthogonality[t];
    Require(std::fabs(got - want) <= 32 * world_.size() * Precision(sent_as) * (want + 1),
            what + ": the orthogonality is " + std::to_string(got) + " and not " +
                std::to_string(want));
  }

  void CheckIdentical(const SyncResult& done, bool are_identical) const {
    if (world_.hosts() == 1 && world_.share_memory && !world_.on_device) {
      // Otherwise a rank knows of the pairs that it took part in.
      Require(done.report.identical() == ranks_[0].done.report.identical(),
              "the ranks know of different changes");
      Require(are_identical || !done.report.identical(), "changes that differ are identical");
    }
    const bool is_plain =
        reduce_.algorithm == Algorithm::kRvh || reduce_.algorithm == Algorithm::kRing;
    if (are_identical && reduce_.op == Op::kAdasum && is_plain && world_.size() > 1) {
      Require(done.report.identical(), "identical changes are not known to be");
    }
  }

  void CheckStates(const Rank& rank, bool averaged) const {
    for (size_t s = 0; s < rank.given.states.size(); ++s) {
      const std::string what = "state " + std::to_string(s);
      if (!averaged) {
        Require(rank.result.states[s].data == rank.given.states[s].data, what + " was not kept");
        continue;
      }
      std::vector<Vector> of_ranks;
      for (const Rank& other : ranks_) of_ranks.push_back(other.given.states[s].Values());
      CheckReduced({Op::kAverage, Algorithm::kRvh, 0}, world_, of_ranks,
                   rank.result.states[s].Values(), DType::kFloat32, 0, what);
    }
  }

  const World& world_;
  const adasum::ReduceOptions reduce_;
  adasum::Wire wire_;
  bool values_are_changes_ = false, flush_ = false, raise_ = false, is_error_ = false;
  size_t states_ = 0;
  std::vector<Rank> ranks_;
};

// What ranks with several syncs have in common: a rank's change of each round, and its weights.
struct Rounds {
  Rounds(Random& random, const World& world, int rounds, bool zeros) : weights(world.size()) {
    const DType dtype = RandomDType(random);
    const Tensors starts = RandomStarts(random, SmallShapes(random), dtype);
    for (Weights& of_rank : weights) of_rank.values = of_rank.starts = starts;
    first = starts;
    changes.assign(rounds, {});
    brought.assign(rounds, std::vector<std::vector<Vector>>(world.size()));
    for (auto& of_round : changes) {
      for (const Tensor& start : starts) {
        of_round.push_back(RandomVectors(random, world.size(), CountOf(start.dims), zeros));
      }
    }
  }

  void Train(int rank, int round) {
    for (size_t t = 0; t < first.size(); ++t) {
      Tensor& value = weights[rank].values[t];
      value = Moved(value, changes[round][t][rank]);
    }
  }

  // What the rank hands over in this round.
  void Note(int rank, int round, const Tensors& values, const Tensors& starts) {
    for (size_t t = 0; t < first.size(); ++t) {
      brought[round][rank].push_back(ChangeOf(values[t], starts[t]));
    }
  }

  // All have come to what they had at first, and the changes.
  void Check(const adasum::ReduceOptions& options, const World& world) const {
    for (size_t t = 0; t < first.size(); ++t) {
      const std::string what = "weight " + std::to_string(t);
      Vector want = first[t].Values();
      double norms = Norm(want);
      for (const auto& of_round : brought) {
        std::vector<Vector> of_ranks;
        for (const auto& of_rank : of_round) {
          of_ranks.push_back(of_rank.empty() ? Vector(want.size(), 0.0) : of_rank[t]);
          norms += Norm(of_ranks.back());
        }
        want = Sum(want, Expected(options.op, options.algorithm, world.host_of, of_ranks));
      }
      const double allowed = 16 * world.size() * Precision(first[t].dtype) * norms;
      for (const Weights& of_rank : weights) {
        Require(of_rank.values[t].data == weights[0].values[t].data, what + " differs");
        Require(of_rank.values[t].data == of_rank.starts[t].data, what + " is not the start");
        const double error = Norm(Difference(of_rank.values[t].Values(), want));
        Require(error <= allowed, what + ": the error is " + std::to_string(error) +
                                      " and may be " + std::to_string(allowed));
      }
    }
  }

  std::vector<Weights> weights;                           // of each rank
  Tensors first;                                          // what all start from
  std::vector<std::vector<std::vector<Vector>>> changes;  // of each round, tensor, rank
  std::vector<std::vector<std::vector<Vector>>> brought;  // of each round, rank, tensor
};

class UnevenSyncs : public Step {
 public:
  UnevenSyncs(Random& random, const World& world)
      : world_(world),
        options_(RandomReduceOptions(random)),
        rounds_(random, world, kRounds, true) {
    for (int rank = 0; rank < world.size(); ++rank) {
      last_.push_back(static_cast<int>(random.Below(kRounds)));
      for (std::vector<char>& of_ranks : trains_) of_ranks.push_back(random.OneIn(2));
    }
    done_.resize(world.size());
  }

  const char* name() const override { return "uneven syncs"; }

  void Run(Place& place) override {
    const int rank = place.rank, last = last_[rank];
    Weights& own = rounds_.weights[rank];
    for (int round = 0; round <= last; ++round) {
      const bool flush = round == last, pending = trains_[round][rank];
      if (pending) {
        rounds_.Train(rank, round);
        rounds_.Note(rank, round, own.values, own.starts);
      }
      Placed values(place.device, own.values), starts(place.device, own.starts);
      const SyncTensors tensors{SpecsOf(own.values),
                                values.read(),
                                starts.read(),
                                values.write(),
                                starts.write(),
                                {},
                                nullptr,
                                nullptr};
      adasum::ReduceOptions options = options_;
      options.device = &place.device;
      done_[rank] = place.communicator.Sync(tensors, {options, pending, flush, true, 0}, "uneven");
      values.Return();
      starts.Return();
    }
  }

  void Check() const override {
    rounds_.Check(options_, world_);
    const int last = *std::max_element(last_.begin(), last_.end());
    for (int rank = 0; rank < world_.size(); ++rank) {
      int64_t syncs = 0;
      for (int round = last_[rank]; round <= last; ++round) syncs += IsOne(round);
      Require(done_[rank].syncs == syncs, "a last sync has done another number of them");
    }
  }

 private:
  static constexpr int kRounds = 4;

  // Whether any rank brings a change.
  bool IsOne(int round) const {
    for (int rank = 0; rank < world_.size(); ++rank) {
      if (round <= last_[rank] && trains_[round][rank]) return true;
    }
    return false;
  }

  const World& world_;
  const adasum::ReduceOptions options_;
  Rounds rounds_;
  std::vector<int> last_;              // the round in which a rank flushes
  std::vector<char> trains_[kRounds];  // whether a rank does before a round
  std::vector<SyncResult> done_;
};

class FlightsBesideTraining : public Step {
 public:
  FlightsBesideTraining(Random& random, const World& world, int64_t number)
      : world_(world),
        number_(number),
        flights_(static_cast<int>(random.Below(4))),
        lands_(!random.OneIn(5)),
        options_(RandomReduceOptions(random)),
        // What is handed over may have been rounded, and so be a little off zero.
        rounds_(random, world, flights_ + 1, false) {
    for (int i = 0; i <= flights_; ++i) beside_.push_back(MakeAllreduce(random, world));
  }

  const char* name() const override { return "flights"; }

  void Run(Place& place) override {
    const int rank = place.rank;
    Weights& own = rounds_.weights[rank];
    for (int round = 0; round <= flights_; ++round) {
      rounds_.Train(rank, round);
      const bool flush = round == flights_;
      if (flush && !lands_) return;
      const std::vector<const void*> values = Read(own.values), starts = Read(own.starts);
      Tensors trained(own.values), before(own.starts);
      const std::vector<void*> new_values = Write(own.values), new_starts = Write(own.starts);
      const SyncTensors tensors{SpecsOf(own.values),
                                values.data(),
                                starts.data(),
                                new_values.data(),
                                new_starts.data(),
                                {},
                                nullptr,
                                nullptr};
      // The number need not be the same on all ranks.
      place.flights.Sync(100 * number_ + rank, tensors, {options_, true, flush, true, 0}, "flight");
      if (flush) {
        // What came after the last change that was handed over.
        rounds_.brought[round][rank] = rounds_.brought[round][rank].empty()
                                           ? LastChanges(rank, round, trained, before)
                                           : rounds_.brought[round][rank];
      } else {
        rounds_.Note(rank, round, own.values, own.starts);
      }
      beside_[round]->Run(place);
    }
  }

  void Check() const override {
    if (lands_) rounds_.Check(options_, world_);
    for (int i = 0; i <= flights_; ++i) {
      if (i < flights_ || lands_) beside_[i]->Check();
    }
  }

 private:
  std::vector<Vector> LastChanges(int rank, int round, const Tensors& values,
                                  const Tensors& starts) const {
    std::vector<Vector> changes;
    for (size_t t = 0; t < values.size(); ++t) {
      changes.push_back(ChangeOf(values[t], starts[t]));
      if (round > 0) changes[t] = Difference(changes[t], rounds_.brought[round - 1][rank][t]);
    }
    return changes;
  }

  const World& world_;
  const int64_t number_;
  const int flights_;
  const bool lands_;  // otherwise the last one is left under way
  const adasum::ReduceOptions options_;
  Rounds rounds_;
  std::vector<std::unique_ptr<Step>> beside_;
};

}  // namespace

std::unique_ptr<Step> MakeSync(Random& random, const World& world) {
  return std::make_unique<Sync>(random, world);
}

std::unique_ptr<Step> MakeUnevenSyncs(Random& random, const World& world) {
  return std::make_unique<UnevenSyncs>(random, world);
}

std::unique_ptr<Step> MakeFlights(Random& random, const World& world, int64_t number) {
  return std::make_unique<FlightsBesideTraining>(random, world, number);
}

}  // namespace core_test

#include "partition.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <future>
#include <limits>
#include <utility>

#include "call.h"
#include "error.h"

namespace adasum {

namespace {

constexpr int64_t kNoTensor = -1;

// What ranks have to know of each other before a round, as numbers that are summed.
struct Tally {
  double bad = 0;       // owners whose change is not finite
  double brings = 0;    // owners with a change to bring
  double goes_on = 0;   // ranks that do not flush
  double is_error = 0;  // owners whose change is not finite, and that is an error

  static constexpr int64_t kNumbers = 4;
};

void AllreduceSum(Communicator& communicator, const double* numbers, double* sums, int64_t count,
                  const std::string& name) {
  const TensorSpec spec{DType::kFloat64, "float64", sizeof(double), &count, 1, ""};
  const void* input = numbers;
  void* output = sums;
  ReduceOptions options;
  options.op = Op::kSum;
  communicator.Allreduce({spec}, &input, &output, options, name);
}

Tally Sum(Communicator& communicator, Tally own, const std::string& name) {
  Tally sum;
  static_assert(sizeof(Tally) == Tally::kNumbers * sizeof(double));
  AllreduceSum(communicator, &own.bad, &sum.bad, Tally::kNumbers, name);
  return sum;
}

std::string Join(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) {
    if (!text.empty()) all += (all.empty() ? "" : ", ") + text;
  }
  return all;
}

}  // namespace

PartitionPlace PartitionPlace::Of(int rank, const Hosts& hosts) {
  const std::vector<int>& host = hosts.ranks[hosts.host_of[rank]];
  size_t lanes = host.size();
  for (const std::vector<int>& ranks : hosts.ranks) lanes = std::min(lanes, ranks.size());
  const auto place = std::find(host.begin(), host.end(), rank) - host.begin();
  return {static_cast<int>(lanes), static_cast<int>(place)};
}

Partition::Partition(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> lane,
                     bool all_lanes, bool several_threads)
    : host_(std::move(host)),
      lane_(std::move(lane)),
      all_lanes_(all_lanes),
      several_threads_(several_threads) {}

void Partition::HostSum(const double* numbers, double* sums, int64_t count,
                        const std::string& name) {
  AllreduceSum(*host_, numbers, sums, count, name);
}

void Partition::ReduceToOwners(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                               void* const* outputs, const std::vector<int>& owner_of,
                               int64_t fusion_threshold, const std::string& name) {
  host_->ReduceToOwners(tensors, inputs, outputs, owner_of, fusion_threshold, name);
}

void Partition::ShareFromOwners(const std::vector<TensorSpec>& tensors, void* const* values,
                                const std::vector<int>& owner_of, int64_t fusion_threshold,
                                const std::string& name) {
  host_->ShareFromOwners(tensors, values, owner_of, fusion_threshold, name);
}

// Tensors that are reduced over the hosts, and then shared, together.
struct Chunk {
  std::vector<int64_t> tensors;
  std::vector<TensorSpec> specs;
  std::vector<int> owner_of;
  std::vector<void*> values;
};

class Partition::SyncRound {
 public:
  SyncRound(Partition& partition, const SyncTensors& tensors, const std::vector<int>& owner_of,
            const SyncOptions& options, const std::string& name)
      : partition_(partition),
        tensors_(tensors),
        options_(options),
        name_(name),
        place_(partition.host_->transport()->rank()),
        pending_(options.pending) {
    for (size_t t = 0; t < tensors.specs.size(); ++t) {
      is_mine_.push_back(owner_of[t] == place_ && partition.lane_ != nullptr);
      CopyTensor(t, tensors.values[t], tensors.new_values[t]);
      if (is_mine_[t]) CopyTensor(t, tensors.starts[t], tensors.new_starts[t]);
    }
    MakeChunks(owner_of);
    result_.report.orthogonality.assign(tensors.specs.size(), 0);
  }

  // Returns whether there is another one.
  bool Run() {
    const Tally all = AgreeOnRound();
    const bool again = options_.flush && all.goes_on > 0;
    if (all.is_error > 0) ThrowNonfinite();
    if (all.brings > 0) {
      if (counts_as_zero_) result_.skipped = true;
      Reduce();
      if (result_.syncs++ == 0) ShareReport();
    }
    pending_ = false;
    return again;
  }

  const SyncResult& result() const { return result_; }

 private:
  // A few, so that one can be shared while the next is reduced.
  void MakeChunks(const std::vector<int>& owner_of) {
    constexpr int64_t kChunks = 8, kSmallest = 4 << 20;
    int64_t bytes = 0;
    for (const TensorSpec& spec : tensors_.specs) bytes += spec.bytes();
    Fusion fusion(HostDevice(), std::max(kSmallest, bytes / kChunks));
    fusion.Add(tensors_.specs, Op::kSum, owner_of, partition_.host_->transport()->size());
    for (const Bucket& bucket : fusion.buckets()) {
      Chunk& chunk = chunks_.emplace_back();
      for (const int64_t t : bucket.tensors) {
        chunk.tensors.push_back(t);
        chunk.specs.push_back(tensors_.specs[t]);
        chunk.owner_of.push_back(owner_of[t]);
        chunk.values.push_back(tensors_.new_values[t]);
      }
    }
  }

  // All ranks get the same answer, but for `bad`, which is the host's.
  Tally AgreeOnRound() {
    Tally own;
    bad_ = kNoTensor;
    bool is_zero = true;
    for (size_t t = 0; t < tensors_.specs.size(); ++t) {
      const TensorSpec& spec = tensors_.specs[t];
      if (!is_mine_[t] || spec.count() == 0 || spec.dtype == DType::kOther) continue;
      Inspection found;
      HostDevice().kernels(spec.dtype).Inspect(Value(t), Start(t), spec.count(), &found);
      if (!found.finite && bad_ == kNoTensor) bad_ = static_cast<int64_t>(t);
      is_zero = is_zero && found.zero;
    }
    own.bad = bad_ == kNoTensor ? 0 : 1;
    own.brings = pending_ || !is_zero ? 1 : 0;
    own.goes_on = options_.flush ? 0 : 1;
    Tally of_host = Sum(*partition_.host_, own, name_ + ", the host's ranks");
    counts_as_zero_ = of_host.bad > 0;
    const bool often = options_.skips_in_a_row + 1 >= SyncOptions::kMaxSkipsInARow;
    of_host.is_error = of_host.bad > 0 && (options_.raise_nonfinite || often) ? 1 : 0;
    Tally all = of_host;
    if (partition_.lane_ != nullptr) all = Sum(*partition_.lane_, of_host, name_ + ", hosts");
    if (!partition_.all_lanes_) {
      // Those without a lane have to be told. Others know it, so it counts just once.
      Tally told = place_ == 0 ? all : Tally{};
      all = Sum(*partition_.host_, told, name_ + ", what the hosts have said");
    }
    return all;
  }

  void Reduce() {
    std::future<void> shared;
    for (const Chunk& chunk : chunks_) {
      std::exception_ptr refused;
      std::string name = name_;
      try {
        ReduceOverHosts(chunk);
      } catch (const Error& error) {
        // The host's ranks wait for this one, and get to know by another name of the call.
        refused = std::current_exception();
        name += ", of which a rank says: " + std::string(error.what());
      }
      if (shared.valid()) shared.get();
      const auto share = [this, &chunk, name] {
        partition_.host_->ShareFromOwners(chunk.specs, chunk.values.data(), chunk.owner_of,
                                          options_.reduce.fusion_threshold, name);
      };
      if (partition_.several_threads_ && refused == nullptr) {
        shared = std::async(std::launch::async, share);
        continue;
      }
      try {
        share();
      } catch (const Error&) {
        if (refused == nullptr) throw;
      }
      if (refused != nullptr) std::rethrow_exception(refused);
    }
    if (shared.valid()) shared.get();
  }

  void ReduceOverHosts(const Chunk& chunk) {
    if (partition_.lane_ == nullptr) return;
    if (partition_.lane_->transport()->size() == 1) {
      KeepChanges(chunk);
      return;
    }
    std::vector<TensorSpec> specs;
    std::vector<const void*> values, starts;
    std::vector<void*> new_values, new_starts;
    std::vector<int64_t> mine;
    for (const int64_t t : chunk.tensors) {
      if (!is_mine_[t]) continue;
      mine.push_back(t);
      specs.push_back(tensors_.specs[t]);
      starts.push_back(Start(t));
      values.push_back(counts_as_zero_ ? Start(t) : Value(t));
      new_values.push_back(tensors_.new_values[t]);
      new_starts.push_back(tensors_.new_starts[t]);
    }
    SyncOptions options = options_;
    options.pending = true;
    options.flush = false;
    options.skips_in_a_row = 0;
    const SyncTensors tensors{
        std::move(specs), values.data(), starts.data(), new_values.data(), new_starts.data(), {},
        nullptr,          nullptr};
    const Report report = partition_.lane_->Sync(tensors, options, name_).report;
    if (result_.syncs > 0) return;
    for (size_t i = 0; i < mine.size(); ++i) {
      result_.report.orthogonality[mine[i]] = report.orthogonality.empty()
                                                  ? std::numeric_limits<double>::quiet_NaN()
                                                  : report.orthogonality[i];
    }
    result_.report.all_equal = result_.report.all_equal && report.all_equal;
    result_.report.any_nonzero = result_.report.any_nonzero || report.any_nonzero;
  }

  // Of the only host.
  void KeepChanges(const Chunk& chunk) {
    for (const int64_t t : chunk.tensors) {
      if (!is_mine_[t]) continue;
      if (counts_as_zero_) CopyTensor(t, Start(t), tensors_.new_values[t]);
      CopyTensor(t, Value(t), tensors_.new_starts[t]);
      result_.report.orthogonality[t] = std::numeric_limits<double>::quiet_NaN();
    }
    result_.report.all_equal = false;
  }

  void CopyTensor(size_t t, const void* from, void* to) const {
    const int64_t bytes = tensors_.specs[t].bytes();
    if (bytes > 0 && from != to) std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  // What the owners know becomes known to their host's ranks.
  void ShareReport() {
    std::vector<double>& known = result_.report.orthogonality;
    std::vector<double> all(known.size() + 2);
    std::copy(known.begin(), known.end(), all.begin());
    const size_t differ = known.size(), nonzero = differ + 1;
    all[differ] = result_.report.all_equal ? 0 : 1;
    all[nonzero] = result_.report.any_nonzero ? 1 : 0;
    std::vector<double> sums(all.size());
    AllreduceSum(*partition_.host_, all.data(), sums.data(), static_cast<int64_t>(all.size()),
                 name_ + ", what was found");
    std::copy_n(sums.begin(), known.size(), known.begin());
    result_.report.all_equal = sums[differ] == 0;
    result_.report.any_nonzero = sums[nonzero] > 0;
  }

  [[noreturn]] void ThrowNonfinite() {
    std::string mine;
    if (bad_ != kNoTensor) {
      const std::string name(tensors_.specs[bad_].name);
      mine = "tensor " + std::to_string(bad_) + (name.empty() ? "" : " (" + name + ")");
    }
    std::string where = Join(partition_.host_->Gather(mine, name_));
    if (partition_.lane_ != nullptr) {
      std::vector<std::string> hosts = partition_.lane_->Gather(where, name_);
      for (size_t host = 0; host < hosts.size(); ++host) {
        if (!hosts[host].empty()) hosts[host] += " of host " + std::to_string(host);
      }
      where = Join(hosts);
    }
    if (!partition_.all_lanes_) {
      where = partition_.host_->Gather(place_ == 0 ? where : "", name_)[0];
    }
    throw Error(ErrorKind::kInvalidArgument,
                "the change of the weights since the last sync holds NaN or infinity in " + where);
  }

  const void* Value(size_t t) const { return tensors_.new_values[t]; }
  const void* Start(size_t t) const {
    return result_.syncs == 0 ? tensors_.starts[t] : tensors_.new_starts[t];
  }

  Partition& partition_;
  const SyncTensors& tensors_;
  const SyncOptions& options_;
  const std::string& name_;
  const int place_;
  bool pending_;
  bool counts_as_zero_ = false;
  int64_t bad_ = kNoTensor;
  std::vector<bool> is_mine_;
  std::vector<Chunk> chunks_;
  SyncResult result_;
};

SyncResult Partition::Sync(const SyncTensors& tensors, const std::vector<int>& owner_of,
                           const SyncOptions& options, const std::string& name) {
  CheckReducible(tensors.specs);
  SyncRound round(*this, tensors, owner_of, options, name);
  while (round.Run()) {
  }
  return round.result();
}

}  // namespace adasum

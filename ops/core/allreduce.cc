#include "allreduce.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

#include "faults.h"
#include "rvh.h"
#include "slices.h"

namespace adasum {

namespace {

// What all buckets of a call share.
struct Context {
  Transport& transport;
  Workspace& workspace;
  Device& device;
  const Plan& plan;
  const Ends& ends;
  Halves halves;
  HostMemory* memory;      // null where messages are sent
  int64_t slot_bytes;      // of a bucket; two are in work at a time
  int64_t received_bytes;  // of what is received for a bucket
  int64_t sums_bytes;      // of the sums of a level, in memory after the two buckets
  int64_t norms_bytes;     // of what is known of a bucket's norms and sides, after the sums
  char* buckets;           // this rank's two
  char* scratch;
  char* received;
};

// Reduces over the lanes of a host.
class LaneSums {
 public:
  explicit LaneSums(const Context& context) : context_(context) {}

  void operator()(Reduction reduction, double* values, size_t size) const {
    const Plan& plan = context_.plan;
    if (plan.lanes == 1) return;
    if (context_.memory == nullptr) {
      const Group lanes{{plan.host.ranks.begin(), plan.host.ranks.begin() + plan.lanes},
                        plan.host.place};
      GroupAllreduce(context_.transport, lanes, reduction, values, size);
      return;
    }
    // A lane that brings its share of the next sum but one has seen all of this one, because all
    // have brought their share of the one between: so two places for them do.
    FaultPlace("dots");
    const uint32_t count = ++context_.workspace.sums_done;
    HostMemory& memory = *context_.memory;
    std::copy_n(values, size, Place(plan.host.place, count));
    memory.Post(HostMemory::kSums, count);
    std::vector<const double*> of_lane;
    for (int lane = 0; lane < plan.lanes; ++lane) {
      if (lane != plan.host.place) memory.Await(lane, HostMemory::kSums, count);
      of_lane.push_back(Place(lane, count));
    }
    ReduceInMemory(of_lane, reduction, values, size);
  }

 private:
  double* Place(int lane, uint32_t count) const {
    char* after_buckets = context_.memory->Of(lane) + 2 * context_.slot_bytes;
    return reinterpret_cast<double*>(after_buckets + count % 2 * context_.sums_bytes);
  }

  const Context& context_;
};

// Over all pairs: what Report tells of them, as numbers of which the largest counts.
struct Sides {
  double differ = 0;
  double nonzero = 0;

  void Add(const Sides& other) {
    differ = std::max(differ, other.differ);
    nonzero = std::max(nonzero, other.nonzero);
  }
};

class BucketCall {
 public:
  // count: of the buckets so far, with this one.
  BucketCall(const Context& context, const Bucket& bucket, uint32_t count)
      : context_(context),
        plan_(context.plan),
        bucket_(bucket),
        count_(count),
        slot_at_(count_ % 2 * context.slot_bytes),
        x_(context.buckets + slot_at_),
        received_(context.received + count_ % 2 * context.received_bytes),
        slices_(SlicesOf(bucket, plan_)),
        slice_(SliceOfMember(plan_.host.place)) {
    const Op in_host = bucket.op == Op::kAdasum ? plan_.in_host : bucket.op;
    if (plan_.host.size() > 1 && is_lane() && context.halves != Halves::kShareFromOwners) {
      in_host_.emplace(context.device, bucket.kernels, bucket.layout, in_host, plan_.order,
                       plan_.host.size(), slices_, plan_.host.place);
    }
    if (!plan_.rows.empty() && is_lane()) {
      over_hosts_.emplace(context.transport, context.device, bucket.kernels, bucket.layout,
                          bucket.op, Leaves{plan_.rows[plan_.host.place], plan_.weights}, slice_,
                          RvhBuffers{x_, received_}, stream());
    }
  }

  // Fills the buffer, but for what nobody else reads: that is filled when this rank reads it.
  // free_after: how many buckets have to be done with before their memory can be this one's.
  void Fill(uint32_t free_after) {
    FaultPlace("fill");
    context_.device.EndBatch();  // the memory may still be read
    if (context_.memory != nullptr) context_.memory->AwaitAll(HostMemory::kEmptied, free_after);
    const Range whole = bucket_.layout.whole();
    if (context_.halves == Halves::kShareFromOwners) {
      Fill(slice_);
    } else if (plan_.host.size() > 1) {
      Fill({whole.begin, slice_.begin});
      Fill({slice_.end, whole.end});
    } else {
      Fill(whole);
    }
    if (plan_.host.size() == 1 && over_hosts_) over_hosts_->Begin();
  }

  // Tells the others that it is filled.
  void PostFilled() {
    if (context_.memory != nullptr) context_.memory->Post(HostMemory::kFilled, count_);
  }

  // Returns when all others have filled theirs.
  void AwaitFilled() {
    if (context_.memory != nullptr && in_host_) {
      context_.memory->AwaitAll(HostMemory::kFilled, count_);
    }
  }

  // Reduces and empties it.
  void Finish(Report& report) {
    FaultPlace("reduce");
    TensorNorms norms;
    if (plan_.host.size() > 1 && context_.halves != Halves::kShareFromOwners) {
      norms = CombineInHost();
    }
    if (over_hosts_) norms = CombineOverHosts(std::move(norms));
    context_.device.Finish();
    if (in_host_) Note(*in_host_);
    if (over_hosts_) Note(*over_hosts_);
    if (context_.halves == Halves::kReduceToOwners && plan_.host.size() > 1) {
      if (context_.memory != nullptr) context_.memory->Post(HostMemory::kEmptied, count_);
    } else if (plan_.host.size() > 1) {
      Distribute(norms);
    } else if (plan_.rows.empty()) {
      Emit(bucket_.layout.whole(), x_);
    }
    for (size_t t = 0; t < norms.combined.size(); ++t) {
      report.orthogonality[bucket_.tensors[t]] = norms.combined[t] / norms.inputs[t];
    }
    report.all_equal = report.all_equal && sides_.differ == 0;
    report.any_nonzero = report.any_nonzero || sides_.nonzero != 0;
  }

 private:
  // Where tensors have owners, the lanes' slices are theirs.
  static std::vector<Range> SlicesOf(const Bucket& bucket, const Plan& plan) {
    if (bucket.of_owner.empty()) {
      return adasum::SlicesOf(bucket.layout, plan.lanes, bucket.kernels.item_bytes);
    }
    std::vector<Range> slices = bucket.of_owner;
    slices.resize(plan.lanes, {bucket.layout.size(), bucket.layout.size()});
    return slices;
  }

  bool is_lane() const { return plan_.host.place < plan_.lanes; }

  Range SliceOfMember(int member) const {
    return member < plan_.lanes ? slices_[member] : Range{0, 0};
  }

  char* At(int64_t element) const { return x_ + element * bucket_.kernels.item_bytes; }
  int64_t Bytes(Range range) const { return range.size() * bucket_.kernels.item_bytes; }
  Transport::Stream stream() const {
    return count_ % 2 == 0 ? Transport::kEvenBuckets : Transport::kOddBuckets;
  }

  // This rank's slice of what the host's ranks have.
  TensorNorms CombineInHost() {
    SliceVectors slice{VectorsOfHost(), plan_.host.place, At(slice_.begin), {}, {}};
    if (!in_host_) return {};
    slice.fill = [this](Range piece) { Fill(piece); };
    if (plan_.rows.empty()) slice.emit = [this](Range piece) { Emit(piece, x_); };
    return in_host_->Combine(slice, context_.scratch, LaneSums(context_));
  }

  // Where the members' vectors have this rank's slice. Without memory, members that own no slice
  // send theirs too.
  std::vector<const char*> VectorsOfHost() {
    std::vector<const char*> vectors(plan_.host.size());
    if (context_.memory != nullptr) {
      for (int member = 0; member < plan_.host.size(); ++member) {
        vectors[member] = context_.memory->Of(member) + slot_at_ + (At(slice_.begin) - x_);
      }
      return vectors;
    }
    char* at = received_;
    vectors[plan_.host.place] = At(slice_.begin);
    ForEachOther([&](int to, int from) {
      const Range theirs = SliceOfMember(to);
      context_.transport.SendReceive(At(theirs.begin), Bytes(theirs), plan_.host.ranks[to], at,
                                     Bytes(slice_), plan_.host.ranks[from], stream());
      vectors[from] = at;
      at += Bytes(slice_);
    });
    return vectors;
  }

  TensorNorms CombineOverHosts(TensorNorms in_host) {
    // Of each tensor, one lane has the norms.
    if (!in_host.inputs.empty()) ReduceNorms(in_host, LaneSums(context_));
    Combiner::OverRanks over_lanes;
    if (plan_.lanes > 1) over_lanes = LaneSums(context_);
    if (plan_.host.size() == 1) {
      return over_hosts_->Finish(std::move(in_host), over_lanes,
                                 [this](Range part) { Emit(part, x_); });
    }
    over_hosts_->Begin();
    return over_hosts_->Finish(std::move(in_host), over_lanes, {});
  }

  // Each rank reads the slices of all lanes, and what the others know of the norms and sides.
  void Distribute(TensorNorms& norms) {
    FaultPlace("gather");
    const bool has_norms =
        bucket_.op == Op::kAdasum && (plan_.in_host == Op::kAdasum || !plan_.rows.empty());
    if (has_norms && !is_lane()) {
      norms.inputs.assign(bucket_.layout.tensors(), kUnknown);
      norms.combined = norms.inputs;
    }
    if (context_.memory == nullptr) {
      DistributeByMessages();
      OverHost()(Reduction::kMax, &sides_.differ, 2);
      if (has_norms) ReduceNorms(norms, OverHost());
      return;
    }
    HostMemory& memory = *context_.memory;
    if (is_lane()) {
      *SidesOf(plan_.host.place) = sides_;
      if (has_norms) {
        double* place = NormsOf(plan_.host.place);
        std::copy(norms.inputs.begin(), norms.inputs.end(), place);
        std::copy(norms.combined.begin(), norms.combined.end(), place + norms.inputs.size());
      }
      memory.Post(HostMemory::kDone, count_);
    }
    // Each begins with its own, so that they do not all read the same one.
    for (int i = 0; i < plan_.host.size(); ++i) {
      const int lane = (plan_.host.place + i) % plan_.host.size();
      if (lane >= plan_.lanes) continue;
      if (lane == plan_.host.place && plan_.rows.empty()) continue;  // emitted when it was made
      if (lane != plan_.host.place) memory.Await(lane, HostMemory::kDone, count_);
      FaultPlace("emit");
      Emit(slices_[lane], memory.Of(lane) + slot_at_);
      if (lane == plan_.host.place) continue;
      sides_.Add(*SidesOf(lane));
      if (has_norms) TakeNorms(lane, norms);
    }
    memory.Post(HostMemory::kEmptied, count_);
  }

  void DistributeByMessages() {
    Range final = plan_.rows.empty() ? Range{0, 0} : slice_;
    ForEachOther([&](int to, int from) {
      const Range theirs = SliceOfMember(from);
      const auto transfer = context_.transport.Start(
          At(slice_.begin), Bytes(slice_), plan_.host.ranks[to], At(theirs.begin), Bytes(theirs),
          plan_.host.ranks[from], bucket_.kernels.message_bytes, stream());
      Emit(final, x_);
      final = theirs;
      transfer->Await();
    });
    Emit(final, x_);
  }

  double* NormsOf(int lane) const {
    char* after_sums = context_.memory->Of(lane) + 2 * (context_.slot_bytes + context_.sums_bytes);
    return reinterpret_cast<double*>(after_sums + count_ % 2 * context_.norms_bytes);
  }

  // After the norms.
  Sides* SidesOf(int lane) const {
    return reinterpret_cast<Sides*>(NormsOf(lane) + 2 * bucket_.layout.tensors());
  }

  void TakeNorms(int lane, TensorNorms& norms) const {
    const double* theirs = NormsOf(lane);
    const size_t tensors = norms.inputs.size();
    bucket_.layout.ForEachPart(slices_[lane], [&](const Part& part) {
      norms.inputs[part.tensor] = theirs[part.tensor];
      norms.combined[part.tensor] = theirs[tensors + part.tensor];
    });
  }

  // What some know becomes known to all.
  static void ReduceNorms(TensorNorms& norms, const Combiner::OverRanks& over_ranks) {
    std::vector<double> all(norms.inputs);
    all.insert(all.end(), norms.combined.begin(), norms.combined.end());
    // The largest number, which those who know one agree on; fmax ignores NaN.
    over_ranks(Reduction::kMax, all.data(), all.size());
    std::copy_n(all.begin(), norms.inputs.size(), norms.inputs.begin());
    std::copy_n(all.begin() + static_cast<int64_t>(norms.inputs.size()), norms.combined.size(),
                norms.combined.begin());
  }

  Combiner::OverRanks OverHost() const {
    return [this](Reduction reduction, double* values, size_t count) {
      GroupAllreduce(context_.transport, plan_.host, reduction, values, count);
    };
  }

  // Calls visit(to, from) so that each member has each other one as `to` and as `from`.
  template <typename Visit>
  void ForEachOther(Visit visit) const {
    const int place = plan_.host.place, members = plan_.host.size();
    for (int distance = 1; distance < members; ++distance) {
      visit((place + distance) % members, (place - distance + members) % members);
    }
  }

  void Fill(Range range) const {
    bucket_.layout.ForEachPart(range, [&](const Part& part) {
      context_.ends.fill(bucket_.kernels, bucket_.tensors[part.tensor], InTensor(part),
                         part.range.size(), At(part.range.begin));
    });
  }

  void Emit(Range range, const char* x) const {
    bucket_.layout.ForEachPart(range, [&](const Part& part) {
      context_.ends.emit(bucket_.kernels, bucket_.tensors[part.tensor], InTensor(part),
                         part.range.size(), x + part.range.begin * bucket_.kernels.item_bytes);
    });
  }

  int64_t InTensor(const Part& part) const {
    return part.range.begin - bucket_.layout.tensor(part.tensor).begin;
  }

  template <typename Stage>
  void Note(const Stage& stage) {
    if (!stage.all_equal()) sides_.differ = 1;
    if (stage.any_nonzero()) sides_.nonzero = 1;
  }

  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

  const Context& context_;
  const Plan& plan_;
  const Bucket& bucket_;
  const uint32_t count_;
  const int64_t slot_at_;
  char* const x_;
  char* const received_;
  const std::vector<Range> slices_;
  const Range slice_;
  std::optional<Slices> in_host_;
  std::optional<Rvh> over_hosts_;
  Sides sides_;
};

}  // namespace

int64_t DefaultFusionThreshold(const Transport& transport, const Device& device) {
  // Measured, see docs/performance.md: in memory what the caches hold, over a network what its
  // latency does not matter for.
  constexpr int64_t kInMemory = 4 << 20, kOverNetwork = 16 << 20, kOnDevice = 64 << 20;
  if (!device.is_host()) return kOnDevice;
  return transport.hosts().ranks.size() == 1 ? kInMemory : kOverNetwork;
}

class AllreduceCall::State {
 public:
  State(Transport& transport, Workspace& workspace, const Fusion& fusion, Algorithm algorithm,
        const Ends& ends, Halves halves)
      : fusion_(fusion),
        plan_(Plan::Make(transport, algorithm)),
        context_{transport, workspace, workspace.device, plan_,   ends,   halves, nullptr, 0, 0,
                 0,         0,         nullptr,          nullptr, nullptr} {
    const int members = plan_.host.size();
    for (const Bucket& bucket : fusion.buckets()) {
      const int64_t bytes = Buffer::Aligned(bucket.bytes());
      // Slices differ by what keeps tensors whole.
      int64_t slice_bytes = Buffer::Aligned(bytes / plan_.lanes * 5 / 4) + Buffer::kAlignment;
      for (const Range& owned : bucket.of_owner) {
        slice_bytes =
            std::max(slice_bytes, Buffer::Aligned(owned.size() * bucket.kernels.item_bytes));
      }
      const int64_t pairs = std::max(1, members / 2), tensors = bucket.layout.tensors();
      const auto largest = [](int64_t& size, int64_t wanted) {
        size = std::max(size, Buffer::Aligned(wanted));
      };
      constexpr int64_t kDouble = sizeof(double);
      largest(context_.slot_bytes, bytes);
      largest(context_.sums_bytes, pairs * tensors * 3 * kDouble);
      largest(context_.norms_bytes, (2 * tensors + 2) * kDouble);
      if (!plan_.rows.empty()) largest(context_.received_bytes, Rvh::ReceivedBytes(slice_bytes));
      if (!plan_.in_memory) largest(context_.received_bytes, (members - 1) * slice_bytes);
      if (members > 2) largest(scratch_bytes_, members / 2 * slice_bytes);
    }
    if (plan_.in_memory && members > 1) context_.memory = transport.host_memory();
  }

  void Prepare() {
    if (context_.memory == nullptr || fusion_.buckets().empty()) return;
    if (memory_bytes() > context_.memory->capacity()) return;  // to get more takes all ranks
    GetMemory();
    first_ = Filled(0);
  }

  Report Run() {
    Report report;
    report.orthogonality.assign(fusion_.tensors(), std::numeric_limits<double>::quiet_NaN());
    if (fusion_.buckets().empty()) return report;
    context_.transport.Connect();
    Workspace& workspace = context_.workspace;
    std::unique_ptr<BucketCall> current = std::move(first_);
    if (!current) {
      GetMemory();
      current = Filled(0);
      current->PostFilled();
      current->AwaitFilled();
    }
    const size_t buckets = fusion_.buckets().size();
    for (size_t i = 0; i < buckets; ++i) {
      std::unique_ptr<BucketCall> next;
      if (i + 1 < buckets) {
        next = Filled(i + 1);
        next->PostFilled();
      }
      if (i > 0) current->AwaitFilled();
      current->Finish(report);
      current = std::move(next);
    }
    if (plan_.in_memory) {
      workspace.buckets_done += static_cast<uint32_t>(buckets);
      workspace.slot_bytes = context_.slot_bytes;
    }
    return report;
  }

 private:
  int64_t memory_bytes() const {
    return 2 * (context_.slot_bytes + context_.sums_bytes + context_.norms_bytes);
  }

  void GetMemory() {
    Workspace& workspace = context_.workspace;
    if (context_.memory != nullptr) {
      context_.memory->Reserve(memory_bytes());
      context_.buckets = context_.memory->Of(context_.memory->member());
    } else {
      context_.buckets = workspace.buckets.Reserve(2 * context_.slot_bytes);
    }
    context_.scratch = workspace.scratch.Reserve(scratch_bytes_);
    context_.received = workspace.received.Reserve(2 * context_.received_bytes);
  }

  std::unique_ptr<BucketCall> Filled(size_t i) {
    const Workspace& workspace = context_.workspace;
    const uint32_t count = workspace.buckets_done + static_cast<uint32_t>(i) + 1;
    auto call = std::make_unique<BucketCall>(context_, fusion_.buckets()[i], count);
    // The place was the next but one bucket's before. Those of a call with other places may lie
    // anywhere.
    const bool same_places = workspace.slot_bytes == context_.slot_bytes;
    call->Fill(i == 0 && !same_places ? count - 1 : count - 2);
    return call;
  }

  const Fusion& fusion_;
  const Plan plan_;
  Context context_;
  int64_t scratch_bytes_ = 0;
  std::unique_ptr<BucketCall> first_;
};

AllreduceCall::AllreduceCall(Transport& transport, Workspace& workspace, const Fusion& fusion,
                             Algorithm algorithm, const Ends& ends, Halves halves)
    : state_(std::make_unique<State>(transport, workspace, fusion, algorithm, ends, halves)) {}

AllreduceCall::AllreduceCall(AllreduceCall&& other) = default;

AllreduceCall::~AllreduceCall() = default;

void AllreduceCall::Prepare() { state_->Prepare(); }

Report AllreduceCall::Run() { return state_->Run(); }

}  // namespace adasum

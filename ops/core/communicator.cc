#include "communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "agreement.h"
#include "call.h"
#include "error.h"
#include "faults.h"
#include "small.h"

namespace adasum {

namespace {

const std::string kNoName;

// Where a collective's result goes: to the outputs; or, if the inputs may still be needed, to
// memory of its own first.
class Results {
 public:
  Results(Device& device, const std::vector<TensorSpec>& tensors, void* const* outputs, bool apart)
      : device_(device), tensors_(tensors), outputs_(outputs) {
    if (!apart) return;
    for (const TensorSpec& tensor : tensors) {
      buffers_.emplace_back(device);
      apart_.push_back(buffers_.back().Reserve(tensor.bytes()));
    }
  }

  void* const* to() const { return apart_.empty() ? outputs_ : apart_.data(); }

  void Commit() const {
    device_.EndBatch();
    for (size_t t = 0; t < apart_.size(); ++t) {
      const TensorSpec& tensor = tensors_[t];
      if (tensor.bytes() == 0) continue;
      if (device_.is_host()) {
        std::memcpy(outputs_[t], apart_[t], static_cast<size_t>(tensor.bytes()));
      } else {
        device_.kernels(tensor.dtype).Copy(apart_[t], tensor.count(), outputs_[t]);
      }
    }
    device_.Finish();
  }

 private:
  Device& device_;
  const std::vector<TensorSpec>& tensors_;
  void* const* const outputs_;
  std::vector<Buffer> buffers_;
  std::vector<void*> apart_;
};

// Whatever a call does on a device has ended with it, also with an error.
class WorkOnDevice {
 public:
  explicit WorkOnDevice(Device& device) : device_(device) {}
  ~WorkOnDevice() { device_.Cancel(); }

 private:
  Device& device_;
};

int64_t RowBytes(const TensorSpec& tensor) {
  int64_t bytes = tensor.item_bytes;
  for (int i = 1; i < tensor.rank; ++i) bytes *= tensor.dims[i];
  return bytes;
}

// Where a rank is after others were lost. If it was lost itself, the next one after it, or the
// first.
int RankAfter(const Shrinking& shrinking, int rank) {
  if (rank < 0 || rank >= shrinking.old_size) return rank;
  const std::vector<int>& lost = shrinking.lost;
  const auto before = std::lower_bound(lost.begin(), lost.end(), rank) - lost.begin();
  return (rank - static_cast<int>(before)) % shrinking.new_size;
}

bool IsLoss(const Error& error) {
  return error.kind() == ErrorKind::kRankLost || error.kind() == ErrorKind::kTransport;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Transport> transport, std::shared_ptr<Watchdog> watchdog,
                           Watchdog::Lane lane)
    : watchdog_(std::move(watchdog)),
      lane_(lane),
      current_(std::move(transport)),
      saying_buffers_(std::make_unique<SayingBuffers>()),
      transport_(current_) {}

std::shared_ptr<Transport> Communicator::transport() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return transport_;
}

Communicator::OnDevice& Communicator::On(Device& device) {
  const auto known = devices_.find(&device);
  if (known != devices_.end()) return known->second;
  OnDevice& made = devices_.emplace(&device, device).first->second;
  made.transport = device.Connect(*current_);
  return made;
}

Transport& Communicator::Bulk(Device& device) {
  Transport* transport = On(device).transport.get();
  return transport == nullptr ? *current_ : *transport;
}

void Communicator::GoOnWithoutTheDead() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (current_->size() > 1 && !current_->fault_tolerant()) {
    throw Error(ErrorKind::kState,
                "this MPI does not go on after a process has died: start the job with Open MPI 5's "
                "`mpirun --with-ft ulfm`");
  }
  goes_on_ = true;
}

int64_t Communicator::shrinkings() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return static_cast<int64_t>(shrinkings_.size());
}

Shrinking Communicator::shrinking(int64_t index) const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return shrinkings_.at(static_cast<size_t>(index));
}

Communicator::Outcome Communicator::Attempt(const std::function<void()>& body,
                                            const std::function<bool()>& untouched) {
  if (goes_on()) return AttemptTogether(body, untouched);
  try {
    body();
    return Outcome::kDone;
  } catch (const Error& error) {
    if (!current_->fault_tolerant() || !IsLoss(error)) throw;
    // Others may wait for this rank, which will not come.
    current_->Revoke();
    const std::vector<int> lost = current_->KnownLost();
    throw Error(ErrorKind::kRankLost, (lost.empty() ? "a rank" : NameRanks(lost)) +
                                          " has died, so this collective cannot end (" +
                                          error.what() + "); elastic=True lets the others go on");
  }
}

// A rank may have got through where another one has not, so they tell each other, which works
// whoever dies.
Communicator::Outcome Communicator::AttemptTogether(const std::function<void()>& body,
                                                    const std::function<bool()>& untouched) {
  constexpr uint32_t kCameThrough = 1, kUntouched = 2;
  std::exception_ptr refused;
  std::string problem;
  uint32_t flags = kCameThrough;
  try {
    body();
  } catch (const Error& error) {
    if (IsLoss(error)) {
      flags = 0;
      problem = error.what();
      current_->Revoke();
    } else {
      refused = std::current_exception();
    }
  }
  FaultPlace("vote");
  if (untouched()) flags |= kUntouched;
  const Transport::Vote vote = current_->AskLiving(flags);
  if (vote.all_live && (vote.flags & kCameThrough)) {
    if (refused != nullptr) std::rethrow_exception(refused);
    return Outcome::kDone;
  }
  Shrink(problem);
  return vote.flags & kUntouched ? Outcome::kLostBefore : Outcome::kLostAfter;
}

void Communicator::UntilDone(const std::function<void()>& body) {
  while (Attempt(body) != Outcome::kDone) {
  }
}

void Communicator::Shrink(const std::string& problem) {
  FaultPlace("shrink");
  current_->Revoke();
  std::vector<int> lost;
  std::shared_ptr<Transport> living = current_->Shrink(&lost);
  if (lost.empty()) {
    throw Error(ErrorKind::kTransport, "all ranks live, but they do not get through to each other" +
                                           (problem.empty() ? "" : ": " + problem));
  }
  const Shrinking shrinking{lost, current_->rank(), current_->size(), living->rank(),
                            living->size()};
  retired_.push_back({std::move(current_), std::move(devices_), std::move(saying_buffers_)});
  devices_.clear();
  current_ = living;
  saying_buffers_ = std::make_unique<SayingBuffers>();
  if (watchdog_ != nullptr) watchdog_->Follow(living);
  if (living->rank() == 0) {
    std::fprintf(stderr, "tf_adasum: %s of %d %s died; %d %s.\n", NameRanks(lost).c_str(),
                 shrinking.old_size, lost.size() == 1 ? "has" : "have", shrinking.new_size,
                 shrinking.new_size == 1 ? "rank goes on alone" : "ranks go on");
    std::fflush(stderr);
  }
  std::lock_guard<std::mutex> lock(state_mutex_);
  transport_ = living;
  shrinkings_.push_back(shrinking);
}

void Communicator::Allreduce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                             void* const* outputs, const ReduceOptions& options,
                             const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(CallKind::kAllreduce), name);
  Device& device = *options.device;
  Fusion fusion(device, options.fusion_threshold);
  fusion.Add(tensors, options.op);
  const Results results(device, tensors, outputs, goes_on());
  const Ends ends{
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, char* to) {
        kernels.Copy(static_cast<const char*>(inputs[t]) + begin * kernels.item_bytes, count, to);
      },
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, const char* from) {
        kernels.Copy(from, count, static_cast<char*>(results.to()[t]) + begin * kernels.item_bytes);
      }};
  UntilDone([&] {
    const WorkOnDevice work(device);
    Saying saying;
    const bool is_small = IsSmall(*current_, device, fusion.bytes());
    Workspace& workspace = On(device).workspace;
    AllreduceCall reduction(Bulk(device), workspace, fusion, options.algorithm, ends);
    if (is_small) {
      saying = {fusion.bytes(), [&](char* to) { Fill(fusion, ends, to); }};
    } else {
      reduction.Prepare();
    }
    const Call call = Call(CallKind::kAllreduce, name).With(options).With(tensors);
    const Agreed agreed = Agree(*current_, *saying_buffers_, call, 0, saying);
    CheckReducible(tensors);
    if (is_small) {
      ReduceHere(*current_, workspace, fusion, options.algorithm, agreed.said, ends);
    } else {
      reduction.Run();
    }
    device.Finish();
  });
  results.Commit();
}

SyncResult Communicator::Sync(const SyncTensors& tensors, const SyncOptions& options,
                              const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(CallKind::kSync), name);
  SyncCall call(tensors, options, name, goes_on());
  Device& device = *options.reduce.device;
  bool again = true;
  while (again) {
    const Outcome outcome = Attempt(
        [&] {
          const WorkOnDevice work(device);
          again = call.Round(*current_, Bulk(device), On(device).workspace, *saying_buffers_);
          device.Finish();
        },
        [&] { return call.untouched(); });
    if (outcome == Outcome::kDone) {
      FaultPlace("commit");
      call.EndRound();
    } else if (outcome == Outcome::kLostBefore) {
      again = true;
    } else {
      call.GoBack();
      // A rank that does not flush comes again at the end of its next window.
      again = options.flush;
    }
  }
  return call.result();
}

bool Communicator::Broadcast(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                             void* const* outputs, int root, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(CallKind::kBroadcast), name);
  const Results results(HostDevice(), tensors, outputs, goes_on());
  bool changed = false;
  const auto before = static_cast<size_t>(shrinkings());
  UntilDone([&] {
    int root_now = root;
    for (size_t i = before; i < shrinkings_.size(); ++i) {
      root_now = RankAfter(shrinkings_[i], root_now);
    }
    changed = BroadcastOnce(tensors, inputs, results.to(), root_now, name);
  });
  results.Commit();
  return changed;
}

void Communicator::Allgather(const TensorSpec& tensor, const void* input,
                             const std::function<void*(int64_t)>& allocate,
                             const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(CallKind::kAllgather), name);
  if (!goes_on()) {
    Attempt([&] { AllgatherOnce(tensor, input, allocate, name); });
    return;
  }
  // The caller gives memory once, so not before it is known how much.
  Buffer buffer;
  int64_t rows = 0;
  char* gathered = nullptr;
  const int64_t row_bytes = RowBytes(tensor);
  const auto keep = [&](int64_t of_all) {
    rows = of_all;
    gathered = buffer.Reserve(rows * row_bytes);
    return gathered;
  };
  UntilDone([&] { AllgatherOnce(tensor, input, keep, name); });
  void* to = allocate(rows);
  if (to == nullptr && rows * row_bytes > 0) throw std::bad_alloc();
  if (rows * row_bytes > 0) std::memcpy(to, gathered, static_cast<size_t>(rows * row_bytes));
}

bool Communicator::BroadcastOnce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                                 void* const* outputs, int root, const std::string& name) {
  Agree(*current_, *saying_buffers_, Call(CallKind::kBroadcast, name).WithRoot(root).With(tensors));
  const int size = current_->size();
  if (root < 0 || root >= size) {
    throw Error(ErrorKind::kInvalidArgument, "`root_rank` must be a rank, from 0 to " +
                                                 std::to_string(size - 1) +
                                                 ". Received: " + std::to_string(root));
  }
  // A binomial tree over the ranks counted from root: a rank's parent is itself without its lowest
  // bit.
  const int place = (current_->rank() - root + size) % size;
  const auto rank_at = [&](int p) { return (p + root) % size; };
  bool changed = false;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const int64_t bytes = tensors[t].count() * tensors[t].item_bytes;
    if (bytes == 0) continue;
    FaultPlace("tensor");
    const void* data = inputs[t];
    int bit = 1;
    if (place != 0) {
      while ((place & bit) == 0) bit *= 2;
      char* received = On(HostDevice()).workspace.received.Reserve(bytes);
      current_->Receive(received, bytes, rank_at(place - bit));
      data = received;
      if (std::memcmp(inputs[t], received, static_cast<size_t>(bytes)) != 0) changed = true;
    } else {
      while (bit < size) bit *= 2;
    }
    for (bit /= 2; bit > 0; bit /= 2) {
      if (place + bit < size) current_->Send(data, bytes, rank_at(place + bit));
    }
    if (outputs[t] != data) std::memcpy(outputs[t], data, static_cast<size_t>(bytes));
  }
  return changed;
}

void Communicator::AllgatherOnce(const TensorSpec& tensor, const void* input,
                                 const std::function<void*(int64_t)>& allocate,
                                 const std::string& name) {
  const std::vector<TensorSpec> tensors{tensor};
  Agree(*current_, *saying_buffers_,
        Call(CallKind::kAllgather, name).With(tensors).IgnoringFirstDimension());
  if (tensor.rank == 0) {
    throw Error(ErrorKind::kInvalidArgument,
                "an allgather needs a tensor with at least one dimension, along which the ranks' "
                "parts are put together. Received: a scalar");
  }
  const int rank = current_->rank(), size = current_->size();
  const int to = (rank + 1) % size, from = (rank - 1 + size) % size;
  // A ring: in step s a rank hands on the block that it got in the step before, which is rank -
  // s's.
  std::vector<int64_t> rows(size);
  rows[rank] = tensor.dims[0];
  for (int step = 0; step < size - 1; ++step) {
    const int out = (rank - step + size) % size, in = (from - step + size) % size;
    current_->SendReceive(&rows[out], sizeof(int64_t), to, &rows[in], sizeof(int64_t), from);
  }
  const int64_t row_bytes = RowBytes(tensor);
  std::vector<int64_t> offsets(size + 1, 0);
  for (int r = 0; r < size; ++r) {
    if (!__builtin_add_overflow(offsets[r], rows[r], &offsets[r + 1])) continue;
    throw Error(ErrorKind::kInvalidArgument,
                "the ranks' parts together must have less than 2^63 rows");
  }
  char* gathered = static_cast<char*>(allocate(offsets[size]));
  if (gathered == nullptr && offsets[size] * row_bytes > 0) throw std::bad_alloc();
  const auto block = [&](int r) { return gathered + offsets[r] * row_bytes; };
  const auto bytes = [&](int r) { return rows[r] * row_bytes; };
  if (bytes(rank) > 0) std::memcpy(block(rank), input, static_cast<size_t>(bytes(rank)));
  for (int step = 0; step < size - 1; ++step) {
    const int out = (rank - step + size) % size, in = (from - step + size) % size;
    current_->SendReceive(block(out), bytes(out), to, block(in), bytes(in), from);
  }
}

void Communicator::Barrier(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(CallKind::kBarrier), name);
  UntilDone([&] { Agree(*current_, *saying_buffers_, Call(CallKind::kBarrier, name)); });
}

void Communicator::ReduceToOwners(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                                  void* const* outputs, const std::vector<int>& owner_of,
                                  int64_t fusion_threshold, const std::string& name) {
  const Ends ends{
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, char* to) {
        kernels.Copy(static_cast<const char*>(inputs[t]) + begin * kernels.item_bytes, count, to);
      },
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, const char* from) {
        kernels.Copy(from, count, static_cast<char*>(outputs[t]) + begin * kernels.item_bytes);
      }};
  RunHalf(Halves::kReduceToOwners, tensors, ends, owner_of, fusion_threshold, name);
}

void Communicator::ShareFromOwners(const std::vector<TensorSpec>& tensors, void* const* values,
                                   const std::vector<int>& owner_of, int64_t fusion_threshold,
                                   const std::string& name) {
  const Ends ends{
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, char* to) {
        kernels.Copy(static_cast<const char*>(values[t]) + begin * kernels.item_bytes, count, to);
      },
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, const char* from) {
        kernels.Copy(from, count, static_cast<char*>(values[t]) + begin * kernels.item_bytes);
      }};
  RunHalf(Halves::kShareFromOwners, tensors, ends, owner_of, fusion_threshold, name);
}

void Communicator::RunHalf(Halves half, const std::vector<TensorSpec>& tensors, const Ends& ends,
                           const std::vector<int>& owner_of, int64_t fusion_threshold,
                           const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallKind kind =
      half == Halves::kReduceToOwners ? CallKind::kReduceToOwners : CallKind::kShareFromOwners;
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(kind), name);
  Fusion fusion(HostDevice(), fusion_threshold);
  fusion.Add(tensors, Op::kSum, owner_of, current_->size());
  UntilDone([&] {
    AllreduceCall halved(*current_, On(HostDevice()).workspace, fusion, Algorithm::kHierarchicalSum,
                         ends, half);
    halved.Prepare();
    const ReduceOptions options{Op::kSum, Algorithm::kHierarchicalSum, fusion_threshold,
                                &HostDevice()};
    Agree(*current_, *saying_buffers_,
          Call(kind, name).With(options).With(tensors).WithOwners(owner_of));
    CheckReducible(tensors);
    // A rank that is alone has what it shares.
    if (half == Halves::kReduceToOwners || current_->size() > 1) halved.Run();
  });
}

std::vector<std::string> Communicator::Gather(const std::string& text, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(CallKind::kAllgather), name);
  std::vector<std::string> texts;
  UntilDone([&] {
    Agree(*current_, *saying_buffers_, Call(CallKind::kAllgather, name));
    texts = GatherTexts(*current_, text);
  });
  return texts;
}

void Communicator::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Watchdog::Call watched(watchdog_.get(), lane_, NameOf(CallKind::kShutdown), kNoName);
  UntilDone([&] { Agree(*current_, *saying_buffers_, Call(CallKind::kShutdown, kNoName)); });
}

}  // namespace adasum

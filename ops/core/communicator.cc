#include "communicator.h"

#include <cstring>
#include <new>

#include "agreement.h"
#include "call.h"
#include "error.h"
#include "small.h"

namespace adasum {

namespace {

const std::string kNoName;

}  // namespace

void Communicator::Allreduce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                             void* const* outputs, const ReduceOptions& options,
                             const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Fusion fusion(options.fusion_threshold);
  fusion.Add(tensors, options.op);
  const Ends ends{
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, char* to) {
        std::memcpy(to, static_cast<const char*>(inputs[t]) + begin * kernels.item_bytes,
                    static_cast<size_t>(count * kernels.item_bytes));
      },
      [&](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, const char* from) {
        std::memcpy(static_cast<char*>(outputs[t]) + begin * kernels.item_bytes, from,
                    static_cast<size_t>(count * kernels.item_bytes));
      }};
  Saying saying;
  const bool is_small = IsSmall(*transport_, fusion.bytes());
  AllreduceCall reduction(*transport_, workspace_, fusion, options.algorithm, ends);
  if (is_small) {
    saying = {fusion.bytes(), [&](char* to) { Fill(fusion, ends, to); }};
  } else {
    reduction.Prepare();
  }
  const Call call = Call(CallKind::kAllreduce, name).With(options).With(tensors);
  const Agreed agreed = Agree(*transport_, saying_buffers_, call, 0, saying);
  CheckReducible(tensors);
  if (is_small) {
    ReduceHere(*transport_, workspace_, fusion, options.algorithm, agreed.said, ends);
  } else {
    reduction.Run();
  }
}

SyncResult Communicator::Sync(const SyncTensors& tensors, const SyncOptions& options,
                              const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  return SyncRanks(*transport_, workspace_, saying_buffers_, tensors, options, name);
}

bool Communicator::Broadcast(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                             void* const* outputs, int root, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Agree(*transport_, saying_buffers_,
        Call(CallKind::kBroadcast, name).WithRoot(root).With(tensors));
  const int size = transport_->size();
  if (root < 0 || root >= size) {
    throw Error(ErrorKind::kInvalidArgument, "`root_rank` must be a rank, from 0 to " +
                                                 std::to_string(size - 1) +
                                                 ". Received: " + std::to_string(root));
  }
  // A binomial tree over the ranks counted from root: a rank's parent is itself without its lowest
  // bit.
  const int place = (transport_->rank() - root + size) % size;
  const auto rank_at = [&](int p) { return (p + root) % size; };
  bool changed = false;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const int64_t bytes = tensors[t].count() * tensors[t].item_bytes;
    if (bytes == 0) continue;
    const void* data = inputs[t];
    int bit = 1;
    if (place != 0) {
      while ((place & bit) == 0) bit *= 2;
      char* received = workspace_.received.Reserve(bytes);
      transport_->Receive(received, bytes, rank_at(place - bit));
      data = received;
      if (std::memcmp(inputs[t], received, static_cast<size_t>(bytes)) != 0) changed = true;
    } else {
      while (bit < size) bit *= 2;
    }
    for (bit /= 2; bit > 0; bit /= 2) {
      if (place + bit < size) transport_->Send(data, bytes, rank_at(place + bit));
    }
    if (outputs[t] != data) std::memcpy(outputs[t], data, static_cast<size_t>(bytes));
  }
  return changed;
}

void Communicator::Allgather(const TensorSpec& tensor, const void* input,
                             const std::function<void*(int64_t)>& allocate,
                             const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<TensorSpec> tensors{tensor};
  Agree(*transport_, saying_buffers_,
        Call(CallKind::kAllgather, name).With(tensors).IgnoringFirstDimension());
  if (tensor.rank == 0) {
    throw Error(ErrorKind::kInvalidArgument,
                "an allgather needs a tensor with at least one dimension, along which the ranks' "
                "parts are put together. Received: a scalar");
  }
  const int rank = transport_->rank(), size = transport_->size();
  const int to = (rank + 1) % size, from = (rank - 1 + size) % size;
  // A ring: in step s a rank hands on the block that it got in the step before, which is rank -
  // s's.
  std::vector<int64_t> rows(size);
  rows[rank] = tensor.dims[0];
  for (int step = 0; step < size - 1; ++step) {
    const int out = (rank - step + size) % size, in = (from - step + size) % size;
    transport_->SendReceive(&rows[out], sizeof(int64_t), to, &rows[in], sizeof(int64_t), from);
  }
  int64_t row_bytes = tensor.item_bytes;
  for (int i = 1; i < tensor.rank; ++i) row_bytes *= tensor.dims[i];
  std::vector<int64_t> offsets(size + 1, 0);
  for (int r = 0; r < size; ++r) offsets[r + 1] = offsets[r] + rows[r];
  char* gathered = static_cast<char*>(allocate(offsets[size]));
  if (gathered == nullptr && offsets[size] * row_bytes > 0) throw std::bad_alloc();
  const auto block = [&](int r) { return gathered + offsets[r] * row_bytes; };
  const auto bytes = [&](int r) { return rows[r] * row_bytes; };
  if (bytes(rank) > 0) std::memcpy(block(rank), input, static_cast<size_t>(bytes(rank)));
  for (int step = 0; step < size - 1; ++step) {
    const int out = (rank - step + size) % size, in = (from - step + size) % size;
    transport_->SendReceive(block(out), bytes(out), to, block(in), bytes(in), from);
  }
}

void Communicator::Barrier(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Agree(*transport_, saying_buffers_, Call(CallKind::kBarrier, name));
}

void Communicator::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  Agree(*transport_, saying_buffers_, Call(CallKind::kShutdown, kNoName));
}

}  // namespace adasum

#include "communicator.h"

#include <cstring>
#include <new>

#include "agreement.h"
#include "call.h"
#include "error.h"

namespace adasum {

namespace {

const std::string kNoName;

}  // namespace

void Communicator::Allreduce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                             void* const* outputs, Op op, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Agree(*transport_, Call(CallKind::kAllreduce, name).With(op).With(tensors));
  CheckReducible(tensors);
  const Fusion fusion(tensors, op, 0);
  char* fused = fusion_buffer_.Reserve(fusion.end());
  char* scratch = receive_buffer_.Reserve(fusion.scratch_bytes());
  const auto copy = [&](const Kernels& kernels, int64_t count, const void* from, void* to) {
    std::memcpy(to, from, static_cast<size_t>(count * kernels.item_bytes));
  };
  fusion.ForEach(fused, [&](const Kernels& kernels, int64_t t, int64_t count, char* place) {
    copy(kernels, count, inputs[t], place);
  });
  fusion.Reduce(*transport_, fused, scratch);
  fusion.ForEach(fused, [&](const Kernels& kernels, int64_t t, int64_t count, char* place) {
    copy(kernels, count, place, outputs[t]);
  });
}

SyncResult Communicator::Sync(const SyncTensors& tensors, const SyncOptions& options,
                              const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  return SyncRanks(*transport_, fusion_buffer_, receive_buffer_, tensors, options, name);
}

bool Communicator::Broadcast(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                             void* const* outputs, int root, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Agree(*transport_, Call(CallKind::kBroadcast, name).WithRoot(root).With(tensors));
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
      char* received = receive_buffer_.Reserve(bytes);
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
  Agree(*transport_, Call(CallKind::kAllgather, name).With(tensors).IgnoringFirstDimension());
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
  Agree(*transport_, Call(CallKind::kBarrier, name));
}

void Communicator::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  Agree(*transport_, Call(CallKind::kShutdown, kNoName));
}

}  // namespace adasum

#include "communicator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "agreement.h"
#include "error.h"

namespace adasum {

namespace {

enum class CallKind { kAllreduce, kSync, kBroadcast, kAllgather, kBarrier, kShutdown };

const char* NameOf(CallKind kind) {
  switch (kind) {
    case CallKind::kAllreduce:
      return "allreduce";
    case CallKind::kSync:
      return "sync of deltas";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kAllgather:
      return "allgather";
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kShutdown:
      return "shutdown";
  }
  return "";
}

const char* NameOf(Op op) {
  switch (op) {
    case Op::kAdasum:
      return "adasum";
    case Op::kSum:
      return "sum";
    case Op::kAverage:
      return "average";
  }
  return "";
}

class Call : public CallSignature {
 public:
  Call(CallKind kind, const std::string& name) : kind_(kind), name_(name) {}

  Call& With(Op op) {
    op_ = static_cast<int>(op);
    return *this;
  }
  Call& WithRoot(int root) {
    root_ = root;
    return *this;
  }
  Call& With(const std::vector<TensorSpec>& tensors) {
    tensors_ = &tensors;
    return *this;
  }
  Call& WithStarts(const void* const* starts) {
    Hasher hasher;
    for (size_t t = 0; t < tensors_->size(); ++t) {
      hasher.Add(starts[t], (*tensors_)[t].count() * (*tensors_)[t].item_bytes);
    }
    starts_ = hasher.hash();
    return *this;
  }
  Call& IgnoringFirstDimension() {
    first_dim_ = 1;
    return *this;
  }

  uint64_t Hash() const override {
    Hasher hasher;
    hasher.Add(static_cast<uint64_t>(kind_));
    hasher.Add(name_);
    hasher.Add(static_cast<uint64_t>(op_));
    hasher.Add(static_cast<uint64_t>(root_));
    hasher.Add(starts_);
    if (tensors_ == nullptr) return hasher.hash();
    hasher.Add(tensors_->size());
    for (const TensorSpec& tensor : *tensors_) {
      hasher.Add(static_cast<uint64_t>(tensor.dtype));
      if (tensor.dtype == DType::kOther) hasher.Add(std::string(tensor.dtype_name));
      hasher.Add(static_cast<uint64_t>(tensor.rank));
      for (int i = first_dim_; i < tensor.rank; ++i) hasher.Add(tensor.dims[i]);
    }
    return hasher.hash();
  }

  std::vector<std::string> Describe() const override {
    std::vector<std::string> facts{std::string("call: ") + NameOf(kind_), "name: '" + name_ + "'"};
    facts.push_back(op_ < 0 ? "no op" : std::string("op: ") + NameOf(static_cast<Op>(op_)));
    facts.push_back(root_ < 0 ? "no root rank" : "root rank: " + std::to_string(root_));
    if (tensors_ == nullptr) return facts;
    if (starts_ != 0) {
      facts.push_back("weights at the start of the window that have the checksum " +
                      std::to_string(starts_));
    }
    facts.push_back("number of tensors: " + std::to_string(tensors_->size()));
    for (size_t t = 0; t < tensors_->size(); ++t) {
      facts.push_back("tensor " + std::to_string(t) + ": " + Describe((*tensors_)[t]));
    }
    return facts;
  }

 private:
  std::string Describe(const TensorSpec& tensor) const {
    std::string text = std::string(tensor.dtype_name) + "[";
    for (int i = 0; i < tensor.rank; ++i) {
      if (i > 0) text += ", ";
      text += i < first_dim_ ? "any" : std::to_string(tensor.dims[i]);
    }
    return text + "]";
  }

  const CallKind kind_;
  const std::string& name_;
  int op_ = -1;
  int root_ = -1;
  uint64_t starts_ = 0;
  const std::vector<TensorSpec>* tensors_ = nullptr;
  int first_dim_ = 0;  // the first one that counts
};

// After the ranks agree, so that all of them refuse alike.
void CheckReducible(const std::vector<TensorSpec>& tensors) {
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].dtype != DType::kOther) continue;
    throw Error(ErrorKind::kInvalidArgument,
                "tensor " + std::to_string(t) +
                    " of an allreduce must be float16, bfloat16, float32 or "
                    "float64. Received: " +
                    tensors[t].dtype_name);
  }
}

const std::string kNoName;

}  // namespace

int64_t TensorSpec::count() const {
  int64_t product = 1;
  for (int i = 0; i < rank; ++i) product *= dims[i];
  return product;
}

int64_t Communicator::Buffer::Aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

char* Communicator::Buffer::Reserve(int64_t bytes) {
  if (bytes <= capacity_) return data_.get();
  const int64_t rounded = Aligned(bytes);
  data_.reset();
  capacity_ = 0;
  data_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(rounded))));
  if (data_ == nullptr) throw std::bad_alloc();
  capacity_ = rounded;
  return data_.get();
}

void Communicator::Buffer::Free::operator()(char* data) const { std::free(data); }

Report Communicator::ReduceFused(const std::vector<TensorSpec>& tensors, Op op, const Move& fill,
                                 const Move& empty) {
  // The tensors of one dtype, in the order of the call, and where in the fusion buffer they are
  // reduced together.
  struct Group {
    const Kernels& kernels;
    std::vector<int64_t> members;
    Layout layout;
    int64_t at;
  };
  std::vector<Group> groups;
  int64_t fused_bytes = 0, received_bytes = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    std::vector<int64_t> members, counts;
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].dtype != dtype) continue;
      members.push_back(static_cast<int64_t>(t));
      counts.push_back(tensors[t].count());
    }
    if (members.empty()) continue;
    const Kernels& kernels = CpuKernels(dtype);
    Layout layout(counts);
    const int64_t bytes = layout.size() * kernels.item_bytes;
    received_bytes = std::max(received_bytes, (layout.size() + 1) / 2 * kernels.item_bytes);
    groups.push_back({kernels, std::move(members), std::move(layout), fused_bytes});
    fused_bytes = Buffer::Aligned(fused_bytes + bytes);
  }
  char* fused = fusion_buffer_.Reserve(fused_bytes);
  char* received = receive_buffer_.Reserve(received_bytes);
  const auto move = [&](const Group& group, const Move& mover) {
    for (size_t i = 0; i < group.members.size(); ++i) {
      const int64_t begin = group.layout.offset(i), count = group.layout.offset(i + 1) - begin;
      if (count == 0) continue;
      mover(group.kernels, group.members[i], count,
            fused + group.at + begin * group.kernels.item_bytes);
    }
  };
  Report report;
  for (const Group& group : groups) {
    move(group, fill);
    const Report part =
        AllreduceRvh(*transport_, group.kernels, group.layout, op, fused + group.at, received);
    report.all_equal = report.all_equal && part.all_equal;
    report.any_nonzero = report.any_nonzero || part.any_nonzero;
  }
  // Only now that nothing can fail any more, so that an error leaves the caller's tensors as they
  // were.
  for (const Group& group : groups) move(group, empty);
  return report;
}

Report Communicator::Allreduce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                               void* const* outputs, Op op, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Agree(*transport_, Call(CallKind::kAllreduce, name).With(op).With(tensors));
  CheckReducible(tensors);
  const auto bytes = [](const Kernels& kernels, int64_t count) {
    return static_cast<size_t>(count * kernels.item_bytes);
  };
  return ReduceFused(
      tensors, op,
      [&](const Kernels& kernels, int64_t t, int64_t count, char* fused) {
        std::memcpy(fused, inputs[t], bytes(kernels, count));
      },
      [&](const Kernels& kernels, int64_t t, int64_t count, char* fused) {
        std::memcpy(outputs[t], fused, bytes(kernels, count));
      });
}

Report Communicator::Sync(const std::vector<TensorSpec>& tensors, const void* const* values,
                          const void* const* starts, void* const* new_values,
                          void* const* new_starts, Op op, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Deltas from different starts would add up to different weights without anybody noticing.
  Agree(*transport_, Call(CallKind::kSync, name).With(op).With(tensors).WithStarts(starts));
  CheckReducible(tensors);
  return ReduceFused(
      tensors, op,
      [&](const Kernels& kernels, int64_t t, int64_t count, char* fused) {
        kernels.delta(values[t], starts[t], count, fused);
      },
      [&](const Kernels& kernels, int64_t t, int64_t count, char* fused) {
        kernels.apply(starts[t], fused, count, new_values[t]);
        if (new_starts == nullptr) return;
        std::memcpy(new_starts[t], new_values[t], static_cast<size_t>(count * kernels.item_bytes));
      });
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

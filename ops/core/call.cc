#include "call.h"

#include <utility>

#include "error.h"

namespace adasum {

namespace {

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

const char* NameOf(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRvh:
      return "rvh";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kHierarchical:
      return "hierarchical";
    case Algorithm::kHierarchicalSum:
      return "hierarchical_sum";
  }
  return "";
}

}  // namespace

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
    case CallKind::kReduceToOwners:
      return "reduction to the tensors' owners";
    case CallKind::kShareFromOwners:
      return "sharing of what the tensors' owners have";
    case CallKind::kShutdown:
      return "shutdown";
  }
  return "";
}

Call& Call::With(const ReduceOptions& options) {
  op_ = static_cast<int>(options.op);
  algorithm_ = static_cast<int>(options.algorithm);
  fusion_threshold_ = options.fusion_threshold;
  device_ = options.device;
  return *this;
}

Call& Call::With(const std::vector<TensorSpec>& tensors) {
  tensors_ = &tensors;
  return *this;
}

Call& Call::WithRoot(int root) {
  root_ = root;
  return *this;
}

Call& Call::WithOwners(const std::vector<int>& owners) {
  owners_ = &owners;
  return *this;
}

Call& Call::WithStates(const std::vector<TensorSpec>& states) {
  states_ = &states;
  return *this;
}

Call& Call::WithStarts(uint64_t checksum, std::function<uint64_t(size_t tensor)> of_tensor) {
  starts_ = checksum;
  start_of_tensor_ = std::move(of_tensor);
  return *this;
}

Call& Call::WithWire(DType dtype, int64_t exponent) {
  wire_ = dtype;
  wire_exponent_ = exponent;
  return *this;
}

Call& Call::IgnoringFirstDimension() {
  first_dim_ = 1;
  return *this;
}

uint64_t Call::Hash() const {
  Hasher hasher;
  hasher.Add(static_cast<uint64_t>(kind_));
  hasher.Add(std::string_view(name_));
  hasher.Add(static_cast<uint64_t>(op_));
  hasher.Add(static_cast<uint64_t>(algorithm_));
  hasher.Add(static_cast<uint64_t>(fusion_threshold_));
  if (device_ != nullptr && !device_->is_host()) hasher.Add(std::string_view(device_->kind()));
  hasher.Add(static_cast<uint64_t>(root_));
  hasher.Add(starts_);
  for (size_t t = 0; owners_ != nullptr && t < owners_->size(); ++t) {
    hasher.Add(static_cast<uint64_t>((*owners_)[t]));
  }
  if (wire_ != DType::kOther) {
    hasher.Add(static_cast<uint64_t>(wire_));
    hasher.Add(static_cast<uint64_t>(wire_exponent_));
  }
  if (tensors_ != nullptr) AddTo(hasher, *tensors_);
  if (states_ != nullptr) AddTo(hasher, *states_);
  return hasher.hash();
}

void Call::AddTo(Hasher& hasher, const std::vector<TensorSpec>& tensors) const {
  hasher.Add(tensors.size());
  for (const TensorSpec& tensor : tensors) {
    hasher.Add(std::string_view(tensor.name));
    hasher.Add(static_cast<uint64_t>(tensor.dtype));
    if (tensor.dtype == DType::kOther) hasher.Add(std::string_view(tensor.dtype_name));
    hasher.Add(static_cast<uint64_t>(tensor.rank));
    for (int i = first_dim_; i < tensor.rank; ++i) {
      hasher.Add(static_cast<uint64_t>(tensor.dims[i]));
    }
  }
}

std::vector<std::string> Call::Describe() const {
  std::vector<std::string> facts{std::string("call: ") + NameOf(kind_), "name: '" + name_ + "'"};
  facts.push_back(op_ < 0 ? "no op" : std::string("op: ") + NameOf(static_cast<Op>(op_)));
  if (algorithm_ >= 0) {
    facts.push_back(std::string("algorithm: ") + NameOf(static_cast<Algorithm>(algorithm_)));
    facts.push_back("fusion threshold: " + std::to_string(fusion_threshold_) + " bytes");
    facts.push_back(std::string("tensors in memory of: ") + device_->kind());
  }
  facts.push_back(root_ < 0 ? "no root rank" : "root rank: " + std::to_string(root_));
  for (size_t t = 0; owners_ != nullptr && t < owners_->size(); ++t) {
    facts.push_back("owner of tensor " + std::to_string(t) + ": " + std::to_string((*owners_)[t]));
  }
  if (wire_ != DType::kOther) {
    facts.push_back(std::string("wire dtype: ") +
                    (wire_ == DType::kFloat16 ? "float16" : "bfloat16") + ", times 2^" +
                    std::to_string(wire_exponent_));
  } else if (kind_ == CallKind::kSync) {
    facts.push_back("no wire dtype");
  }
  if (tensors_ == nullptr) return facts;
  if (starts_ != 0) {
    facts.push_back("weights at the start of the window that have the checksum " +
                    std::to_string(starts_));
  }
  const auto describe = [&](const char* what, const std::vector<TensorSpec>& tensors) {
    facts.push_back(std::string("number of ") + what + "s: " + std::to_string(tensors.size()));
    for (size_t t = 0; t < tensors.size(); ++t) {
      facts.push_back(std::string(what) + " " + std::to_string(t) + ": " + Describe(tensors[t]));
    }
  };
  if (states_ != nullptr) describe("averaged state", *states_);
  describe("tensor", *tensors_);
  for (size_t t = 0; start_of_tensor_ && t < tensors_->size(); ++t) {
    const std::string name((*tensors_)[t].name);
    facts.push_back("start of tensor " + std::to_string(t) + (name.empty() ? "" : ", " + name) +
                    ", with the checksum " + std::to_string(start_of_tensor_(t)));
  }
  return facts;
}

std::string Call::Describe(const TensorSpec& tensor) const {
  const std::string name(tensor.name);
  std::string text = (name.empty() ? "" : name + " ") + tensor.dtype_name + "[";
  for (int i = 0; i < tensor.rank; ++i) {
    if (i > 0) text += ", ";
    text += i < first_dim_ ? "any" : std::to_string(tensor.dims[i]);
  }
  return text + "]";
}

void CheckReducible(const std::vector<TensorSpec>& tensors) {
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].dtype != DType::kOther) continue;
    throw Error(ErrorKind::kInvalidArgument,
                "tensor " + std::to_string(t) +
                    " must be float16, bfloat16, float32 or float64 to be reduced. Received: " +
                    tensors[t].dtype_name);
  }
}

}  // namespace adasum

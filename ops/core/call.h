// What has to be equal on all ranks in a collective call, in the words that errors use.
#ifndef TF_ADASUM_OPS_CORE_CALL_H_
#define TF_ADASUM_OPS_CORE_CALL_H_

#include <functional>
#include <string>
#include <vector>

#include "agreement.h"
#include "allreduce.h"
#include "fusion.h"

namespace adasum {

enum class CallKind {
  kAllreduce,
  kSync,
  kBroadcast,
  kAllgather,
  kBarrier,
  kReduceToOwners,
  kShareFromOwners,
  kShutdown
};

// In the words that errors use.
const char* NameOf(CallKind kind);

// Keeps references to what it is given.
class Call : public CallSignature {
 public:
  Call(CallKind kind, const std::string& name) : kind_(kind), name_(name) {}

  Call& With(const ReduceOptions& options);
  Call& With(const std::vector<TensorSpec>& tensors);
  Call& WithRoot(int root);
  // Tensors that are averaged beside the others.
  Call& WithStates(const std::vector<TensorSpec>& states);
  // A checksum of what has to be equal beside the tensors' shapes. of_tensor, which may be empty,
  // tells each tensor's, for the error's text.
  Call& WithStarts(uint64_t checksum, std::function<uint64_t(size_t tensor)> of_tensor);
  // The owner of each tensor.
  Call& WithOwners(const std::vector<int>& owners);
  // How changes are sent.
  Call& WithWire(DType dtype, int64_t exponent);
  Call& IgnoringFirstDimension();

  uint64_t Hash() const override;
  std::vector<std::string> Describe() const override;

 private:
  void AddTo(Hasher& hasher, const std::vector<TensorSpec>& tensors) const;
  std::string Describe(const TensorSpec& tensor) const;

  const CallKind kind_;
  const std::string& name_;
  int op_ = -1;
  int algorithm_ = -1;
  int64_t fusion_threshold_ = -1;
  const Device* device_ = nullptr;
  int root_ = -1;
  const std::vector<int>* owners_ = nullptr;
  uint64_t starts_ = 0;
  DType wire_ = DType::kOther;
  int64_t wire_exponent_ = 0;
  std::function<uint64_t(size_t tensor)> start_of_tensor_;
  const std::vector<TensorSpec>* tensors_ = nullptr;
  const std::vector<TensorSpec>* states_ = nullptr;
  int first_dim_ = 0;  // the first one that counts
};

// Throws Error(kInvalidArgument) for a dtype that has no arithmetic. Called after the ranks agree,
// so that all of them refuse alike.
void CheckReducible(const std::vector<TensorSpec>& tensors);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_CALL_H_

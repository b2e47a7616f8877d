// What the ops' kernels have in common.
#ifndef TF_ADASUM_OPS_TF_COLLECTIVE_OP_H_
#define TF_ADASUM_OPS_TF_COLLECTIVE_OP_H_

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/tf/calls.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace tf_adasum {

inline void* DataOf(const tensorflow::Tensor& tensor) {
  return const_cast<char*>(tensor.tensor_data().data());
}

inline void Add(const tensorflow::Tensor& tensor, TensorViews* views,
                const std::string& name = "") {
  views->Add(DataOf(tensor), tensor.shape().dim_sizes(), tensor.dtype(), name);
}

// What every collective op has: a name that is compared over the ranks.
class CollectiveOp : public tensorflow::OpKernel {
 public:
  explicit CollectiveOp(tensorflow::OpKernelConstruction* ctx) : tensorflow::OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("call_name", &call_name_));
  }

 protected:
  const char* call_name() const { return call_name_.c_str(); }

 private:
  std::string call_name_;
};

// One name for each of count variables.
inline std::vector<std::string> ReadNames(tensorflow::OpKernelConstruction* ctx, int count) {
  std::vector<std::string> names;
  ctx->SetStatus(ctx->GetAttr("names", &names));
  names.resize(count);
  return names;
}

// Variables that an op reads and overwrites, locked from Open until destruction.
class LockedVariables {
 public:
  absl::Status Open(tensorflow::OpKernelContext* ctx, int count) {
    for (int i = 0; i < count; ++i) {
      variables_.emplace_back();
      TF_RETURN_IF_ERROR(
          LookupResource(ctx, tensorflow::HandleFromInput(ctx, i), &variables_.back()));
    }
    // By address, so that two ops that lock the same variables cannot wait for each other.
    std::vector<tensorflow::Var*> in_order;
    for (const auto& variable : variables_) in_order.push_back(variable.get());
    std::sort(in_order.begin(), in_order.end());
    if (std::adjacent_find(in_order.begin(), in_order.end()) != in_order.end()) {
      return GivenTwice();
    }
    for (tensorflow::Var* variable : in_order) {
      locks_.push_back(std::make_unique<tensorflow::mutex_lock>(*variable->mu()));
      if (!variable->tensor()->IsInitialized()) {
        return absl::FailedPreconditionError("variable is not initialized: " +
                                             variable->DebugString());
      }
    }
    return absl::OkStatus();
  }

  const tensorflow::Tensor& operator[](size_t i) const { return *variables_[i]->tensor(); }

  // Memory for the next values of some variables: their own, unless somebody else still looks at
  // it. It becomes the variables' with Commit.
  absl::Status PrepareToWrite(tensorflow::OpKernelContext* ctx, size_t begin, size_t end) {
    next_.resize(variables_.size());
    for (size_t i = begin; i < end; ++i) {
      const tensorflow::Tensor& current = *variables_[i]->tensor();
      if (current.RefCountIsOne()) {
        next_[i] = current;
      } else {
        next_[i].emplace();
        TF_RETURN_IF_ERROR(ctx->allocate_temp(current.dtype(), current.shape(), &*next_[i]));
      }
    }
    return absl::OkStatus();
  }

  void* next(size_t i) const { return DataOf(*next_[i]); }

  void Commit() {
    for (size_t i = 0; i < next_.size(); ++i) {
      if (next_[i]) *variables_[i]->tensor() = *next_[i];
    }
  }

 private:
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks_;
  std::vector<std::optional<tensorflow::Tensor>> next_;
};

template <typename T>
void OutputScalar(tensorflow::OpKernelContext* ctx, int index, T value) {
  tensorflow::Tensor* output = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(index, tensorflow::TensorShape(), &output));
  output->scalar<T>()() = value;
}

}  // namespace tf_adasum

#endif  // TF_ADASUM_OPS_TF_COLLECTIVE_OP_H_

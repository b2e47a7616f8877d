// The ops on the CPU: they hand tensors to the core's C API and turn its errors into TensorFlow's.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/core/c_api.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace tf_adasum {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;

absl::Status ToStatus(int code) {
  if (code == ADASUM_OK) return absl::OkStatus();
  const std::string message = adasum_last_error();
  switch (code) {
    case ADASUM_INVALID_ARGUMENT:
    case ADASUM_DISAGREEMENT:
      return absl::InvalidArgumentError(message);
    case ADASUM_TRANSPORT:
      return absl::UnavailableError(message);
    case ADASUM_STATE:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

int DTypeCode(DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return ADASUM_FLOAT16;
    case tensorflow::DT_BFLOAT16:
      return ADASUM_BFLOAT16;
    case tensorflow::DT_FLOAT:
      return ADASUM_FLOAT32;
    case tensorflow::DT_DOUBLE:
      return ADASUM_FLOAT64;
    default:
      return ADASUM_OTHER;
  }
}

void* DataOf(const Tensor& tensor) { return const_cast<char*>(tensor.tensor_data().data()); }

// Tensors as the C API takes them. It must not be copied, since the views point into it.
class TensorViews {
 public:
  explicit TensorViews(size_t count) {
    dims_.reserve(count);
    names_.reserve(count);
  }
  TensorViews(const TensorViews&) = delete;

  void Add(const Tensor& tensor) {
    dims_.emplace_back();
    for (const auto dim : tensor.shape()) dims_.back().push_back(dim.size);
    names_.push_back(tensorflow::DataTypeString(tensor.dtype()));
    views_.push_back({DataOf(tensor), dims_.back().data(), tensorflow::DataTypeSize(tensor.dtype()),
                      names_.back().c_str(), static_cast<int32_t>(dims_.back().size()),
                      DTypeCode(tensor.dtype())});
  }

  const AdasumTensor* data() const { return views_.data(); }
  int64_t size() const { return static_cast<int64_t>(views_.size()); }

 private:
  std::vector<std::vector<int64_t>> dims_;
  std::vector<std::string> names_;
  std::vector<AdasumTensor> views_;
};

// From rank 0, and not through TensorFlow's log, which users of Keras silence.
void WarnOnceOfUnshardedData() {
  static std::once_flag once;
  std::call_once(once, [] {
    AdasumTopology topology{};
    if (adasum_topology(&topology) != ADASUM_OK || topology.rank != 0) return;
    std::fprintf(
        stderr,
        "tf_adasum: warning: all ranks have made the same change of the weights, so they seem to "
        "train on the same data. Give each rank its own part: tf_adasum.shard(data).\n");
  });
}

// What every collective op has: a name that is compared over the ranks.
class CollectiveOp : public OpKernel {
 public:
  explicit CollectiveOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("call_name", &call_name_));
  }

 protected:
  const char* call_name() const { return call_name_.c_str(); }

  static void RequireMemcpy(OpKernelConstruction* ctx, DataType dtype) {
    OP_REQUIRES(ctx, tensorflow::DataTypeCanUseMemcpy(dtype),
                absl::InvalidArgumentError("a collective moves numbers and booleans. Received: " +
                                           tensorflow::DataTypeString(dtype)));
  }

 private:
  std::string call_name_;
};

int ReadOp(OpKernelConstruction* ctx) {
  std::string op;
  ctx->SetStatus(ctx->GetAttr("op", &op));
  return op == "sum" ? ADASUM_OP_SUM : op == "average" ? ADASUM_OP_AVERAGE : ADASUM_OP_ADASUM;
}

int ReadRoot(OpKernelConstruction* ctx) {
  int root = 0;
  ctx->SetStatus(ctx->GetAttr("root_rank", &root));
  return root;
}

class AllreduceOp : public CollectiveOp {
 public:
  explicit AllreduceOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), op_(ReadOp(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    TensorViews inputs(ctx->num_inputs());
    std::vector<void*> outputs;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      // Before the output may take the input's memory over: the view stays right, the input is then
      // gone.
      inputs.Add(ctx->input(i));
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx,
                     ctx->forward_input_or_allocate_output({i}, i, ctx->input(i).shape(), &output));
      outputs.push_back(DataOf(*output));
    }
    OP_REQUIRES_OK(ctx, ToStatus(adasum_allreduce(inputs.data(), outputs.data(), inputs.size(), op_,
                                                  call_name())));
  }

 private:
  const int op_;
};

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), root_(ReadRoot(ctx)) {
    for (const DataType dtype : ctx->input_types()) RequireMemcpy(ctx, dtype);
  }

  void Compute(OpKernelContext* ctx) override {
    TensorViews inputs(ctx->num_inputs());
    std::vector<void*> outputs;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, ctx->input(i).shape(), &output));
      inputs.Add(ctx->input(i));
      outputs.push_back(DataOf(*output));
    }
    OP_REQUIRES_OK(ctx, ToStatus(adasum_broadcast(inputs.data(), outputs.data(), inputs.size(),
                                                  root_, call_name(), nullptr)));
  }

 private:
  const int root_;
};

class AllgatherOp : public CollectiveOp {
 public:
  explicit AllgatherOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    RequireMemcpy(ctx, ctx->input_type(0));
  }

  void Compute(OpKernelContext* ctx) override {
    TensorViews input(1);
    input.Add(ctx->input(0));
    const auto allocate = [](int64_t rows, void* context) -> void* {
      auto* op_context = static_cast<OpKernelContext*>(context);
      TensorShape shape = op_context->input(0).shape();
      shape.set_dim(0, rows);
      Tensor* output = nullptr;
      const absl::Status status = op_context->allocate_output(0, shape, &output);
      if (!status.ok()) {
        op_context->SetStatus(status);
        return nullptr;
      }
      return DataOf(*output);
    };
    OP_REQUIRES_OK(ctx, ToStatus(adasum_allgather(input.data(), allocate, ctx, call_name())));
  }
};

class BarrierOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;
  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, ToStatus(adasum_barrier(call_name())));
  }
};

// Variables that an op reads and overwrites, locked from Open until destruction.
class LockedVariables {
 public:
  absl::Status Open(OpKernelContext* ctx) {
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      variables_.emplace_back();
      TF_RETURN_IF_ERROR(
          LookupResource(ctx, tensorflow::HandleFromInput(ctx, i), &variables_.back()));
    }
    // By address, so that two ops that lock the same variables cannot wait for each other.
    std::vector<Var*> in_order;
    for (const auto& variable : variables_) in_order.push_back(variable.get());
    std::sort(in_order.begin(), in_order.end());
    if (std::adjacent_find(in_order.begin(), in_order.end()) != in_order.end()) {
      return absl::InvalidArgumentError("each variable may be given only once");
    }
    for (Var* variable : in_order) {
      locks_.push_back(std::make_unique<tensorflow::mutex_lock>(*variable->mu()));
      if (!variable->tensor()->IsInitialized()) {
        return absl::FailedPreconditionError("variable is not initialized: " +
                                             variable->DebugString());
      }
    }
    return absl::OkStatus();
  }

  const Tensor& operator[](size_t i) const { return *variables_[i]->tensor(); }

  // Memory for the next value of each variable in turn: its own, unless somebody else still looks
  // at it. It becomes the variable's with Commit.
  absl::Status PrepareToWrite(OpKernelContext* ctx) {
    for (const auto& variable : variables_) {
      const Tensor& current = *variable->tensor();
      if (current.RefCountIsOne()) {
        next_.push_back(current);
      } else {
        next_.emplace_back();
        TF_RETURN_IF_ERROR(ctx->allocate_temp(current.dtype(), current.shape(), &next_.back()));
      }
    }
    return absl::OkStatus();
  }

  void* next(size_t i) const { return DataOf(next_[i]); }

  void Commit() {
    for (size_t i = 0; i < variables_.size(); ++i) *variables_[i]->tensor() = next_[i];
  }

 private:
  std::vector<tensorflow::core::RefCountPtr<Var>> variables_;
  std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks_;
  std::vector<Tensor> next_;
};

void OutputFlag(OpKernelContext* ctx, bool flag) {
  Tensor* output = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape(), &output));
  output->scalar<bool>()() = flag;
}

class SyncOp : public CollectiveOp {
 public:
  explicit SyncOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), op_(ReadOp(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Open(ctx));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx));
    const size_t count = ctx->num_inputs() / 2;
    TensorViews values(count);
    std::vector<const void*> starts;
    std::vector<void*> new_values, new_starts;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& value = variables[i];
      const Tensor& start = variables[count + i];
      OP_REQUIRES(ctx, value.dtype() == start.dtype() && value.shape() == start.shape(),
                  absl::InvalidArgumentError("variable " + std::to_string(i) + " is " +
                                             value.DebugString(0) + ", but its start is " +
                                             start.DebugString(0)));
      values.Add(value);
      starts.push_back(DataOf(start));
      new_values.push_back(variables.next(i));
      new_starts.push_back(variables.next(count + i));
    }
    int identical = 0;
    OP_REQUIRES_OK(
        ctx, ToStatus(adasum_sync(values.data(), starts.data(), new_values.data(),
                                  new_starts.data(), values.size(), op_, call_name(), &identical)));
    variables.Commit();
    if (identical) WarnOnceOfUnshardedData();
  }

 private:
  const int op_;
};

class BroadcastVariablesOp : public CollectiveOp {
 public:
  explicit BroadcastVariablesOp(OpKernelConstruction* ctx)
      : CollectiveOp(ctx), root_(ReadRoot(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Open(ctx));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx));
    TensorViews values(ctx->num_inputs());
    std::vector<void*> outputs;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Tensor& value = variables[i];
      OP_REQUIRES(ctx, tensorflow::DataTypeCanUseMemcpy(value.dtype()),
                  absl::InvalidArgumentError("variable " + std::to_string(i) +
                                             " must hold numbers or booleans. Received: " +
                                             tensorflow::DataTypeString(value.dtype())));
      values.Add(value);
      outputs.push_back(variables.next(i));
    }
    int changed = 0;
    OP_REQUIRES_OK(ctx, ToStatus(adasum_broadcast(values.data(), outputs.data(), values.size(),
                                                  root_, call_name(), &changed)));
    variables.Commit();
    OutputFlag(ctx, changed != 0);
  }

 private:
  const int root_;
};

REGISTER_KERNEL_BUILDER(Name("AdasumAllreduce").Device(tensorflow::DEVICE_CPU), AllreduceOp);
REGISTER_KERNEL_BUILDER(Name("AdasumSync").Device(tensorflow::DEVICE_CPU), SyncOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBroadcastVariables").Device(tensorflow::DEVICE_CPU),
                        BroadcastVariablesOp);
REGISTER_KERNEL_BUILDER(Name("AdasumAllgather").Device(tensorflow::DEVICE_CPU), AllgatherOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBarrier").Device(tensorflow::DEVICE_CPU), BarrierOp);

}  // namespace
}  // namespace tf_adasum

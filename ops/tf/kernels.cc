// The ops on CPU and GPU: they hand tensors to the core's C API and turn its errors into
// TensorFlow's.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/core/c_api.h"
#include "ops/tf/calls.h"
#include "ops/tf/collective_op.h"
#include "ops/tf/op_device.h"
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

class AllreduceOp : public CollectiveOp {
 public:
  explicit AllreduceOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), options_(ReadReduce(ctx)) {
    options_.name = call_name();
  }

  void Compute(OpKernelContext* ctx) override {
    TensorViews inputs(ctx->num_outputs());
    std::vector<void*> outputs;
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      // Before the output may take the input's memory over: the view stays right, the input is then
      // gone.
      Add(ctx->input(i), &inputs);
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx,
                     ctx->forward_input_or_allocate_output({i}, i, ctx->input(i).shape(), &output));
      outputs.push_back(DataOf(*output));
    }
    const OpDevice device(ctx);
    AdasumReduceOptions options = options_;
    options.device = device.get();
    OP_REQUIRES_OK(
        ctx, ToStatus(adasum_allreduce(inputs.data(), outputs.data(), inputs.size(), &options)));
  }

 private:
  AdasumReduceOptions options_;
};

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), root_(ReadRoot(ctx)) {
    for (const DataType dtype : ctx->output_types()) OP_REQUIRES_OK(ctx, CheckMovable(dtype));
  }

  void Compute(OpKernelContext* ctx) override {
    TensorViews inputs(ctx->num_outputs());
    std::vector<void*> outputs;
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, ctx->input(i).shape(), &output));
      Add(ctx->input(i), &inputs);
      outputs.push_back(DataOf(*output));
    }
    const OpDevice device(ctx);
    OP_REQUIRES_OK(ctx, ToStatus(adasum_broadcast(inputs.data(), outputs.data(), inputs.size(),
                                                  root_, call_name(), nullptr, device.get())));
  }

 private:
  const int root_;
};

class AllgatherOp : public CollectiveOp {
 public:
  explicit AllgatherOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, CheckMovable(ctx->input_type(0)));
  }

  void Compute(OpKernelContext* ctx) override {
    TensorViews input(1);
    Add(ctx->input(0), &input);
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
    const OpDevice device(ctx);
    OP_REQUIRES_OK(
        ctx, ToStatus(adasum_allgather(input.data(), allocate, ctx, call_name(), device.get())));
  }
};

class BarrierOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;
  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, ToStatus(adasum_barrier(call_name())));
  }
};

class SyncOp : public CollectiveOp {
 public:
  explicit SyncOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), reduce_(ReadReduce(ctx)) {
    reduce_.name = call_name();
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &state_count_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("R", &residual_count_));
    OP_REQUIRES(ctx, residual_count_ == 0 || residual_count_ == count_,
                absl::InvalidArgumentError("`residuals` must be none, or one for each variable"));
    wire_dtype_ = ReadWire(ctx);
    OP_REQUIRES_OK(ctx, ctx->GetAttr("flush", &flush_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("flight", &flight_));
    std::string nonfinite;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nonfinite", &nonfinite));
    raise_nonfinite_ = nonfinite == "raise";
    names_ = ReadNames(ctx, count_);
  }

  void Compute(OpKernelContext* ctx) override {
    LockedVariables variables;
    const int scalars_at = 2 * count_ + state_count_ + residual_count_;
    OP_REQUIRES_OK(ctx, variables.Open(ctx, scalars_at));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx, 0, count_));
    if (writes_starts()) OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx, count_, 2 * count_));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx, 2 * count_, scalars_at));
    TensorViews values(count_), states(state_count_);
    std::vector<const void*> starts;
    std::vector<void*> new_values, new_starts, new_states;
    for (int i = 0; i < count_; ++i) {
      const Tensor& value = variables[i];
      const Tensor& start = variables[count_ + i];
      OP_REQUIRES_OK(ctx,
                     CheckStart(i, value.dtype(), value.shape(), start.dtype(), start.shape()));
      Add(value, &values, names_[i]);
      starts.push_back(DataOf(start));
      new_values.push_back(variables.next(i));
      if (writes_starts()) new_starts.push_back(variables.next(count_ + i));
    }
    for (int i = 0; i < state_count_; ++i) {
      Add(variables[2 * count_ + i], &states);
      new_states.push_back(variables.next(2 * count_ + i));
    }
    const OpDevice device(ctx);
    std::vector<float*> residuals;
    for (int i = scalars_at - residual_count_; i < scalars_at; ++i) {
      const Tensor& kept = variables[i];
      const Tensor& value = variables[residuals.size()];
      OP_REQUIRES_OK(ctx, CheckStart(static_cast<int>(residuals.size()), value.dtype(),
                                     value.shape(), kept.dtype(), kept.shape()));
      // It is read and written in place.
      void* memory = variables.next(i);
      // On a GPU the core refuses the call.
      if (memory != DataOf(kept) && device.get() == nullptr) {
        std::memcpy(memory, DataOf(kept), kept.TotalBytes());
      }
      residuals.push_back(static_cast<float*>(memory));
    }
    AdasumReduceOptions reduce = reduce_;
    reduce.device = device.get();
    const auto scale = ctx->input(scalars_at + 2).vec<int64_t>();
    const AdasumSyncOptions options{reduce,
                                    ctx->input(scalars_at).scalar<bool>()(),
                                    flush_,
                                    raise_nonfinite_,
                                    ctx->input(scalars_at + 1).scalar<int64_t>()(),
                                    flight_,
                                    wire_dtype_,
                                    scale(0),
                                    scale(1),
                                    residuals.empty() ? nullptr : residuals.data()};
    const AdasumSyncTensors tensors{count_,
                                    values.data(),
                                    starts.data(),
                                    new_values.data(),
                                    writes_starts() ? new_starts.data() : nullptr,
                                    state_count_,
                                    states.data(),
                                    new_states.data()};
    AdasumSyncResult result{};
    std::vector<double> orthogonality(count_);
    OP_REQUIRES_OK(ctx, Sync(tensors, options, &result, orthogonality.data()));
    variables.Commit();
    OutputScalar<int64_t>(ctx, 0, result.syncs);
    OutputScalar<bool>(ctx, 1, result.skipped != 0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({count_}), &output));
    std::copy(orthogonality.begin(), orthogonality.end(), output->vec<float>().data());
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, TensorShape({2}), &output));
    output->vec<int64_t>()(0) = result.wire_exponent;
    output->vec<int64_t>()(1) = result.wire_good_syncs;
  }

 private:
  bool writes_starts() const { return flush_ || flight_ >= 0; }

  AdasumReduceOptions reduce_;
  int count_ = 0;
  int state_count_ = 0;
  int residual_count_ = 0;
  int wire_dtype_ = ADASUM_OTHER;
  bool flush_ = false;
  int64_t flight_ = -1;
  bool raise_nonfinite_ = false;
  std::vector<std::string> names_;
};

class BroadcastVariablesOp : public CollectiveOp {
 public:
  explicit BroadcastVariablesOp(OpKernelConstruction* ctx)
      : CollectiveOp(ctx), root_(ReadRoot(ctx)) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    names_ = ReadNames(ctx, count_);
  }

  void Compute(OpKernelContext* ctx) override {
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Open(ctx, count_));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx, 0, count_));
    TensorViews values(count_);
    std::vector<void*> outputs;
    for (int i = 0; i < count_; ++i) {
      const Tensor& value = variables[i];
      OP_REQUIRES_OK(ctx, CheckMovable(value.dtype()));
      Add(value, &values, names_[i]);
      outputs.push_back(variables.next(i));
    }
    int changed = 0;
    const OpDevice device(ctx);
    OP_REQUIRES_OK(ctx, ToStatus(adasum_broadcast(values.data(), outputs.data(), values.size(),
                                                  root_, call_name(), &changed, device.get())));
    variables.Commit();
    OutputScalar<bool>(ctx, 0, changed != 0);
  }

 private:
  const int root_;
  int count_ = 0;
  std::vector<std::string> names_;
};

class PlaceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    AdasumTopology topology{};
    OP_REQUIRES_OK(ctx, ToStatus(adasum_topology(&topology)));
    OutputScalar<int64_t>(ctx, 0, topology.rank);
    OutputScalar<int64_t>(ctx, 1, topology.size);
  }
};

REGISTER_KERNEL_BUILDER(Name("AdasumAllreduce").Device(tensorflow::DEVICE_CPU), AllreduceOp);
REGISTER_KERNEL_BUILDER(Name("AdasumSync").Device(tensorflow::DEVICE_CPU), SyncOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBroadcastVariables").Device(tensorflow::DEVICE_CPU),
                        BroadcastVariablesOp);
REGISTER_KERNEL_BUILDER(Name("AdasumAllgather").Device(tensorflow::DEVICE_CPU), AllgatherOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBarrier").Device(tensorflow::DEVICE_CPU), BarrierOp);
REGISTER_KERNEL_BUILDER(Name("AdasumPlace").Device(tensorflow::DEVICE_CPU), PlaceOp);

#ifdef ADASUM_HAS_CUDA
// What says where variables are, and numbers that the host reads or writes, stay in its memory.
REGISTER_KERNEL_BUILDER(Name("AdasumAllreduce").Device(tensorflow::DEVICE_GPU).HostMemory("order"),
                        AllreduceOp);
REGISTER_KERNEL_BUILDER(Name("AdasumSync")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("variables")
                            .HostMemory("starts")
                            .HostMemory("states")
                            .HostMemory("residuals")
                            .HostMemory("pending")
                            .HostMemory("skips_in_a_row")
                            .HostMemory("wire_scale")
                            .HostMemory("order")
                            .HostMemory("syncs")
                            .HostMemory("skipped")
                            .HostMemory("orthogonality")
                            .HostMemory("next_wire_scale"),
                        SyncOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBroadcast").Device(tensorflow::DEVICE_GPU).HostMemory("order"),
                        BroadcastOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBroadcastVariables")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("variables")
                            .HostMemory("order")
                            .HostMemory("changed"),
                        BroadcastVariablesOp);
REGISTER_KERNEL_BUILDER(Name("AdasumAllgather").Device(tensorflow::DEVICE_GPU).HostMemory("order"),
                        AllgatherOp);
REGISTER_KERNEL_BUILDER(Name("AdasumBarrier").Device(tensorflow::DEVICE_GPU).HostMemory("order"),
                        BarrierOp);
REGISTER_KERNEL_BUILDER(
    Name("AdasumPlace").Device(tensorflow::DEVICE_GPU).HostMemory("rank").HostMemory("size"),
    PlaceOp);
#endif

}  // namespace
}  // namespace tf_adasum

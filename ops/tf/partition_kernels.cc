// The kernels of the ops of a partitioned optimizer, on the CPU.

#include <algorithm>
#include <string>
#include <vector>

#include "ops/core/c_api.h"
#include "ops/tf/calls.h"
#include "ops/tf/collective_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_adasum {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class HostSumOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;
  void Compute(OpKernelContext* ctx) override {
    Tensor* sums = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &sums));
    OP_REQUIRES_OK(ctx, ToStatus(adasum_host_sum(ctx->input(0).flat<double>().data(),
                                                 sums->flat<double>().data(), sums->NumElements(),
                                                 call_name())));
  }
};

class ReduceToOwnersOp : public CollectiveOp {
 public:
  explicit ReduceToOwnersOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), owners_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const int count = owners_.count();
    TensorViews inputs(count);
    std::vector<void*> outputs(count, nullptr);
    int at = 0;
    for (int i = 0; i < count; ++i) {
      Add(ctx->input(i), &inputs, owners_.name(i));
      if (!owners_.is_mine(i)) continue;
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(at++, ctx->input(i).shape(), &output));
      outputs[i] = DataOf(*output);
    }
    OP_REQUIRES_OK(
        ctx, ToStatus(adasum_reduce_to_owners(inputs.data(), outputs.data(), owners_.data(), count,
                                              owners_.threshold(), call_name())));
  }

 private:
  const Owners owners_;
};

class ShareFromOwnersOp : public CollectiveOp {
 public:
  explicit ShareFromOwnersOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), owners_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const int count = owners_.count();
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Open(ctx, count));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx, 0, count));
    TensorViews values(count);
    std::vector<void*> outputs;
    for (int i = 0; i < count; ++i) {
      Add(variables[i], &values, owners_.name(i));
      outputs.push_back(variables.next(i));
    }
    OP_REQUIRES_OK(
        ctx, ToStatus(adasum_share_from_owners(values.data(), outputs.data(), owners_.data(), count,
                                               owners_.threshold(), call_name())));
    variables.Commit();
  }

 private:
  const Owners owners_;
};

class PartitionSyncOp : public CollectiveOp {
 public:
  explicit PartitionSyncOp(OpKernelConstruction* ctx)
      : CollectiveOp(ctx), owners_(ctx), reduce_(ReadReduce(ctx)) {
    reduce_.name = call_name();
    std::string nonfinite;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("flush", &flush_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nonfinite", &nonfinite));
    raise_nonfinite_ = nonfinite == "raise";
  }

  void Compute(OpKernelContext* ctx) override {
    const int count = owners_.count(), owned = owners_.mine();
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Open(ctx, count + owned));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite(ctx, 0, count + owned));
    TensorViews values(count);
    std::vector<const void*> starts(count, nullptr);
    std::vector<void*> new_values, new_starts(count, nullptr);
    int at = count;
    for (int i = 0; i < count; ++i) {
      Add(variables[i], &values, owners_.name(i));
      new_values.push_back(variables.next(i));
      if (!owners_.is_mine(i)) continue;
      OP_REQUIRES_OK(ctx, CheckStart(i, variables[i].dtype(), variables[i].shape(),
                                     variables[at].dtype(), variables[at].shape()));
      starts[i] = DataOf(variables[at]);
      new_starts[i] = variables.next(at++);
    }
    AdasumSyncOptions options{};
    options.reduce = reduce_;
    options.pending = ctx->input(count + owned).scalar<bool>()();
    options.flush = flush_;
    options.raise_nonfinite = raise_nonfinite_;
    options.skips_in_a_row = ctx->input(count + owned + 1).scalar<int64_t>()();
    options.flight = -1;
    const AdasumSyncTensors tensors{
        count, values.data(), starts.data(), new_values.data(), new_starts.data(),
        0,     nullptr,       nullptr};
    AdasumSyncResult result{};
    std::vector<double> orthogonality(count);
    OP_REQUIRES_OK(ctx,
                   PartitionSync(tensors, owners_.data(), options, &result, orthogonality.data()));
    variables.Commit();
    OutputScalar<int64_t>(ctx, 0, result.syncs);
    OutputScalar<bool>(ctx, 1, result.skipped != 0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({count}), &output));
    std::copy(orthogonality.begin(), orthogonality.end(), output->vec<float>().data());
  }

 private:
  const Owners owners_;
  AdasumReduceOptions reduce_;
  bool flush_ = false;
  bool raise_nonfinite_ = false;
};

REGISTER_KERNEL_BUILDER(Name("AdasumHostSum").Device(tensorflow::DEVICE_CPU), HostSumOp);
REGISTER_KERNEL_BUILDER(Name("AdasumReduceToOwners").Device(tensorflow::DEVICE_CPU),
                        ReduceToOwnersOp);
REGISTER_KERNEL_BUILDER(Name("AdasumShareFromOwners").Device(tensorflow::DEVICE_CPU),
                        ShareFromOwnersOp);
REGISTER_KERNEL_BUILDER(Name("AdasumPartitionSync").Device(tensorflow::DEVICE_CPU),
                        PartitionSyncOp);

#ifdef ADASUM_HAS_CUDA
class OnGpuOp : public tensorflow::OpKernel {
 public:
  explicit OnGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    ctx->CtxFailure(absl::UnimplementedError(
        "`partition_state` is not yet for variables on a GPU: place them on the CPU, or leave it "
        "out"));
  }
  void Compute(OpKernelContext*) override {}
};

REGISTER_KERNEL_BUILDER(Name("AdasumHostSum").Device(tensorflow::DEVICE_GPU).HostMemory("order"),
                        OnGpuOp);
REGISTER_KERNEL_BUILDER(
    Name("AdasumReduceToOwners").Device(tensorflow::DEVICE_GPU).HostMemory("order"), OnGpuOp);
REGISTER_KERNEL_BUILDER(Name("AdasumShareFromOwners")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("variables")
                            .HostMemory("order"),
                        OnGpuOp);
REGISTER_KERNEL_BUILDER(Name("AdasumPartitionSync")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("variables")
                            .HostMemory("starts")
                            .HostMemory("order"),
                        OnGpuOp);
#endif

}  // namespace
}  // namespace tf_adasum

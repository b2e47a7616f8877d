// The ops in functions that are compiled with jit_compile=True: each becomes a custom call of XLA's
// (typed FFI), whose handler (xla_handlers.cc)
// calls the core.
//
// Order. Ranks must make the same calls in the same order, but XLA keeps only the order that data
// gives: its CPU runtime runs calls that do not depend on each other at the same time. So every
// call also takes a number that the call before it gave, and gives one: the value of the variable
// `order`, which TensorFlow carries into and out of branches, loops and functions.
//
// Memory. A result that replaces an operand takes its memory, unless the program still needs the
// operand: then XLA copies it before.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "ops/tf/calls.h"
#include "tensorflow/compiler/tf2xla/shape_util.h"
#include "tensorflow/compiler/tf2xla/xla_compiler.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/compiler/tf2xla/xla_op_registry.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/shape_util.h"

namespace tf_adasum {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::TensorShape;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;

constexpr char kInstead[] = "Use jit_compile=False (model.compile(..., jit_compile=False)).";

bool HasHandlers(const XlaOpKernelContext& ctx) {
  const std::string& device = ctx.compiler()->options().device_type.type_string();
#ifdef ADASUM_HAS_CUDA
  if (device == tensorflow::DEVICE_GPU_XLA_JIT) return true;
#endif
  return device == tensorflow::DEVICE_CPU_XLA_JIT;
}

// The attributes of a custom call, as the text of a dictionary of MLIR's.
class Attributes {
 public:
  Attributes& Int(absl::string_view name, int64_t value) {
    return Add(name, absl::StrCat(value, " : i64"));
  }
  Attributes& Bool(absl::string_view name, bool value) {
    return Add(name, value ? "true" : "false");
  }
  Attributes& Reduce(const AdasumReduceOptions& options) {
    return Int("op", options.op)
        .Int("algorithm", options.algorithm)
        .Int("fusion_threshold", options.fusion_threshold);
  }
  // Any bytes: all but letters and digits are escaped.
  Attributes& Text(absl::string_view name, absl::string_view value) {
    std::string quoted = "\"";
    for (const char c : value) {
      if (absl::ascii_isalnum(static_cast<unsigned char>(c))) {
        quoted += c;
      } else {
        absl::StrAppend(&quoted, "\\", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
      }
    }
    return Add(name, quoted + "\"");
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  Attributes& Add(absl::string_view name, absl::string_view value) {
    absl::StrAppend(&text_, text_.empty() ? "" : ", ", name, " = ", value);
    return *this;
  }

  std::string text_;
};

// The operands and results of a custom call while it is put together.
class CustomCall {
 public:
  explicit CustomCall(XlaOpKernelContext* ctx) : ctx_(ctx) {}

  absl::Status Read(xla::XlaOp operand) {
    auto shape = ctx_->builder()->GetShape(operand);
    if (!shape.ok()) return shape.status();
    if (!shape->is_static()) {
      return absl::UnimplementedError(absl::StrCat(
          ctx_->op_kernel().type_string(),
          " needs tensors whose sizes are known when XLA compiles. Received: ", shape->ToString(),
          ". ", kInstead));
    }
    // The core takes tensors row by row, whatever layout XLA would like best.
    xla::LayoutUtil::SetToDefaultLayout(&*shape);
    operands_.push_back(operand);
    operand_shapes_.push_back(*std::move(shape));
    return absl::OkStatus();
  }

  // An operand whose memory a result takes.
  absl::Status Replace(xla::XlaOp operand) {
    TF_RETURN_IF_ERROR(Read(operand));
    replaced_.emplace_back(result_shapes_.size(), operands_.size() - 1);
    result_shapes_.push_back(operand_shapes_.back());
    return absl::OkStatus();
  }

  void AddResult(xla::PrimitiveType type, absl::Span<const int64_t> dims) {
    result_shapes_.push_back(xla::ShapeUtil::MakeShape(type, dims));
  }

  // All results, in the order in which they were added.
  std::vector<xla::XlaOp> Emit(const std::string& target, const Attributes& attributes) {
    std::vector<std::pair<xla::ShapeIndex, std::pair<int64_t, xla::ShapeIndex>>> aliases(
        replaced_.size());
    for (size_t i = 0; i < replaced_.size(); ++i) {
      aliases[i].first.push_back(replaced_[i].first);
      aliases[i].second.first = replaced_[i].second;
    }
    const xla::XlaOp all = xla::CustomCallWithLayout(
        ctx_->builder(), target, operands_, xla::ShapeUtil::MakeTupleShape(result_shapes_),
        operand_shapes_, attributes.text(), /*has_side_effect=*/true, aliases,
        /*literal=*/nullptr, xla::CustomCallSchedule::SCHEDULE_NONE,
        xla::CustomCallApiVersion::API_VERSION_TYPED_FFI);
    std::vector<xla::XlaOp> results;
    for (size_t i = 0; i < result_shapes_.size(); ++i) {
      results.push_back(xla::GetTupleElement(all, static_cast<int64_t>(i)));
    }
    return results;
  }

 private:
  XlaOpKernelContext* const ctx_;
  std::vector<xla::XlaOp> operands_;
  std::vector<xla::Shape> operand_shapes_, result_shapes_;
  std::vector<std::pair<int64_t, int64_t>> replaced_;  // results and the operands they replace
};

class CollectiveOp : public XlaOpKernel {
 public:
  explicit CollectiveOp(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("call_name", &call_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("K", &order_count_));
  }

 protected:
  // Emits the call, behind those before it; `outputs` are its results, and the order's next value.
  absl::Status Emit(XlaOpKernelContext* ctx, CustomCall* call, const std::string& target,
                    Attributes attributes, std::vector<xla::XlaOp>* outputs) const {
    if (!HasHandlers(*ctx)) {
      return absl::UnimplementedError(
          absl::StrCat(type_string(), " was not built for what XLA compiles for here, ",
                       ctx->compiler()->options().device_type.type_string(), ". ", kInstead));
    }
    if (order_count_ != 1) {
      return absl::UnimplementedError(
          absl::StrCat(type_string(),
                       " can be compiled by XLA only in a tf.function, whose order of calls "
                       "XLA is told. ",
                       kInstead));
    }
    const int last = ctx->num_inputs() - 1;
    xla::XlaOp order;
    TF_RETURN_IF_ERROR(ctx->ReadVariableInput(last, tensorflow::DT_INT64, nullptr, &order));
    TF_RETURN_IF_ERROR(call->Replace(order));
    *outputs = call->Emit(target, attributes.Text("call_name", call_name_));
    return ctx->AssignVariable(last, tensorflow::DT_INT64, outputs->back());
  }

 private:
  std::string call_name_;
  int order_count_ = 0;
};

// All names as one text.
std::string ReadNames(OpKernelConstruction* ctx) {
  std::vector<std::string> names;
  ctx->SetStatus(ctx->GetAttr("names", &names));
  return absl::StrJoin(names, std::string(1, kBetweenXlaNames));
}

class AllreduceOp : public CollectiveOp {
 public:
  explicit AllreduceOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), reduce_(ReadReduce(ctx)) {}

  void Compile(XlaOpKernelContext* ctx) override {
    CustomCall call(ctx);
    const int count = ctx->num_outputs();
    for (int i = 0; i < count; ++i) OP_REQUIRES_OK(ctx, call.Replace(ctx->Input(i)));
    std::vector<xla::XlaOp> outputs;
    OP_REQUIRES_OK(ctx, Emit(ctx, &call, "tf_adasum.allreduce",
                             Attributes().Int("count", count).Reduce(reduce_), &outputs));
    for (int i = 0; i < count; ++i) ctx->SetOutput(i, outputs[i]);
  }

 private:
  const AdasumReduceOptions reduce_;
};

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), root_(ReadRoot(ctx)) {}

  void Compile(XlaOpKernelContext* ctx) override {
    CustomCall call(ctx);
    const int count = ctx->num_outputs();
    for (int i = 0; i < count; ++i) {
      OP_REQUIRES_OK(ctx, CheckMovable(ctx->input_type(i)));
      OP_REQUIRES_OK(ctx, call.Replace(ctx->Input(i)));
    }
    call.AddResult(xla::PRED, {});
    std::vector<xla::XlaOp> outputs;
    OP_REQUIRES_OK(
        ctx, Emit(ctx, &call, "tf_adasum.broadcast",
                  Attributes().Int("count", count).Int("root", root_).Text("names", ""), &outputs));
    for (int i = 0; i < count; ++i) ctx->SetOutput(i, outputs[i]);
  }

 private:
  const int root_;
};

class BarrierOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;
  void Compile(XlaOpKernelContext* ctx) override {
    CustomCall call(ctx);
    std::vector<xla::XlaOp> outputs;
    OP_REQUIRES_OK(ctx, Emit(ctx, &call, "tf_adasum.barrier", Attributes(), &outputs));
  }
};

// The variables among an op's inputs.
class Variables {
 public:
  absl::Status Open(XlaOpKernelContext* ctx, int count) {
    std::vector<tensorflow::XlaResource*> resources(count);
    variables_.resize(count);
    for (int i = 0; i < count; ++i) {
      TF_RETURN_IF_ERROR(ctx->GetResourceInput(i, &resources[i]));
      Variable& variable = variables_[i];
      TF_RETURN_IF_ERROR(ctx->GetVariableTypeAndShape(i, &variable.dtype, &variable.shape));
      TF_RETURN_IF_ERROR(ctx->ReadVariableInput(i, variable.dtype, nullptr, &variable.value));
    }
    std::sort(resources.begin(), resources.end());
    const bool twice = std::adjacent_find(resources.begin(), resources.end()) != resources.end();
    return twice ? GivenTwice() : absl::OkStatus();
  }

  struct Variable {
    DataType dtype;
    TensorShape shape;
    xla::XlaOp value;
  };

  const Variable& operator[](size_t i) const { return variables_[i]; }

  absl::Status Assign(XlaOpKernelContext* ctx, int i, xla::XlaOp value) const {
    return ctx->AssignVariable(i, variables_[i].dtype, value);
  }

 private:
  std::vector<Variable> variables_;
};

class BroadcastVariablesOp : public CollectiveOp {
 public:
  explicit BroadcastVariablesOp(OpKernelConstruction* ctx)
      : CollectiveOp(ctx), root_(ReadRoot(ctx)) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    names_ = ReadNames(ctx);
  }

  void Compile(XlaOpKernelContext* ctx) override {
    Variables variables;
    OP_REQUIRES_OK(ctx, variables.Open(ctx, count_));
    CustomCall call(ctx);
    for (int i = 0; i < count_; ++i) {
      OP_REQUIRES_OK(ctx, CheckMovable(variables[i].dtype));
      OP_REQUIRES_OK(ctx, call.Replace(variables[i].value));
    }
    call.AddResult(xla::PRED, {});
    std::vector<xla::XlaOp> outputs;
    OP_REQUIRES_OK(
        ctx,
        Emit(ctx, &call, "tf_adasum.broadcast",
             Attributes().Int("count", count_).Int("root", root_).Text("names", names_), &outputs));
    for (int i = 0; i < count_; ++i) OP_REQUIRES_OK(ctx, variables.Assign(ctx, i, outputs[i]));
    ctx->SetOutput(0, outputs[count_]);
  }

 private:
  const int root_;
  int count_ = 0;
  std::string names_;
};

class SyncOp : public CollectiveOp {
 public:
  explicit SyncOp(OpKernelConstruction* ctx) : CollectiveOp(ctx), reduce_(ReadReduce(ctx)) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &state_count_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("R", &residual_count_));
    wire_dtype_ = ReadWire(ctx);
    OP_REQUIRES_OK(ctx, ctx->GetAttr("flush", &flush_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("flight", &flight_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nonfinite", &nonfinite_));
    names_ = ReadNames(ctx);
  }

  void Compile(XlaOpKernelContext* ctx) override {
    const int scalars_at = 2 * count_ + state_count_ + residual_count_;
    Variables variables;
    OP_REQUIRES_OK(ctx, variables.Open(ctx, scalars_at));
    CustomCall call(ctx);
    std::vector<int> replaced;
    for (int i = 0; i < scalars_at; ++i) {
      const bool is_start = i >= count_ && i < 2 * count_;
      if (is_start) {
        const auto& value = variables[i - count_];
        const auto& start = variables[i];
        OP_REQUIRES_OK(ctx,
                       CheckStart(i - count_, value.dtype, value.shape, start.dtype, start.shape));
      }
      if (is_start && !flush_ && flight_ < 0) {
        OP_REQUIRES_OK(ctx, call.Read(variables[i].value));
      } else {
        OP_REQUIRES_OK(ctx, call.Replace(variables[i].value));
        replaced.push_back(i);
      }
    }
    constexpr int kScalars = 3, kResults = 4;
    for (int i = 0; i < kScalars; ++i) OP_REQUIRES_OK(ctx, call.Read(ctx->Input(scalars_at + i)));
    call.AddResult(xla::S64, {});
    call.AddResult(xla::PRED, {});
    call.AddResult(xla::F32, {count_});
    call.AddResult(xla::S64, {2});
    const Attributes attributes = Attributes()
                                      .Int("count", count_)
                                      .Int("state_count", state_count_)
                                      .Int("residual_count", residual_count_)
                                      .Int("wire_dtype", wire_dtype_)
                                      .Reduce(reduce_)
                                      .Bool("flush", flush_)
                                      .Int("flight", flight_)
                                      .Bool("raise_nonfinite", nonfinite_ == "raise")
                                      .Text("names", names_);
    std::vector<xla::XlaOp> outputs;
    OP_REQUIRES_OK(ctx, Emit(ctx, &call, "tf_adasum.sync", attributes, &outputs));
    for (size_t i = 0; i < replaced.size(); ++i) {
      OP_REQUIRES_OK(ctx, variables.Assign(ctx, replaced[i], outputs[i]));
    }
    for (int i = 0; i < kResults; ++i) ctx->SetOutput(i, outputs[replaced.size() + i]);
  }

 private:
  const AdasumReduceOptions reduce_;
  int count_ = 0;
  int state_count_ = 0;
  int residual_count_ = 0;
  int wire_dtype_ = ADASUM_OTHER;
  bool flush_ = false;
  int64_t flight_ = -1;
  std::string nonfinite_;
  std::string names_;
};

class AllgatherOp : public XlaOpKernel {
 public:
  using XlaOpKernel::XlaOpKernel;
  void Compile(XlaOpKernelContext* ctx) override {
    ctx->SetStatus(absl::UnimplementedError(absl::StrCat(
        "allgather cannot be compiled by XLA: how long its result is depends on the other ranks, "
        "and XLA has to know all shapes when it compiles. ",
        kInstead)));
  }
};

class PartitionOp : public XlaOpKernel {
 public:
  using XlaOpKernel::XlaOpKernel;
  void Compile(XlaOpKernelContext* ctx) override {
    ctx->SetStatus(absl::UnimplementedError(
        absl::StrCat("`partition_state` cannot be compiled by XLA yet. ", kInstead)));
  }
};

// Not by REGISTER_XLA_OP: TensorFlow makes kernels of what it registers when the process computes
// something for the first time, and this library may be loaded after that.
#define REGISTER_ADASUM_XLA_KERNEL(name, kernel)                                      \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU_XLA_JIT), kernel); \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU_XLA_JIT), kernel)

REGISTER_ADASUM_XLA_KERNEL("AdasumAllreduce", AllreduceOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumSync", SyncOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumHostSum", PartitionOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumReduceToOwners", PartitionOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumShareFromOwners", PartitionOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumPartitionSync", PartitionOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumBroadcast", BroadcastOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumBroadcastVariables", BroadcastVariablesOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumAllgather", AllgatherOp);
REGISTER_ADASUM_XLA_KERNEL("AdasumBarrier", BarrierOp);

}  // namespace
}  // namespace tf_adasum

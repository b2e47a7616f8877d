#include "ops/tf/calls.h"

#include <algorithm>
#include <cstdio>
#include <mutex>

namespace tf_adasum {

namespace {

// Not through TensorFlow's log, which users of Keras silence.
void Warn(const std::string& text) {
  std::fprintf(stderr, "tf_adasum: warning: %s\n", text.c_str());
  std::fflush(stderr);
}

int Rank() {
  AdasumTopology topology{};
  return adasum_topology(&topology) == ADASUM_OK ? topology.rank : 0;
}

void WarnOnceOfUnshardedData() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (Rank() != 0) return;
    Warn(
        "all ranks have made the same change of the weights, so they seem to train on the same "
        "data. Give each rank its own part: tf_adasum.shard(data).");
  });
}

// As NumPy spells it, which is how the core's other users do.
std::string DTypeName(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return "float16";
    case tensorflow::DT_FLOAT:
      return "float32";
    case tensorflow::DT_DOUBLE:
      return "float64";
    default:
      return tensorflow::DataTypeString(dtype);
  }
}

int DTypeCode(tensorflow::DataType dtype) {
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

}  // namespace

absl::Status ToStatus(int code) {
  if (code == ADASUM_OK) return absl::OkStatus();
  const std::string message = adasum_last_error();
  switch (code) {
    case ADASUM_INVALID_ARGUMENT:
    case ADASUM_DISAGREEMENT:
      return absl::InvalidArgumentError(message);
    case ADASUM_TRANSPORT:
    case ADASUM_RANK_LOST:
      return absl::UnavailableError(message);
    case ADASUM_STATE:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

AdasumReduceOptions ReadReduce(tensorflow::OpKernelConstruction* ctx) {
  std::string op, algorithm;
  AdasumReduceOptions options{};
  ctx->SetStatus(ctx->GetAttr("op", &op));
  ctx->SetStatus(ctx->GetAttr("algorithm", &algorithm));
  ctx->SetStatus(ctx->GetAttr("fusion_threshold", &options.fusion_threshold));
  options.op = op == "sum" ? ADASUM_OP_SUM : op == "average" ? ADASUM_OP_AVERAGE : ADASUM_OP_ADASUM;
  options.algorithm = algorithm == "ring"               ? ADASUM_RING
                      : algorithm == "hierarchical"     ? ADASUM_HIERARCHICAL
                      : algorithm == "hierarchical_sum" ? ADASUM_HIERARCHICAL_SUM
                                                        : ADASUM_RVH;
  return options;
}

int ReadRoot(tensorflow::OpKernelConstruction* ctx) {
  int root = 0;
  ctx->SetStatus(ctx->GetAttr("root_rank", &root));
  return root;
}

int ReadWire(tensorflow::OpKernelConstruction* ctx) {
  std::string dtype;
  ctx->SetStatus(ctx->GetAttr("wire_dtype", &dtype));
  return dtype == "float16" ? ADASUM_FLOAT16 : dtype == "bfloat16" ? ADASUM_BFLOAT16 : ADASUM_OTHER;
}

namespace {

absl::Status Tell(int code, const AdasumSyncResult* result) {
  const absl::Status status = ToStatus(code);
  if (!status.ok()) return status;
  if (result->identical) WarnOnceOfUnshardedData();
  if (result->skipped) {
    Warn("rank " + std::to_string(Rank()) +
         "'s change of the weights since the last sync is not finite and counts as zero; the rank "
         "goes on from the other ranks' weights.");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Sync(const AdasumSyncTensors& tensors, const AdasumSyncOptions& options,
                  AdasumSyncResult* result, double* orthogonality) {
  return Tell(adasum_sync(&tensors, &options, result, orthogonality), result);
}

absl::Status PartitionSync(const AdasumSyncTensors& tensors, const int32_t* owner_of,
                           const AdasumSyncOptions& options, AdasumSyncResult* result,
                           double* orthogonality) {
  return Tell(adasum_partition_sync(&tensors, owner_of, &options, result, orthogonality), result);
}

Owners::Owners(tensorflow::OpKernelConstruction* ctx) {
  ctx->SetStatus(ctx->GetAttr("owner_of", &owner_of_));
  ctx->SetStatus(ctx->GetAttr("names", &names_));
  ctx->SetStatus(ctx->GetAttr("fusion_threshold", &threshold_));
  if (ctx->HasAttr("lane")) ctx->SetStatus(ctx->GetAttr("lane", &lane_));
  names_.resize(owner_of_.size());
  int64_t tensors = 0;
  if (ctx->HasAttr("N") && ctx->GetAttr("N", &tensors).ok() && tensors != count()) {
    ctx->SetStatus(absl::InvalidArgumentError("`owner_of` must name the owner of each variable"));
  }
}

int Owners::mine() const {
  return static_cast<int>(std::count(owner_of_.begin(), owner_of_.end(), lane_));
}

void TensorViews::Add(const void* data, absl::Span<const int64_t> dims, tensorflow::DataType dtype,
                      const std::string& name) {
  dims_.emplace_back(dims.begin(), dims.end());
  dtype_names_.push_back(DTypeName(dtype));
  names_.push_back(name);
  views_.push_back({data, dims_.back().data(), tensorflow::DataTypeSize(dtype),
                    dtype_names_.back().c_str(), names_.back().c_str(),
                    static_cast<int32_t>(dims.size()), DTypeCode(dtype)});
}

absl::Status CheckMovable(tensorflow::DataType dtype) {
  if (tensorflow::DataTypeCanUseMemcpy(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError("a collective moves numbers and booleans. Received: " +
                                    tensorflow::DataTypeString(dtype));
}

absl::Status CheckStart(int index, tensorflow::DataType dtype, const tensorflow::TensorShape& shape,
                        tensorflow::DataType start_dtype,
                        const tensorflow::TensorShape& start_shape) {
  if (dtype == start_dtype && shape == start_shape) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "variable " + std::to_string(index) + " is " + tensorflow::DataTypeString(dtype) +
      shape.DebugString() + ", but its start is " + tensorflow::DataTypeString(start_dtype) +
      start_shape.DebugString());
}

absl::Status GivenTwice() {
  return absl::InvalidArgumentError("each variable may be given only once");
}

}  // namespace tf_adasum

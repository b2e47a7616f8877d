#include "arguments.h"

#include <algorithm>
#include <limits>

#include "devices.h"

namespace adasum {

namespace {

[[noreturn]] void Refuse(const std::string& text) {
  throw Error(ErrorKind::kInvalidArgument, text);
}

Op ToOp(int op) {
  if (op < ADASUM_OP_ADASUM || op > ADASUM_OP_AVERAGE) {
    Refuse("`op` must be 0 (Adasum), 1 (Sum) or 2 (Average). Received: " + std::to_string(op));
  }
  return static_cast<Op>(op);
}

void CheckItems(const AdasumTensor& tensor, const std::string& which) {
  if (tensor.dtype < ADASUM_OTHER || tensor.dtype > ADASUM_FLOAT64) {
    Refuse(which + " must have a dtype from 0 (other) to 4 (float64). Received: " +
           std::to_string(tensor.dtype));
  }
  if (tensor.dtype_name == nullptr) Refuse(which + " must have a `dtype_name`");
  if (tensor.dtype == ADASUM_OTHER) {
    if (tensor.item_bytes >= 0) return;
    Refuse(which + " must not have a negative `item_bytes`. Received: " +
           std::to_string(tensor.item_bytes));
  }
  const int64_t bytes = HostDevice().kernels(static_cast<DType>(tensor.dtype)).item_bytes;
  if (tensor.item_bytes != bytes) {
    Refuse(which + " is of a dtype whose `item_bytes` is " + std::to_string(bytes) +
           ". Received: " + std::to_string(tensor.item_bytes));
  }
}

void CheckDims(const AdasumTensor& tensor, const std::string& which) {
  if (tensor.rank < 0) {
    Refuse(which + " must not have a negative number of dimensions. Received: " +
           std::to_string(tensor.rank));
  }
  if (tensor.rank > 0 && tensor.dims == nullptr) Refuse(which + " must have `dims`");
  // Also without those that are 0, since a product of some of them is made too.
  int64_t bytes = std::max<int64_t>(tensor.item_bytes, 1);
  for (int i = 0; i < tensor.rank; ++i) {
    const int64_t dim = tensor.dims[i];
    if (dim < 0) {
      Refuse(which + " must not have a negative dimension. Received: " + std::to_string(dim));
    }
    if (dim > 0 && __builtin_mul_overflow(bytes, dim, &bytes)) {
      Refuse(which + " must have less than 2^63 bytes, whatever dimension is 0");
    }
  }
}

}  // namespace

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

ReduceOptions OptionsOf(const AdasumReduceOptions& given, const Transport& transport,
                        Device& device) {
  if (given.algorithm < ADASUM_RVH || given.algorithm > ADASUM_HIERARCHICAL_SUM) {
    Refuse(
        "`algorithm` must be 0 (rvh), 1 (ring), 2 (hierarchical) or 3 (hierarchical_sum). "
        "Received: " +
        std::to_string(given.algorithm));
  }
  if (given.fusion_threshold < -1) {
    Refuse("`fusion_threshold` must be a number of bytes, or -1 for the default. Received: " +
           std::to_string(given.fusion_threshold));
  }
  int64_t threshold = given.fusion_threshold;
  if (threshold < 0) {
    threshold = FusionThresholdOfEnvironment().value_or(DefaultFusionThreshold(transport, device));
  }
  return {ToOp(given.op), static_cast<Algorithm>(given.algorithm), threshold, &device};
}

std::vector<TensorSpec> SpecsOf(const AdasumTensor* tensors, int64_t count, const char* what) {
  const std::string kind(what);
  if (count < 0) {
    Refuse("the number of " + kind + "s must not be negative. Received: " + std::to_string(count));
  }
  if (count > 0 && tensors == nullptr) Refuse("the " + kind + "s must not be null");
  std::vector<TensorSpec> specs;
  for (int64_t t = 0; t < count; ++t) {
    const AdasumTensor& tensor = tensors[t];
    const std::string which = kind + " " + std::to_string(t);
    CheckItems(tensor, which);
    CheckDims(tensor, which);
    specs.push_back({static_cast<DType>(tensor.dtype), tensor.dtype_name, tensor.item_bytes,
                     tensor.dims, tensor.rank, tensor.name == nullptr ? "" : tensor.name});
    if (tensor.data == nullptr && specs.back().bytes() > 0) Refuse(which + " must have `data`");
  }
  return specs;
}

std::vector<const void*> DataOf(const AdasumTensor* tensors, int64_t count) {
  std::vector<const void*> data;
  data.reserve(static_cast<size_t>(count));
  for (int64_t t = 0; t < count; ++t) data.push_back(tensors[t].data);
  return data;
}

Wire WireOf(const AdasumSyncOptions& given, const AdasumTensor* values, int64_t count) {
  if (given.wire_dtype == ADASUM_OTHER) return {};
  if (given.wire_dtype != ADASUM_FLOAT16 && given.wire_dtype != ADASUM_BFLOAT16) {
    Refuse("`wire_dtype` must be 0 (as they are), 1 (float16) or 2 (bfloat16). Received: " +
           std::to_string(given.wire_dtype));
  }
  constexpr int64_t kLargest = 120;
  if (given.wire_exponent < -kLargest || given.wire_exponent > kLargest) {
    Refuse("`wire_exponent` must be from -120 to 120. Received: " +
           std::to_string(given.wire_exponent));
  }
  for (int64_t t = 0; given.residuals != nullptr && t < count; ++t) {
    const bool is_kept = values[t].dtype == ADASUM_FLOAT32 && given.residuals[t] == nullptr;
    if (is_kept && SpecsOf(values + t, 1, "tensor")[0].bytes() > 0) {
      Refuse("`residuals` must have memory for tensor " + std::to_string(t));
    }
  }
  if (given.wire_good_syncs < 0) {
    Refuse("`wire_good_syncs` must not be negative. Received: " +
           std::to_string(given.wire_good_syncs));
  }
  return {static_cast<DType>(given.wire_dtype),
          {given.wire_exponent, given.wire_good_syncs},
          given.residuals};
}

void CheckMemory(const std::vector<TensorSpec>& specs, const void* const* memory,
                 const char* name) {
  for (size_t t = 0; t < specs.size(); ++t) {
    if (memory == nullptr) Refuse(std::string("`") + name + "` must not be null");
    if (memory[t] == nullptr && specs[t].bytes() > 0) {
      Refuse(std::string("`") + name + "` must have memory for tensor " + std::to_string(t));
    }
  }
}

SyncArguments::SyncArguments(const AdasumSyncTensors* t, const AdasumSyncOptions* o,
                             const Transport& transport)
    : flight((Given(t, "tensors"), Given(o, "options").flight)),
      name(TextOf(o->reduce.name)),
      options{OptionsOf(o->reduce, transport, DeviceOf(o->reduce.device)),
              o->pending != 0,
              o->flush != 0,
              o->raise_nonfinite != 0,
              o->skips_in_a_row,
              WireOf(*o, t->values, t->count)},
      specs(SpecsOf(t->values, t->count, "tensor")),
      states(SpecsOf(t->states, t->state_count, "averaged state")),
      values(DataOf(t->values, t->count)),
      state_data(DataOf(t->states, t->state_count)),
      tensors{specs,         values.data(), t->starts,         t->new_values,
              t->new_starts, states,        state_data.data(), t->new_states} {
  CheckMemory(specs, t->starts, "starts");
  CheckMemory(specs, t->new_values, "new_values");
  CheckMemory(states, t->new_states, "new_states");
  if (is_flight() && !options.reduce.device->is_host()) {
    throw Error(ErrorKind::kInvalidArgument,
                "a sync beside training takes tensors in the host's memory only");
  }
  if (options.wire.is_narrow() && !options.reduce.device->is_host()) {
    throw Error(ErrorKind::kInvalidArgument,
                "`wire_dtype` is for tensors in the host's memory, not yet for those on a GPU");
  }
  if (is_flight() && options.wire.is_narrow()) {
    throw Error(ErrorKind::kInvalidArgument, "a sync beside training has no `wire_dtype`");
  }
  if (is_flight() && !states.empty()) {
    throw Error(ErrorKind::kInvalidArgument, "a sync beside training takes no states");
  }
  if (t->new_starts != nullptr || is_flight() || options.flush) {
    CheckMemory(specs, t->new_starts, "new_starts");
  }
}

AdasumSyncResult ResultOf(const SyncResult& done) {
  return {done.syncs, done.skipped, done.report.identical(), done.scale.exponent, done.scale.good};
}

void TellOrthogonality(const Report& report, int64_t count, double* orthogonality) {
  if (orthogonality == nullptr) return;
  const std::vector<double>& known = report.orthogonality;
  for (int64_t i = 0; i < count; ++i) {
    orthogonality[i] = known.empty() ? std::numeric_limits<double>::quiet_NaN() : known[i];
  }
}

}  // namespace adasum

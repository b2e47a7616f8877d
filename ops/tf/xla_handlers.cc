// What runs when a function that was compiled with jit_compile=True comes to one of the ops: the
// handlers of XLA's custom calls (typed FFI), for memory of the host. They call the core. See
// xla_kernels.cc.

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "ops/core/c_api.h"
#include "ops/tf/calls.h"
#include "tensorflow/compiler/tf2xla/type_util.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
// The wheel lacks what the header that declares this includes.
const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace tf_adasum {
namespace {

namespace ffi = xla::ffi;

// The operands and results of a custom call. `get` fails for no index that there is.
struct Buffers {
  ffi::RemainingArgs operands;
  ffi::RemainingRets results;

  ffi::AnyBuffer operand(size_t i) const { return operands.get<ffi::AnyBuffer>(i).value(); }
  void* result(size_t i) const { return (*results.get<ffi::AnyBuffer>(i).value()).untyped_data(); }

  // names: none, or one for each, as in the attribute "names".
  absl::Status View(size_t begin, size_t count, TensorViews* views,
                    absl::string_view names = "") const {
    const std::vector<std::string> each = absl::StrSplit(names, kBetweenXlaNames);
    for (size_t i = begin; i < begin + count; ++i) {
      const ffi::AnyBuffer buffer = operand(i);
      const auto type = static_cast<xla::PrimitiveType>(buffer.element_type());
      const auto dtype = tensorflow::EncodePrimitiveTypeAsDataType(type);
      if (!dtype.ok()) return dtype.status();
      const auto dims = buffer.dimensions();
      const std::string name = each.size() == count ? each[i - begin] : "";
      views->Add(buffer.untyped_data(), {dims.begin(), dims.size()}, *dtype, name);
    }
    return absl::OkStatus();
  }

  // The memory of some results in a row.
  std::vector<void*> Results(size_t begin, size_t count) const {
    std::vector<void*> memory(count);
    for (size_t i = 0; i < count; ++i) memory[i] = result(begin + i);
    return memory;
  }
};

ffi::Error ToFfi(const absl::Status& status) {
  return ffi::Error(static_cast<ffi::ErrorCode>(status.code()), std::string(status.message()));
}

// What Attributes::Reduce gives.
AdasumReduceOptions ToOptions(int64_t op, int64_t algorithm, int64_t fusion_threshold,
                              const std::string& name) {
  return {static_cast<int32_t>(op), static_cast<int32_t>(algorithm), fusion_threshold,
          name.c_str()};
}

absl::Status Allreduce(const Buffers& buffers, int64_t count, const AdasumReduceOptions& options) {
  TensorViews inputs(count);
  TF_RETURN_IF_ERROR(buffers.View(0, count, &inputs));
  return ToStatus(
      adasum_allreduce(inputs.data(), buffers.Results(0, count).data(), count, &options));
}

absl::Status Broadcast(const Buffers& buffers, int64_t count, int64_t root, absl::string_view names,
                       const std::string& name) {
  TensorViews tensors(count);
  TF_RETURN_IF_ERROR(buffers.View(0, count, &tensors, names));
  int changed = 0;
  TF_RETURN_IF_ERROR(
      ToStatus(adasum_broadcast(tensors.data(), buffers.Results(0, count).data(), count,
                                static_cast<int>(root), name.c_str(), &changed)));
  *static_cast<bool*>(buffers.result(count)) = changed != 0;
  return absl::OkStatus();
}

absl::Status Barrier(const std::string& name) { return ToStatus(adasum_barrier(name.c_str())); }

// Operands: values, starts, states, pending, skips_in_a_row. Results: new values, new starts if
// flush, new states, syncs, skipped, orthogonality.
absl::Status SyncBuffers(const Buffers& buffers, int64_t count, int64_t state_count,
                         const AdasumReduceOptions& reduce, bool flush, int64_t flight,
                         bool raise_nonfinite, absl::string_view names) {
  TensorViews values(count), states(state_count);
  TF_RETURN_IF_ERROR(buffers.View(0, count, &values, names));
  TF_RETURN_IF_ERROR(buffers.View(2 * count, state_count, &states));
  std::vector<const void*> starts;
  for (int64_t i = count; i < 2 * count; ++i) starts.push_back(buffers.operand(i).untyped_data());
  const std::vector<void*> new_values = buffers.Results(0, count);
  const std::vector<void*> new_starts = buffers.Results(count, flush || flight >= 0 ? count : 0);
  const int64_t states_at = count + static_cast<int64_t>(new_starts.size());
  const std::vector<void*> new_states = buffers.Results(states_at, state_count);

  const int64_t scalars_at = 2 * count + state_count;
  const AdasumSyncOptions options{
      reduce,
      *static_cast<const bool*>(buffers.operand(scalars_at).untyped_data()),
      flush,
      raise_nonfinite,
      *static_cast<const int64_t*>(buffers.operand(scalars_at + 1).untyped_data()),
      flight};
  const AdasumSyncTensors tensors{count,
                                  values.data(),
                                  starts.data(),
                                  new_values.data(),
                                  new_starts.empty() ? nullptr : new_starts.data(),
                                  state_count,
                                  states.data(),
                                  new_states.data()};
  AdasumSyncResult result{};
  std::vector<double> orthogonality(count);
  TF_RETURN_IF_ERROR(Sync(tensors, options, &result, orthogonality.data()));
  const int64_t results_at = states_at + state_count;
  *static_cast<int64_t*>(buffers.result(results_at)) = result.syncs;
  *static_cast<bool*>(buffers.result(results_at + 1)) = result.skipped != 0;
  std::copy(orthogonality.begin(), orthogonality.end(),
            static_cast<float*>(buffers.result(results_at + 2)));
  return absl::OkStatus();
}

XLA_FFI_DEFINE_HANDLER(
    kAllreduce,
    [](ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t count, int64_t op,
       int64_t algorithm, int64_t fusion_threshold, std::string_view call_name) {
      const std::string name(call_name);
      return ToFfi(
          Allreduce({operands, results}, count, ToOptions(op, algorithm, fusion_threshold, name)));
    },
    ffi::Ffi::Bind()
        .RemainingArgs()
        .RemainingRets()
        .Attr<int64_t>("count")
        .Attr<int64_t>("op")
        .Attr<int64_t>("algorithm")
        .Attr<int64_t>("fusion_threshold")
        .Attr<std::string_view>("call_name"));

XLA_FFI_DEFINE_HANDLER(
    kBroadcast,
    [](ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t count, int64_t root,
       std::string_view names, std::string_view name) {
      return ToFfi(Broadcast({operands, results}, count, root, names, std::string(name)));
    },
    ffi::Ffi::Bind()
        .RemainingArgs()
        .RemainingRets()
        .Attr<int64_t>("count")
        .Attr<int64_t>("root")
        .Attr<std::string_view>("names")
        .Attr<std::string_view>("call_name"));

XLA_FFI_DEFINE_HANDLER(
    kBarrier,
    [](ffi::RemainingArgs, ffi::RemainingRets, std::string_view name) {
      return ToFfi(Barrier(std::string(name)));
    },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::string_view>("call_name"));

XLA_FFI_DEFINE_HANDLER(
    kSync,
    [](ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t count, int64_t state_count,
       int64_t op, int64_t algorithm, int64_t fusion_threshold, bool flush, int64_t flight,
       bool raise_nonfinite, std::string_view names, std::string_view call_name) {
      const std::string name(call_name);
      return ToFfi(SyncBuffers({operands, results}, count, state_count,
                               ToOptions(op, algorithm, fusion_threshold, name), flush, flight,
                               raise_nonfinite, names));
    },
    ffi::Ffi::Bind()
        .RemainingArgs()
        .RemainingRets()
        .Attr<int64_t>("count")
        .Attr<int64_t>("state_count")
        .Attr<int64_t>("op")
        .Attr<int64_t>("algorithm")
        .Attr<int64_t>("fusion_threshold")
        .Attr<bool>("flush")
        .Attr<int64_t>("flight")
        .Attr<bool>("raise_nonfinite")
        .Attr<std::string_view>("names")
        .Attr<std::string_view>("call_name"));

XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "tf_adasum.allreduce", "Host", kAllreduce);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "tf_adasum.broadcast", "Host", kBroadcast);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "tf_adasum.barrier", "Host", kBarrier);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "tf_adasum.sync", "Host", kSync);

}  // namespace
}  // namespace tf_adasum

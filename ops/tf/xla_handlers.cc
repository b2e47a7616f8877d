// What runs when a function that was compiled with jit_compile=True comes to one of the ops: the
// handlers of XLA's custom calls (typed FFI), for memory of the host and of GPUs. They call the
// core. See xla_kernels.cc.

#include <cstring>
#include <string>
#include <utility>
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

// The operands and results of a custom call, and where they are; null for the host. `get` fails for
// no index that there is.
struct Buffers {
  ffi::RemainingArgs operands;
  ffi::RemainingRets results;
  const AdasumDevice* device;

  ffi::AnyBuffer operand(size_t i) const { return operands.get<ffi::AnyBuffer>(i).value(); }
  void* result(size_t i) const { return (*results.get<ffi::AnyBuffer>(i).value()).untyped_data(); }

  // A number.
  template <typename T>
  absl::Status Read(size_t i, T* number) const {
    return ToStatus(
        adasum_device_copy(device, number, operand(i).untyped_data(), sizeof(T), false));
  }
  // A result.
  template <typename T>
  absl::Status Write(size_t i, const T* numbers, size_t count) const {
    return ToStatus(adasum_device_copy(device, result(i), numbers,
                                       static_cast<int64_t>(count * sizeof(T)), true));
  }

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
                              const std::string& name, const AdasumDevice* device) {
  return {static_cast<int32_t>(op), static_cast<int32_t>(algorithm), fusion_threshold, name.c_str(),
          device};
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
                                static_cast<int>(root), name.c_str(), &changed, buffers.device)));
  const bool differed = changed != 0;
  return buffers.Write(count, &differed, 1);
}

absl::Status Barrier(const std::string& name) { return ToStatus(adasum_barrier(name.c_str())); }

// Operands: values, starts, states, residuals, pending, skips_in_a_row, wire_scale. Results: new
// values, new starts if flush, new states, new residuals, syncs, skipped, orthogonality,
// next_wire_scale.
absl::Status SyncBuffers(const Buffers& buffers, int64_t count, int64_t state_count,
                         int64_t residual_count, int64_t wire_dtype,
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

  const int64_t residuals_at = states_at + state_count;
  const int64_t scalars_at = 2 * count + state_count + residual_count;
  // They are read and written in place.
  std::vector<float*> residuals;
  for (int64_t i = 0; i < residual_count; ++i) {
    const ffi::AnyBuffer kept = buffers.operand(2 * count + state_count + i);
    void* memory = buffers.result(residuals_at + i);
    // On a GPU the core refuses the call.
    if (memory != kept.untyped_data() && buffers.device == nullptr) {
      std::memcpy(memory, kept.untyped_data(), kept.size_bytes());
    }
    residuals.push_back(static_cast<float*>(memory));
  }
  bool pending = false;
  int64_t skips_in_a_row = 0, scale[2] = {};
  TF_RETURN_IF_ERROR(buffers.Read(scalars_at, &pending));
  TF_RETURN_IF_ERROR(buffers.Read(scalars_at + 1, &skips_in_a_row));
  TF_RETURN_IF_ERROR(buffers.Read(scalars_at + 2, &scale));
  const AdasumSyncOptions options{reduce,
                                  pending,
                                  flush,
                                  raise_nonfinite,
                                  skips_in_a_row,
                                  flight,
                                  static_cast<int32_t>(wire_dtype),
                                  scale[0],
                                  scale[1],
                                  residuals.empty() ? nullptr : residuals.data()};
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
  const int64_t results_at = residuals_at + residual_count;
  const bool skipped = result.skipped != 0;
  const std::vector<float> narrow(orthogonality.begin(), orthogonality.end());
  TF_RETURN_IF_ERROR(buffers.Write(results_at, &result.syncs, 1));
  TF_RETURN_IF_ERROR(buffers.Write(results_at + 1, &skipped, 1));
  TF_RETURN_IF_ERROR(buffers.Write(results_at + 2, narrow.data(), narrow.size()));
  const int64_t next_scale[] = {result.wire_exponent, result.wire_good_syncs};
  return buffers.Write(results_at + 3, next_scale, 2);
}

// A handler for each kind of memory: that for GPUs gets the stream too.

ffi::Error RunAllreduce(const AdasumDevice* device, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, int64_t count, int64_t op, int64_t algorithm,
                        int64_t fusion_threshold, std::string_view call_name) {
  const std::string name(call_name);
  return ToFfi(Allreduce({operands, results, device}, count,
                         ToOptions(op, algorithm, fusion_threshold, name, device)));
}

ffi::Error RunBroadcast(const AdasumDevice* device, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, int64_t count, int64_t root,
                        std::string_view names, std::string_view name) {
  return ToFfi(Broadcast({operands, results, device}, count, root, names, std::string(name)));
}

ffi::Error RunBarrier(const AdasumDevice*, ffi::RemainingArgs, ffi::RemainingRets,
                      std::string_view name) {
  return ToFfi(Barrier(std::string(name)));
}

ffi::Error RunSync(const AdasumDevice* device, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, int64_t count, int64_t state_count,
                   int64_t residual_count, int64_t wire_dtype, int64_t op, int64_t algorithm,
                   int64_t fusion_threshold, bool flush, int64_t flight, bool raise_nonfinite,
                   std::string_view names, std::string_view call_name) {
  const std::string name(call_name);
  return ToFfi(SyncBuffers({operands, results, device}, count, state_count, residual_count,
                           wire_dtype, ToOptions(op, algorithm, fusion_threshold, name, device),
                           flush, flight, raise_nonfinite, names));
}

// What follows the stream, if there is one.

template <typename Binding>
auto BindAllreduce(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("count")
      .template Attr<int64_t>("op")
      .template Attr<int64_t>("algorithm")
      .template Attr<int64_t>("fusion_threshold")
      .template Attr<std::string_view>("call_name");
}

template <typename Binding>
auto BindBroadcast(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("count")
      .template Attr<int64_t>("root")
      .template Attr<std::string_view>("names")
      .template Attr<std::string_view>("call_name");
}

template <typename Binding>
auto BindBarrier(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().template Attr<std::string_view>(
      "call_name");
}

template <typename Binding>
auto BindSync(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("count")
      .template Attr<int64_t>("state_count")
      .template Attr<int64_t>("residual_count")
      .template Attr<int64_t>("wire_dtype")
      .template Attr<int64_t>("op")
      .template Attr<int64_t>("algorithm")
      .template Attr<int64_t>("fusion_threshold")
      .template Attr<bool>("flush")
      .template Attr<int64_t>("flight")
      .template Attr<bool>("raise_nonfinite")
      .template Attr<std::string_view>("names")
      .template Attr<std::string_view>("call_name");
}

// Calls one of the functions above for memory of the host, or of a GPU, for which there is a
// stream.
template <auto kRun>
struct OnHost {
  template <typename... Given>
  ffi::Error operator()(Given... given) const {
    return kRun(nullptr, given...);
  }
};

template <auto kRun>
struct OnCuda {
  template <typename... Given>
  ffi::Error operator()(void* stream, Given... given) const {
    const AdasumDevice device{ADASUM_CUDA, stream, nullptr, nullptr, nullptr};
    return kRun(&device, given...);
  }
};

#define ADASUM_HANDLER(name, run, target, platform, binding) \
  XLA_FFI_DEFINE_HANDLER(name, run(), binding);              \
  XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), "tf_adasum." target, platform, name)

ADASUM_HANDLER(kAllreduce, OnHost<RunAllreduce>, "allreduce", "Host",
               BindAllreduce(ffi::Ffi::Bind()));
ADASUM_HANDLER(kBroadcast, OnHost<RunBroadcast>, "broadcast", "Host",
               BindBroadcast(ffi::Ffi::Bind()));
ADASUM_HANDLER(kBarrier, OnHost<RunBarrier>, "barrier", "Host", BindBarrier(ffi::Ffi::Bind()));
ADASUM_HANDLER(kSync, OnHost<RunSync>, "sync", "Host", BindSync(ffi::Ffi::Bind()));

#ifdef ADASUM_HAS_CUDA
auto WithStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>(); }

ADASUM_HANDLER(kCudaAllreduce, OnCuda<RunAllreduce>, "allreduce", "CUDA",
               BindAllreduce(WithStream()));
ADASUM_HANDLER(kCudaBroadcast, OnCuda<RunBroadcast>, "broadcast", "CUDA",
               BindBroadcast(WithStream()));
ADASUM_HANDLER(kCudaBarrier, OnCuda<RunBarrier>, "barrier", "CUDA", BindBarrier(WithStream()));
ADASUM_HANDLER(kCudaSync, OnCuda<RunSync>, "sync", "CUDA", BindSync(WithStream()));
#endif

}  // namespace
}  // namespace tf_adasum

// What callers of the C API hand over, held against what it asks for: as far as that can be told,
// a mistake is Error(kInvalidArgument) and not a crash.
#ifndef TF_ADASUM_OPS_CORE_ARGUMENTS_H_
#define TF_ADASUM_OPS_CORE_ARGUMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "allreduce.h"
#include "c_api.h"
#include "error.h"
#include "fusion.h"
#include "sync.h"
#include "transport.h"
#include "wire.h"

namespace adasum {

// name: the parameter's.
template <typename T>
T& Given(T* pointer, const char* name) {
  if (pointer != nullptr) return *pointer;
  throw Error(ErrorKind::kInvalidArgument, std::string("`") + name + "` must not be null");
}

// Null counts as empty.
std::string TextOf(const char* text);

ReduceOptions OptionsOf(const AdasumReduceOptions& given, const Transport& transport,
                        Device& device = HostDevice());

// what: in texts, "tensor" or "averaged state". What the specs point to is the caller's.
std::vector<TensorSpec> SpecsOf(const AdasumTensor* tensors, int64_t count, const char* what);
std::vector<const void*> DataOf(const AdasumTensor* tensors, int64_t count);

// How changes of these values are sent.
Wire WireOf(const AdasumSyncOptions& given, const AdasumTensor* values, int64_t count);

// That there is memory for each tensor that has elements; name: the parameter's.
void CheckMemory(const std::vector<TensorSpec>& specs, const void* const* memory, const char* name);

// What a sync is given, checked. Points into it.
struct SyncArguments {
  SyncArguments(const AdasumSyncTensors* tensors, const AdasumSyncOptions* options,
                const Transport& transport);

  bool is_flight() const { return flight >= 0; }

  const int64_t flight;
  const std::string name;
  const SyncOptions options;
  const std::vector<TensorSpec> specs, states;
  const std::vector<const void*> values, state_data;
  const SyncTensors tensors;
};

AdasumSyncResult ResultOf(const SyncResult& done);
// orthogonality, which may be null, has room for so many tensors.
void TellOrthogonality(const Report& report, int64_t count, double* orthogonality);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_ARGUMENTS_H_

// What the CPU kernels and the XLA custom calls share: calling the core's C API, and its errors as
// TensorFlow's.
#ifndef TF_ADASUM_OPS_TF_CALLS_H_
#define TF_ADASUM_OPS_TF_CALLS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "ops/core/c_api.h"

namespace tf_adasum {

// The status that a code of the C API stands for, with the calling thread's last error text.
absl::Status ToStatus(int code);

// "adasum", "sum" or "average", as the ops' attribute says it.
int OpCode(const std::string& op);

// adasum_sync, and what a user has to be told of its result.
absl::Status Sync(const AdasumSyncTensors& tensors, const AdasumSyncOptions& options,
                  AdasumSyncResult* result, double* orthogonality);

}  // namespace tf_adasum

#endif  // TF_ADASUM_OPS_TF_CALLS_H_

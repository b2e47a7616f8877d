#include "ops/tf/calls.h"

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

}  // namespace

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

int OpCode(const std::string& op) {
  return op == "sum" ? ADASUM_OP_SUM : op == "average" ? ADASUM_OP_AVERAGE : ADASUM_OP_ADASUM;
}

absl::Status Sync(const AdasumSyncTensors& tensors, const AdasumSyncOptions& options,
                  AdasumSyncResult* result, double* orthogonality) {
  const absl::Status status = ToStatus(adasum_sync(&tensors, &options, result, orthogonality));
  if (!status.ok()) return status;
  if (result->identical) WarnOnceOfUnshardedData();
  if (result->skipped) {
    Warn("rank " + std::to_string(Rank()) +
         "'s change of the weights since the last sync is not finite and counts as zero; the rank "
         "goes on from the other ranks' weights.");
  }
  return absl::OkStatus();
}

}  // namespace tf_adasum

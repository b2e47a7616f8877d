// The collectives that users call, over one transport: checks, fusion buffer, then the algorithm.
#ifndef TF_ADASUM_OPS_CORE_COMMUNICATOR_H_
#define TF_ADASUM_OPS_CORE_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "agreement.h"
#include "allreduce.h"
#include "fusion.h"
#include "sync.h"
#include "transport.h"

namespace adasum {

class Communicator {
 public:
  explicit Communicator(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  Transport& transport() { return *transport_; }

  // Each throws Error(kDisagreement) on every rank unless all ranks pass the same kind of call,
  // name, options, and number, dtypes and shapes of tensors.

  void Allreduce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                 void* const* outputs, const ReduceOptions& options, const std::string& name);
  // values - starts is reduced, starts + result written to new_values and, where not null, to
  // new_starts. Nothing is written where an error is thrown by the first reduction.
  SyncResult Sync(const SyncTensors& tensors, const SyncOptions& options, const std::string& name);
  // Returns whether any bit of this rank's tensors was different from root's.
  bool Broadcast(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                 void* const* outputs, int root, const std::string& name);
  void Allgather(const TensorSpec& tensor, const void* input,
                 const std::function<void*(int64_t)>& allocate, const std::string& name);
  void Barrier(const std::string& name);
  // The last call: so that a rank that leaves while the others go on is an error, not a hang.
  void Leave();

 private:
  std::unique_ptr<Transport> transport_;
  std::mutex mutex_;
  Workspace workspace_;
  SayingBuffers saying_buffers_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_COMMUNICATOR_H_

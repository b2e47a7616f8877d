// The buckets of a call, one after the other through one of the algorithms.
//
// What the algorithms have in common. A host's ranks that can read each other's memory combine what
// is theirs first, each a slice (slices.h); then hosts are combined with each other, each lane with
// the same lane of other hosts (rvh.h); then every rank reads the slices of its host's lanes.
//
// While a bucket is reduced, the next one is filled already, and on its way where that takes
// messages.
#ifndef TF_ADASUM_OPS_CORE_ALLREDUCE_H_
#define TF_ADASUM_OPS_CORE_ALLREDUCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "combine.h"
#include "fusion.h"
#include "plan.h"
#include "transport.h"

namespace adasum {

// What a user chooses for a reduction.
struct ReduceOptions {
  Op op = Op::kAdasum;
  Algorithm algorithm = Algorithm::kRvh;
  int64_t fusion_threshold = 0;    // of a bucket, bytes
  Device* device = &HostDevice();  // where the tensors are
};

// The size of a bucket where neither the user nor the environment names one, in bytes.
int64_t DefaultFusionThreshold(const Transport& transport, const Device& device);

// The memory of the calls of one transport with tensors on one device, and what its ranks have
// counted so far.
struct Workspace {
  explicit Workspace(Device& device)
      : device(device), buckets(device), scratch(device), received(device) {}

  Device& device;
  Buffer buckets;
  Buffer scratch;
  Buffer received;
  // In the memory that a host's ranks share; calls by messages count for nothing there.
  int64_t slot_bytes = 0;  // of the last call
  uint32_t buckets_done = 0;
  uint32_t sums_done = 0;
};

// Where a call's tensors come from and go to. A tensor is its number in the call.
struct Ends {
  // Both for count elements from element begin on. Each element is asked for once, and given once.
  std::function<void(const Kernels&, int64_t tensor, int64_t begin, int64_t count, char* to)> fill;
  std::function<void(const Kernels&, int64_t tensor, int64_t begin, int64_t count,
                     const char* from)>
      emit;
};

// What is done with the buckets. Where tensors have owners, which are ranks of one host, only a
// half of it may be wanted.
enum class Halves {
  kBoth,
  kReduceToOwners,   // each owner gets the results of its tensors
  kShareFromOwners,  // nothing is reduced: all get what the owners have
};

// The reduction of each tensor of a call over all ranks; all get the same bits.
class AllreduceCall {
 public:
  // Keeps references to what it is given. transport: one that can send what is on the workspace's
  // device.
  AllreduceCall(Transport& transport, Workspace& workspace, const Fusion& fusion,
                Algorithm algorithm, const Ends& ends, Halves halves = Halves::kBoth);
  AllreduceCall(AllreduceCall&& other);
  ~AllreduceCall();

  // What can be done before the ranks agree on the call, which then tells the others too that it is
  // done.
  void Prepare();

  // Collective, after the ranks have agreed. Throws Error(kTransport).
  Report Run();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_ALLREDUCE_H_

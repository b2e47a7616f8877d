// The parallelised update (the paper's section 4.3): the ranks of a host are one worker of Adasum.
// Each owns some of the layers: it alone gets the sum of the host's gradients of them, keeps their
// optimizer's state, updates them, and combines their change with their owners on other hosts; then
// the host's ranks read from each other what they do not own.
//
// As many ranks of a host own layers as the host with the fewest has: the lane of an owner is its
// place on its host, and a layer has the same lane on every host.
#ifndef TF_ADASUM_OPS_CORE_PARTITION_H_
#define TF_ADASUM_OPS_CORE_PARTITION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"
#include "sync.h"

namespace adasum {

// Where a rank is in the partition.
struct PartitionPlace {
  int lanes;  // of each host
  int lane;   // this rank's; lanes or more where it owns nothing

  static PartitionPlace Of(int rank, const Hosts& hosts);
};

class Partition {
 public:
  // host: between the ranks of this one's host. lane: between the ranks of its lane, one a host;
  // null where the rank owns nothing. all_lanes: whether that is so of no rank, here or elsewhere.
  // several_threads: whether host and lane may be used at the same time.
  Partition(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> lane, bool all_lanes,
            bool several_threads);

  // Collective over the host's ranks: each number's sum.
  void HostSum(const double* numbers, double* sums, int64_t count, const std::string& name);
  // See Communicator.
  void ReduceToOwners(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                      void* const* outputs, const std::vector<int>& owner_of,
                      int64_t fusion_threshold, const std::string& name);
  void ShareFromOwners(const std::vector<TensorSpec>& tensors, void* const* values,
                       const std::vector<int>& owner_of, int64_t fusion_threshold,
                       const std::string& name);

  // Collective over all ranks, like Communicator::Sync, a host being what there is a rank. Of
  // starts and new_starts, which must not be null, those of tensors that this rank does not own are
  // not looked at. No states, and no wire. While an owner reduces tensors with those on other
  // hosts, its host reads from it those before.
  SyncResult Sync(const SyncTensors& tensors, const std::vector<int>& owner_of,
                  const SyncOptions& options, const std::string& name);

 private:
  class SyncRound;

  const std::unique_ptr<Communicator> host_;
  const std::unique_ptr<Communicator> lane_;
  const bool all_lanes_;
  const bool several_threads_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_PARTITION_H_

// How an algorithm's work is divided over hosts, and over the ranks of each.
#ifndef TF_ADASUM_OPS_CORE_PLAN_H_
#define TF_ADASUM_OPS_CORE_PLAN_H_

#include <cstdint>
#include <vector>

#include "combine.h"
#include "order.h"
#include "transport.h"

namespace adasum {

enum class Algorithm : int32_t {
  kRvh = 0,              // the tree over all ranks
  kRing = 1,             // the line over all ranks, each combining a slice, as in a ring allreduce
  kHierarchical = 2,     // the mean of each host's ranks, then the tree over the hosts
  kHierarchicalSum = 3,  // the sum of each host's ranks, then the tree over the hosts
};

// How an algorithm splits over hosts and lanes for these ranks.
struct Plan {
  Op in_host;  // where Op is kAdasum; otherwise the op itself
  Order order;
  Group host;                // who combines slices
  int lanes;                 // how many of its first members own one
  bool in_memory;            // they read each other's memory, rather than messages
  std::vector<Group> rows;   // for each lane its ranks, one a host; empty where there is one host
  std::vector<int> weights;  // ranks behind each host

  static Plan Make(Transport& transport, Algorithm algorithm);
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_PLAN_H_

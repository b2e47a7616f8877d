#include "small.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>

#include "agreement.h"
#include "slices.h"

namespace adasum {

namespace {

// Vectors are combined group by group, then the groups' results.
struct LocalPlan {
  std::vector<std::vector<int>> groups;
  Op in_group;
  Order order;
};

LocalPlan MakePlan(const Hosts& hosts, Algorithm algorithm, Op op) {
  std::vector<int> all(hosts.host_of.size());
  std::iota(all.begin(), all.end(), 0);
  // For a sum or a mean, how ranks are grouped makes no difference.
  const bool by_host = op == Op::kAdasum && (algorithm == Algorithm::kHierarchical ||
                                             algorithm == Algorithm::kHierarchicalSum);
  if (by_host) {
    return {hosts.ranks, algorithm == Algorithm::kHierarchical ? Op::kAverage : Op::kSum,
            Order::kTree};
  }
  return {{all}, op, algorithm == Algorithm::kRing ? Order::kLine : Order::kTree};
}

// False where TF_ADASUM_SMALL is 0 in the environment.
bool SmallIsWanted() {
  const char* wanted = std::getenv("TF_ADASUM_SMALL");
  return wanted == nullptr || std::string(wanted) != "0";
}

}  // namespace

bool IsSmall(Transport& transport, const Device& device, int64_t bytes) {
  if (!device.is_host() || !SmallIsWanted() || transport.memory_of_all() != nullptr) return false;
  return bytes * transport.size() <= kMostGatheredBytes;
}

void Fill(const Fusion& fusion, const Ends& ends, char* to) {
  for (const Bucket& bucket : fusion.buckets()) {
    for (int64_t t = 0; t < bucket.layout.tensors(); ++t) {
      const Range tensor = bucket.layout.tensor(t);
      ends.fill(bucket.kernels, bucket.tensors[t], 0, tensor.size(),
                to + tensor.begin * bucket.kernels.item_bytes);
    }
    to += Buffer::Aligned(bucket.bytes());
  }
}

Report ReduceHere(const Transport& transport, Workspace& workspace, const Fusion& fusion,
                  Algorithm algorithm, const std::vector<const char*>& of_rank, const Ends& ends) {
  Report report;
  report.orthogonality.assign(fusion.tensors(), std::numeric_limits<double>::quiet_NaN());
  int64_t largest = 0;
  for (const Bucket& bucket : fusion.buckets()) {
    largest = std::max(largest, Buffer::Aligned(bucket.bytes()));
  }
  // The groups' results, the result, and room for what comes between.
  const int ranks = transport.size();
  const int64_t results = static_cast<int64_t>(transport.hosts().ranks.size()) + 1;
  char* memory = workspace.scratch.Reserve(results * largest + std::max(1, ranks / 2) * largest);
  char* const result = memory;
  char* const scratch = memory + results * largest;
  int64_t at = 0;
  for (const Bucket& bucket : fusion.buckets()) {
    const LocalPlan plan = MakePlan(transport.hosts(), algorithm, bucket.op);
    std::vector<const char*> vectors;
    TensorNorms norms;
    const auto combine = [&](Op op, Order order, const std::vector<const char*>& of, char* out) {
      Slices all(workspace.device, bucket.kernels, bucket.layout, op, order,
                 static_cast<int>(of.size()), {bucket.layout.whole()}, 0);
      norms = all.Combine({of, 0, out, {}, {}}, scratch, {});
      report.all_equal = report.all_equal && all.all_equal();
      report.any_nonzero = report.any_nonzero || all.any_nonzero();
    };
    for (size_t group = 0; group < plan.groups.size(); ++group) {
      std::vector<const char*> of_group;
      for (const int rank : plan.groups[group]) of_group.push_back(of_rank[rank] + at);
      const bool is_last = plan.groups.size() == 1;
      char* out = result + (is_last ? 0 : static_cast<int64_t>(group) + 1) * largest;
      combine(plan.in_group, plan.order, of_group, out);
      vectors.push_back(out);
    }
    if (vectors.size() > 1) combine(bucket.op, Order::kTree, vectors, result);
    for (size_t t = 0; t < norms.combined.size(); ++t) {
      report.orthogonality[bucket.tensors[t]] = norms.combined[t] / norms.inputs[t];
    }
    for (int64_t t = 0; t < bucket.layout.tensors(); ++t) {
      const Range tensor = bucket.layout.tensor(t);
      ends.emit(bucket.kernels, bucket.tensors[t], 0, tensor.size(),
                result + tensor.begin * bucket.kernels.item_bytes);
    }
    at += Buffer::Aligned(bucket.bytes());
  }
  return report;
}

}  // namespace adasum

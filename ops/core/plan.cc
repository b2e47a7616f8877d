#include "plan.h"

#include <algorithm>
#include <numeric>

namespace adasum {

namespace {

bool AreEqualPowersOfTwoInOrder(const Hosts& hosts) {
  const size_t lanes = hosts.ranks[0].size();
  if ((lanes & (lanes - 1)) != 0) return false;
  int rank = 0;
  for (const std::vector<int>& ranks : hosts.ranks) {
    if (ranks.size() != lanes || ranks.front() != rank ||
        ranks.back() != ranks.front() + static_cast<int>(lanes) - 1) {
      return false;
    }
    rank += static_cast<int>(lanes);
  }
  return true;
}

Group GroupOf(const std::vector<int>& ranks, int rank) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return {ranks, static_cast<int>(place)};
}

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Plan Plan::Make(Transport& transport, Algorithm algorithm) {
  const Hosts& hosts = transport.hosts();
  const int rank = transport.rank(), own_host = hosts.host_of[rank];
  const bool one_host = hosts.ranks.size() == 1, in_memory = transport.shares_memory();
  const Group alone{{rank}, 0}, all{AllRanks(transport.size()), rank};
  const Group host = GroupOf(hosts.ranks[own_host], rank);
  if (algorithm == Algorithm::kRing) {
    return {Op::kAdasum, Order::kLine, all, all.size(), one_host && in_memory, {}, {}};
  }
  Plan plan{Op::kAdasum, Order::kTree, host, host.size(), in_memory, {}, {}};
  if (algorithm == Algorithm::kRvh) {
    // The tree over all ranks is a tree over each host's and one over the hosts, or messages have
    // to follow it whatever the hosts.
    const bool by_host = in_memory && (one_host || AreEqualPowersOfTwoInOrder(hosts));
    if (!by_host) {
      plan = {Op::kAdasum, Order::kTree, alone, 1, false, {}, {}};
      if (transport.size() > 1) plan.rows = {all};
      plan.weights.assign(transport.size(), 1);
      return plan;
    }
  } else {
    plan.in_host = algorithm == Algorithm::kHierarchical ? Op::kAverage : Op::kSum;
    for (const std::vector<int>& ranks : hosts.ranks) {
      plan.lanes = std::min(plan.lanes, static_cast<int>(ranks.size()));
    }
  }
  if (one_host) return plan;
  for (int lane = 0; lane < plan.lanes; ++lane) {
    plan.rows.push_back({{}, own_host});
    for (const std::vector<int>& ranks : hosts.ranks) plan.rows[lane].ranks.push_back(ranks[lane]);
  }
  for (const std::vector<int>& ranks : hosts.ranks) {
    plan.weights.push_back(static_cast<int>(ranks.size()));
  }
  return plan;
}

}  // namespace adasum

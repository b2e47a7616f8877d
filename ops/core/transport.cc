#include "transport.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "faults.h"
#include "order.h"

namespace adasum {

namespace {

double Reduce(Reduction reduction, double a, double b) {
  return reduction == Reduction::kSum ? a + b : std::fmax(a, b);
}

void ReduceInto(Reduction reduction, const double* theirs, double* values, size_t count) {
  // Both operations commute, so two partners compute the same bits without an agreed order.
  for (size_t i = 0; i < count; ++i) values[i] = Reduce(reduction, values[i], theirs[i]);
}

}  // namespace

Hosts Hosts::From(const std::vector<int>& host_of) {
  Hosts hosts;
  std::map<int, int> numbers;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    const auto [known, is_new] =
        numbers.emplace(host_of[rank], static_cast<int>(hosts.ranks.size()));
    if (is_new) hosts.ranks.emplace_back();
    hosts.ranks[known->second].push_back(static_cast<int>(rank));
    hosts.host_of.push_back(known->second);
  }
  return hosts;
}

Topology Topology::Of(int rank, const Hosts& hosts) {
  const std::vector<int>& local = hosts.ranks[hosts.host_of[rank]];
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(hosts.host_of.size());
  topology.local_size = static_cast<int>(local.size());
  topology.local_rank =
      static_cast<int>(std::find(local.begin(), local.end(), rank) - local.begin());
  topology.cross_size = 0;
  for (const std::vector<int>& ranks : hosts.ranks) {
    if (static_cast<int>(ranks.size()) <= topology.local_rank) continue;
    ++topology.cross_size;
    if (ranks[topology.local_rank] < rank) ++topology.cross_rank;
  }
  return topology;
}

// Recursive doubling. Where the number of members is no power of two, the first few of them are
// reduced in pairs before, and one of each pair then waits for the result: the same tree as that of
// the vectors, see rvh.h.
void GroupAllreduce(Transport& transport, const Group& group, Reduction reduction, double* values,
                    size_t count) {
  const int64_t bytes = static_cast<int64_t>(count * sizeof(double));
  const int leaves = LeavesOfTree(group.size()), pairs = group.size() - leaves;
  const auto rank_of = [&](int leaf) {
    return group.ranks[leaf < pairs ? 2 * leaf : leaf + pairs];
  };
  const bool paired = group.place < 2 * pairs;
  std::vector<double> theirs(count);
  if (paired && group.place % 2 == 1) {
    const int other = group.ranks[group.place - 1];
    transport.Send(values, bytes, other);
    transport.Receive(values, bytes, other);
    return;
  }
  if (paired) {
    transport.Receive(theirs.data(), bytes, group.ranks[group.place + 1]);
    ReduceInto(reduction, theirs.data(), values, count);
  }
  const int leaf = paired ? group.place / 2 : group.place - pairs;
  for (int distance = 1; distance < leaves; distance *= 2) {
    const int partner = rank_of(leaf ^ distance);
    transport.SendReceive(values, bytes, partner, theirs.data(), bytes, partner);
    ReduceInto(reduction, theirs.data(), values, count);
  }
  if (!paired) return;
  FaultPlace("answer");
  transport.Send(values, bytes, group.ranks[group.place + 1]);
}

void ReduceInMemory(const std::vector<const double*>& of_member, Reduction reduction,
                    double* values, size_t count) {
  const int members = static_cast<int>(of_member.size());
  const int leaves = LeavesOfTree(members), pairs = members - leaves;
  if (members == 2) {
    for (size_t i = 0; i < count; ++i) {
      values[i] = Reduce(reduction, of_member[0][i], of_member[1][i]);
    }
    return;
  }
  std::vector<double> level(leaves);
  for (size_t i = 0; i < count; ++i) {
    for (int leaf = 0; leaf < leaves; ++leaf) {
      level[leaf] = leaf < pairs
                        ? Reduce(reduction, of_member[2 * leaf][i], of_member[2 * leaf + 1][i])
                        : of_member[leaf + pairs][i];
    }
    for (int width = leaves / 2; width > 0; width /= 2) {
      for (int j = 0; j < width; ++j) level[j] = Reduce(reduction, level[2 * j], level[2 * j + 1]);
    }
    values[i] = level[0];
  }
}

}  // namespace adasum

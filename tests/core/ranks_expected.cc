#include <cmath>
#include <cstddef>
#include <map>

#include "expected.h"

namespace core_test {

using adasum::Algorithm;
using adasum::Op;

namespace {

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The paper's equation 5. What is zero leaves the other as it is.
Vector Adasum(const Vector& a, const Vector& b) {
  const double aa = Dot(a, a), bb = Dot(b, b), ab = Dot(a, b);
  if (aa == 0) return b;
  if (bb == 0) return a;
  return Sum(Scaled(a, 1 - ab / (2 * aa)), Scaled(b, 1 - ab / (2 * bb)));
}

// The paper's Algorithm 1; for other numbers than powers of two, as many pairs as are too many are
// combined before.
Vector Tree(std::vector<Vector> vectors) {
  size_t power = 1;
  while (2 * power <= vectors.size()) power *= 2;
  for (size_t pair = 0; vectors.size() > power; ++pair) {
    vectors[pair] = Adasum(vectors[pair], vectors[pair + 1]);
    vectors.erase(vectors.begin() + static_cast<ptrdiff_t>(pair) + 1);
  }
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (size_t i = 0; i < vectors.size(); i += 2) {
      next.push_back(Adasum(vectors[i], vectors[i + 1]));
    }
    vectors = next;
  }
  return vectors[0];
}

Vector Total(const std::vector<Vector>& vectors) {
  Vector total = vectors[0];
  for (size_t i = 1; i < vectors.size(); ++i) total = Sum(total, vectors[i]);
  return total;
}

Vector Mean(const std::vector<Vector>& vectors) {
  return Scaled(Total(vectors), 1.0 / static_cast<double>(vectors.size()));
}

}  // namespace

Vector Expected(Op op, Algorithm algorithm, const std::vector<int>& host_of,
                const std::vector<Vector>& of_rank) {
  if (op == Op::kSum) return Total(of_rank);
  if (op == Op::kAverage) return Mean(of_rank);
  if (algorithm == Algorithm::kRvh) return Tree(of_rank);
  if (algorithm == Algorithm::kRing) {
    Vector result = of_rank[0];
    for (size_t rank = 1; rank < of_rank.size(); ++rank) result = Adasum(result, of_rank[rank]);
    return result;
  }
  // Hosts come in the order of their first ranks.
  std::map<int, size_t> numbers;
  std::vector<std::vector<Vector>> of_host;
  for (size_t rank = 0; rank < of_rank.size(); ++rank) {
    const auto [known, is_new] = numbers.emplace(host_of[rank], of_host.size());
    if (is_new) of_host.emplace_back();
    of_host[known->second].push_back(of_rank[rank]);
  }
  std::vector<Vector> hosts;
  for (const std::vector<Vector>& vectors : of_host) {
    hosts.push_back(algorithm == Algorithm::kHierarchical ? Mean(vectors) : Total(vectors));
  }
  return Tree(hosts);
}

double Norm(const Vector& vector) { return std::sqrt(Dot(vector, vector)); }

Vector Sum(const Vector& a, const Vector& b) {
  Vector sum(a);
  for (size_t i = 0; i < a.size(); ++i) sum[i] += b[i];
  return sum;
}

Vector Difference(const Vector& a, const Vector& b) { return Sum(a, Scaled(b, -1)); }

Vector Scaled(const Vector& a, double factor) {
  Vector scaled(a);
  for (double& value : scaled) value *= factor;
  return scaled;
}

}  // namespace core_test

#include "transport.h"

#include <cmath>

namespace adasum {

void GroupAllreduce(Transport& transport, const std::vector<int>& group, int position,
                    Reduction reduction, std::vector<double>& values) {
  const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(double));
  std::vector<double> theirs(values.size());
  for (size_t distance = 1; distance < group.size(); distance *= 2) {
    const int partner = group[position ^ distance];
    transport.SendReceive(values.data(), bytes, partner, theirs.data(), bytes, partner);
    // Both operations commute, so the two partners compute the same bits without an agreed order.
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] =
          reduction == Reduction::kSum ? values[i] + theirs[i] : std::fmax(values[i], theirs[i]);
    }
  }
}

}  // namespace adasum

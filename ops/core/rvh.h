// Recursive vector halving: the paper's Algorithm 1 for any number of ranks.
//
// The letters. x is the fusion buffer, of which a rank works on one range; d is the distance to the
// neighbour, doubled at each level; a is the left side's slice, b the right side's; v holds a.b,
// a.a and b.b of each tensor; the group of a level is the 2 d ranks that together hold the whole of
// a and b.
//
// A level halves the range: a rank sends one half to its neighbour and receives the neighbour's
// part of the other one, so that it can combine that half alone. Dot products need the whole
// vectors, hence the sum over the group. After the last level each rank holds its part of the
// result, and on the way back the neighbours exchange parts. Each rank sends and receives 2 |x| (p
// - 1) / p elements, as in the best algorithms for the plain sum.
//
// A number of ranks that is no power of two: with p the largest power of two below it and r = size
// - p, ranks (0, 1), ..., (2r - 2, 2r - 1) are first combined in pairs. The p results in rank order
// are the leaves of the tree.
#ifndef TF_ADASUM_OPS_CORE_RVH_H_
#define TF_ADASUM_OPS_CORE_RVH_H_

#include <vector>

#include "kernels.h"
#include "layout.h"
#include "transport.h"

namespace adasum {

// How a pair of vectors becomes one. The tree is the same for all three.
enum class Op : int32_t { kAdasum = 0, kSum = 1, kAverage = 2 };

// What the values of a reduction tell for free.
struct Report {
  // Over all pairs that this rank took part in: whether the two sides were equal, and whether there
  // was anything else than zeros.
  bool all_equal = true;
  bool any_nonzero = false;

  // The paper's section 3.6 for each tensor: |Adasum(g1, ..., gn)|^2 / sum |gi|^2. NaN where all
  // are zero. Empty but for Op::kAdasum and several ranks.
  std::vector<double> orthogonality;

  // All ranks seem to have brought the same vectors. In training it means that they saw the same
  // data.
  bool identical() const { return all_equal && any_nonzero; }
};

// Reduces buffer, layout.size() elements, in place over all ranks; every rank ends with the same
// bits. scratch has room for half of them, rounded up. Throws Error(kTransport).
Report AllreduceRvh(Transport& transport, const Kernels& kernels, const Layout& layout, Op op,
                    void* buffer, void* scratch);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_RVH_H_

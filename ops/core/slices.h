// Vectors that one rank can all read become one: every rank combines a slice of all of them.
//
// It is what recursive halving comes to where nothing has to be sent to read a neighbour's half.
// The part of the result that halving would leave a rank with is its slice from the beginning. Each
// rank works on as many elements as with halving, any number of ranks is as good as a power of two,
// and the order may as well be the line.
//
// Slices end where tensors do, if one does nearby. A tensor that is whole in a slice takes all
// levels of the tree at once, while it is in the cache, and no sum over the ranks; the others take
// a level after the other, which costs one such sum for all of them.
#ifndef TF_ADASUM_OPS_CORE_SLICES_H_
#define TF_ADASUM_OPS_CORE_SLICES_H_

#include <vector>

#include "combine.h"
#include "order.h"

namespace adasum {

// The range in so many lanes of nearly equal size, which end where a line of the cache does.
Range SliceOf(Range range, int lane, int lanes, int64_t item_bytes);

// The same for a whole buffer, with ends moved to those of tensors where these are near.
std::vector<Range> SlicesOf(const Layout& layout, int lanes, int64_t item_bytes);

// For each tensor: |g1|^2 + ... + |gn|^2 of what was combined, and the squared norm of what came
// out of it. Without elements, nothing is known.
struct TensorNorms {
  std::vector<double> inputs;
  std::vector<double> combined;
};

// The vectors of all members, as one rank sees its slice of them.
struct SliceVectors {
  std::vector<const char*> vectors;  // at the slice's first element
  int own;                           // whose vector is this rank's own
  char* out;                         // where the result goes; may be one of the vectors
  // The own vector is not there yet, but for fill to put there, piece by piece.
  Combiner::Visit fill;
  // Called with each piece of the result as soon as it is written.
  Combiner::Visit emit;
};

class Slices {
 public:
  // slices: of all lanes; this rank's is slices[lane].
  Slices(Device& device, const Kernels& kernels, const Layout& layout, Op op, Order order,
         int members, std::vector<Range> slices, int lane);

  // The room that Combine needs is at most half of the members' slices, or of one's. With
  // Op::kAdasum and several members the norms are those of the tensors that this rank has parts of;
  // the others are NaN.
  TensorNorms Combine(const SliceVectors& vectors, char* scratch,
                      const Combiner::OverRanks& over_ranks);

  bool all_equal() const { return combiner_.all_equal(); }
  bool any_nonzero() const { return combiner_.any_nonzero(); }

 private:
  void CombineWork(const Work& work, const SliceVectors& vectors, char* scratch,
                   const Combiner::OverRanks& over_ranks, TensorNorms* norms);

  const Kernels& kernels_;
  const Layout& layout_;
  const Op op_;
  const int members_;
  const std::vector<std::vector<Step>> levels_;
  const Range slice_;
  Combiner combiner_;
  std::vector<Work> whole_;  // tensors that are whole in the slice, some at a time
  Work cut_;                 // the others
  // While a work is combined, of each member's place.
  std::vector<const char*> current_;
  std::vector<char*> own_;  // the part of scratch that holds current_
  std::vector<int> behind_;
  std::vector<Pair> pairs_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_SLICES_H_

// Recursive vector halving: the paper's Algorithm 1 for any number of leaves.
//
// The letters. x is the fusion buffer, of which a rank works on one range; d is the distance to the
// neighbour, doubled at each level; a is the left side's slice, b the right side's; v holds a.b,
// a.a and b.b of each tensor; the group of a level is the 2 d leaves that together hold the whole
// of a and b.
//
// A level halves the range: a rank sends one half to its neighbour and receives the neighbour's
// part of the other one, so that it can combine that half alone. Dot products need the whole
// vectors, hence the sum over the group. After the last level each rank holds its part of the
// result, and on the way back the neighbours exchange parts. Each rank sends and receives 2 |x| (p
// - 1) / p elements, as in the best algorithms for the plain sum.
//
// A leaf is a rank, or a host whose ranks, the lanes, have combined what is theirs before and each
// go on with a slice of it: a lane then has its neighbours in the same lane of other hosts, and a
// group is all lanes of its leaves. order.h says what happens to a number of leaves that is no
// power of two.
//
// Exchanges go in pieces of Kernels::message_bytes. Dot products begin with the first piece that
// comes; the half that the next level sends is combined, and on its way, before the half that it
// keeps; on the way back a part is read by the caller while the next one comes.
#ifndef TF_ADASUM_OPS_CORE_RVH_H_
#define TF_ADASUM_OPS_CORE_RVH_H_

#include <functional>
#include <memory>
#include <vector>

#include "combine.h"
#include "order.h"
#include "slices.h"
#include "transport.h"

namespace adasum {

// The ranks that take part, one for each leaf, with this rank's place, and for how many ranks each
// leaf stands.
struct Leaves {
  Group group;
  std::vector<int> weights;
};

// The memory that an Rvh works in.
struct RvhBuffers {
  char* x;         // the first element of the fusion buffer
  char* received;  // Rvh::ReceivedBytes
};

class Rvh {
 public:
  // Called with each part of x once, as soon as it is final. May be empty.
  using Emit = std::function<void(Range part)>;
  // Reduces over the other lanes of this rank's leaf. May be empty.
  using OverLanes = Combiner::OverRanks;

  static int64_t ReceivedBytes(int64_t x_bytes);

  // x is the range of the fusion buffer that this rank's lane works on. stream: not used by another
  // Rvh at the same time.
  Rvh(Transport& transport, Device& device, const Kernels& kernels, const Layout& layout, Op op,
      Leaves leaves, Range x, RvhBuffers buffers, Transport::Stream stream);

  // Starts the first exchange, and does not wait for it.
  void Begin();

  // The rest. leaf_norms: what is known of this leaf's own vector; empty if it is one rank's.
  // Returns the norms of all.
  TensorNorms Finish(TensorNorms leaf_norms, const OverLanes& over_lanes, const Emit& emit);

  bool all_equal() const { return combiner_.all_equal(); }
  bool any_nonzero() const { return combiner_.any_nonzero(); }

 private:
  // The two halves of a range, seen from one of the two neighbours that share it.
  struct Halves {
    Range mine;
    Range theirs;
  };

  // What a rank does at a level.
  struct Level {
    bool left;  // whether its side is a
    int nghr;   // a rank
    Halves halves;
    Group group;
    int leaves_a;  // behind the two sides
    int leaves_b;
    int weight_a;
    int weight_b;
    char* received;
  };

  bool is_paired() const { return leaves_.group.place < 2 * pairs_; }
  Level PairLevel() const;
  Level TreeLevel(Range x, int d) const;
  Halves Halve(Range x, bool left) const;
  void Exchange(const Level& level);
  void RunPaired(const Level& pair);
  void Tree(const Level& level, int d);
  void HalveAndCombine(const Level& level, const Level* next);
  Work WorkOn(Range range) const;
  void ReduceOverGroup(const Level& level, Reduction reduction, double* values, size_t count);
  void NoteNorms(const Level& level);
  void Gather(const Level& level, bool is_last);
  void ReceiveAndEmit(Transfer& transfer, Range range);

  int PlaceOfLeaf(int leaf) const { return leaf < pairs_ ? 2 * leaf : leaf + pairs_; }
  int RankOfLeaf(int leaf) const { return leaves_.group.ranks[PlaceOfLeaf(leaf)]; }
  char* At(Range range) const { return x_ + range.begin * kernels_.item_bytes; }
  int64_t Bytes(Range range) const { return range.size() * kernels_.item_bytes; }
  std::unique_ptr<Transfer> Start(Range send, Range receive, char* receive_at, int nghr) const;
  void EmitFinal();

  Transport& transport_;
  const Kernels& kernels_;
  const Layout& layout_;
  const Op op_;
  Combiner combiner_;
  const Leaves leaves_;
  const Range whole_;
  char* const x_;
  char* const received_;
  const Transport::Stream stream_;
  const int tree_leaves_;               // p
  const int pairs_;                     // r
  const int leaf_;                      // of the tree
  std::unique_ptr<Transfer> exchange_;  // of halves, under way
  TensorNorms norms_;
  std::vector<double> group_inputs_;  // what norms_.inputs of both sides come to
  bool leaves_are_ranks_ = true;
  OverLanes over_lanes_;
  Emit emit_;
  Range final_{0, 0};  // final, and not yet emitted
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_RVH_H_

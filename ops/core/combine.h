// Pairs of vectors become one each: dot products, their sums over the ranks that hold the other
// parts of the same vectors, coefficients, combination.
#ifndef TF_ADASUM_OPS_CORE_COMBINE_H_
#define TF_ADASUM_OPS_CORE_COMBINE_H_

#include <functional>
#include <vector>

#include "device.h"
#include "kernels.h"
#include "layout.h"
#include "transport.h"

namespace adasum {

// How a pair of vectors becomes one.
enum class Op : int32_t { kAdasum = 0, kSum = 1, kAverage = 2 };

// What the values of a reduction tell for free.
struct Report {
  // Over all pairs that this rank took part in: whether the two sides were equal, and whether there
  // was anything else than zeros.
  bool all_equal = true;
  bool any_nonzero = false;

  // The paper's section 3.6 for each tensor: |Adasum(g1, ..., gn)|^2 / sum |gi|^2. NaN where all
  // are zero, or where that is not known.
  std::vector<double> orthogonality;

  // All ranks seem to have brought the same vectors. In training it means that they saw the same
  // data.
  bool identical() const { return all_equal && any_nonzero; }
};

// Two vectors and where their combination goes, which may be one of them. All three point to the
// first element of the range that is worked on. A side stands for so many ranks.
struct Pair {
  const char* a;
  const char* b;
  char* out;
  int behind_a;
  int behind_b;
};

// Squared norms of the whole vectors of a pair, for one tensor.
struct Norms {
  double a;
  double b;
  double combined;
};

// Parts of tensors that are worked on together, in a range that may hold others too. Each has a row
// among the sums of dot products: all ranks that hold parts of a tensor give it the same.
struct Work {
  Range range;
  std::vector<Part> parts;  // in order
  std::vector<int> rows;    // of each part
  int all_rows = 0;
};

class Combiner {
 public:
  // Reduces the values over all ranks that measure the same pairs in other ranges.
  using OverRanks = std::function<void(Reduction, double* values, size_t count)>;
  // Called with each piece of a part before it is read, or after it was written. May be empty.
  using Visit = std::function<void(Range piece)>;

  // Parts are worked on in pieces that end where a multiple of piece_bytes from the range's
  // beginning does; those that do not lie further apart at a time.
  Combiner(Device& device, const Kernels& kernels, Op op, int64_t piece_bytes)
      : device_(device), kernels_(kernels), op_(op), piece_bytes_(piece_bytes) {}

  // What Combine then does. Adasum has to read all of it for that; the other ops read nothing yet.
  // The work must live until then.
  void Measure(const Work& work, const std::vector<Pair>& pairs, const OverRanks& over_ranks,
               const Visit& before);

  // The parts, as far as they are in the range. Every element has to come once, in any order. Where
  // Measure has read, `before` is not called again.
  void Combine(Range range, const Visit& before, const Visit& after);

  // By pair, then row, after Measure with Op::kAdasum.
  const Norms& norms(size_t pair, int row) const { return norms_[pair * work_->all_rows + row]; }

  // Of what Combine has read, after Device::Finish.
  bool all_equal() const { return all_equal_ && !sides_.differ; }
  bool any_nonzero() const { return any_nonzero_ || sides_.nonzero; }

 private:
  // A piece of a part, by its number.
  struct Piece {
    size_t part;
    Range range;
  };

  // Exponents by which the two sides of a tensor are scaled before squaring.
  struct Exponents {
    int a;
    int b;
  };

  void ComputeDots(const std::vector<Exponents>& exponents, const OverRanks& over_ranks,
                   const Visit& before, std::vector<DotProducts>& dots) const;
  void Rescale(const OverRanks& over_ranks);
  void NoteNorms();
  void ComparePieces(const std::vector<Piece>& pieces);
  void CombinePiece(const Piece& piece);
  size_t Index(size_t pair, size_t part) const {
    return pair * work_->all_rows + work_->rows[part];
  }
  int64_t Offset(int64_t element) const {
    return (element - work_->range.begin) * kernels_.item_bytes;
  }
  template <typename Do>
  void ForEachBatch(Range range, Do visit) const;

  Device& device_;
  const Kernels& kernels_;
  const Op op_;
  const int64_t piece_bytes_;
  const Work* work_ = nullptr;
  std::vector<Pair> pairs_;
  // By pair, then row.
  std::vector<DotProducts> dots_;
  std::vector<Coefficients> coefficients_;
  std::vector<Norms> norms_;
  bool all_equal_ = true;
  bool any_nonzero_ = false;
  Comparison sides_;  // where there are no dot products
  mutable std::vector<Piece> batch_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_COMBINE_H_

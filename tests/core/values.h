// Tensors of a test, and their random choice.
#ifndef TF_ADASUM_TESTS_CORE_VALUES_H_
#define TF_ADASUM_TESTS_CORE_VALUES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ops/core/fusion.h"
#include "ops/core/kernels.h"
#include "random.h"

namespace core_test {

using Dims = std::vector<int64_t>;
using Vector = std::vector<double>;

int64_t ItemBytes(adasum::DType dtype);
// The error of one rounding; for float64, of a long sum.
double Precision(adasum::DType dtype);
const char* NameOf(adasum::DType dtype);
int64_t CountOf(const Dims& dims);

struct Tensor {
  adasum::DType dtype;
  Dims dims;
  int64_t item_bytes;
  std::vector<char> data;  // of exactly its size, so that a sanitizer sees what is beyond
  std::string name;

  // Of any bytes.
  static Tensor OfBytes(adasum::DType dtype, Dims dims, int64_t item_bytes, Random& random);
  // Of the nearest numbers.
  static Tensor Of(adasum::DType dtype, Dims dims, const Vector& values);

  Vector Values() const;
  adasum::TensorSpec Spec() const;
};

using Tensors = std::vector<Tensor>;

std::vector<adasum::TensorSpec> SpecsOf(const Tensors& tensors);
std::vector<const void*> Read(const Tensors& tensors);
std::vector<void*> Write(Tensors& tensors);
// The same shapes, filled with bytes that no result has.
Tensors LikeOf(const Tensors& tensors);
bool SameBytes(const Tensors& a, const Tensors& b);

// Shapes of a call: empty ones, scalars, odd sizes, some of them large.
std::vector<Dims> RandomShapes(Random& random, int64_t most);
adasum::DType RandomDType(Random& random);

// Of each rank, what a tensor of so many elements holds: parts of the ranks' vectors are along a
// direction that they share, and with zeros, parts are orthogonal and some vectors are zero. None
// cancel each other, since Adasum is not continuous where a vector vanishes. Multiples of 1/256.
std::vector<Vector> RandomVectors(Random& random, int ranks, int64_t count, bool zeros = true);

}  // namespace core_test

#endif  // TF_ADASUM_TESTS_CORE_VALUES_H_

// Arguments of the C API, drawn at random: right ones, and ones with a flaw that must be refused.
#ifndef TF_ADASUM_TESTS_CORE_FUZZ_H_
#define TF_ADASUM_TESTS_CORE_FUZZ_H_

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/c_api.h"
#include "random.h"

namespace core_test {

struct Shape {
  int32_t dtype;
  int64_t item_bytes;
  std::vector<int64_t> dims;

  int64_t bytes() const;
  bool operator==(const Shape& other) const {
    return dtype == other.dtype && item_bytes == other.item_bytes && dims == other.dims;
  }
};

// With the dtypes that can be reduced, or also with others.
std::vector<Shape> RandomShapes(Random& random, bool also_others);

// Memory of a call, each piece of exactly its size.
class Memory {
 public:
  // aligned: to the items; otherwise anywhere.
  char* Get(int64_t bytes, bool aligned);
  template <typename T>
  T* Copy(const std::vector<T>& values) {
    if (values.empty()) return nullptr;
    char* place = Get(static_cast<int64_t>(values.size() * sizeof(T)), true);
    return static_cast<T*>(std::memcpy(place, values.data(), values.size() * sizeof(T)));
  }

 private:
  std::deque<std::vector<char>> pieces_;
};

// Tensors and where their results go.
struct TensorList {
  std::vector<Shape> shapes;
  AdasumTensor* tensors;
  void** outputs;
  int64_t count;

  bool HasElements() const;
};

enum class Content {
  kAny,    // any bits, so also NaN
  kSmall,  // numbers between -1 and 1
};

TensorList MakeTensors(Random& random, Memory& memory, const std::vector<Shape>& shapes,
                       Content content);

// Breaks something; false where there is nothing to break.
bool BreakTensors(Random& random, Memory& memory, TensorList& list);
bool BreakOutputs(Random& random, void**& outputs, const TensorList& list);

AdasumReduceOptions RandomOptions(Random& random);
void BreakOptions(Random& random, AdasumReduceOptions& options);

}  // namespace core_test

#endif  // TF_ADASUM_TESTS_CORE_FUZZ_H_

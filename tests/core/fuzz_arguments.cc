#include <algorithm>
#include <cstring>

#include "fuzz.h"

namespace core_test {

namespace {

struct DType {
  int32_t dtype;
  int64_t item_bytes;
};

const std::vector<DType> kReducible{
    {ADASUM_FLOAT16, 2}, {ADASUM_BFLOAT16, 2}, {ADASUM_FLOAT32, 4}, {ADASUM_FLOAT64, 8}};
const std::vector<DType> kOthers{
    {ADASUM_OTHER, 0}, {ADASUM_OTHER, 1}, {ADASUM_OTHER, 3}, {ADASUM_OTHER, 16}};

// Little-endian bits of a multiple of 1/2 that is no larger than 1.
void PutSmall(Random& random, const Shape& shape, char* to) {
  const uint64_t sign = random.Below(2), one = random.Below(2);
  const auto put = [&](auto zero, uint64_t half, uint64_t whole, int sign_bit) {
    const auto bits = static_cast<decltype(zero)>((one ? whole : half) | sign << sign_bit);
    std::memcpy(to, &bits, sizeof bits);
  };
  if (shape.dtype == ADASUM_FLOAT16) put(uint16_t{0}, 0x3800, 0x3c00, 15);
  if (shape.dtype == ADASUM_BFLOAT16) put(uint16_t{0}, 0x3f00, 0x3f80, 15);
  if (shape.dtype == ADASUM_FLOAT32) put(uint32_t{0}, 0x3f000000, 0x3f800000, 31);
  if (shape.dtype == ADASUM_FLOAT64) {
    put(uint64_t{0}, 0x3fe0000000000000, 0x3ff0000000000000, 63);
  }
}

}  // namespace

int64_t Shape::bytes() const {
  int64_t bytes = item_bytes;
  for (const int64_t dim : dims) bytes *= dim;
  return bytes;
}

std::vector<Shape> RandomShapes(Random& random, bool also_others) {
  std::vector<Shape> shapes(random.OneIn(200) ? 1100 : random.Below(6));
  for (Shape& shape : shapes) {
    const DType& dtype = random.Of(also_others && random.OneIn(2) ? kOthers : kReducible);
    shape = {dtype.dtype, dtype.item_bytes, {}};
    int64_t left = shapes.size() > 10 ? 8 : int64_t{1} << random.Below(14);
    for (int64_t rank = random.Below(5); rank > 0; --rank) {
      const int64_t dim = random.OneIn(12) ? 0 : random.Between(1, left);
      shape.dims.push_back(dim);
      left /= std::max<int64_t>(dim, 1);
    }
  }
  return shapes;
}

char* Memory::Get(int64_t bytes, bool aligned) {
  const int64_t before = aligned ? 0 : 1;
  pieces_.emplace_back(bytes + before);
  return pieces_.back().data() + before;
}

bool TensorList::HasElements() const {
  return std::any_of(shapes.begin(), shapes.end(),
                     [](const Shape& shape) { return shape.bytes() > 0; });
}

TensorList MakeTensors(Random& random, Memory& memory, const std::vector<Shape>& shapes,
                       Content content) {
  std::vector<AdasumTensor> tensors;
  std::vector<void*> outputs;
  const bool in_place = random.OneIn(2), aligned = !random.OneIn(4);
  for (const Shape& shape : shapes) {
    const int64_t bytes = shape.bytes();
    char* data = memory.Get(bytes, aligned);
    for (int64_t at = 0; at < bytes; at += std::max<int64_t>(shape.item_bytes, 1)) {
      if (content == Content::kSmall) {
        PutSmall(random, shape, data + at);
      } else {
        const uint64_t bits = random.Next();
        std::memcpy(data + at, &bits, std::min<size_t>(sizeof bits, bytes - at));
      }
    }
    if (bytes == 0 && random.OneIn(2)) data = nullptr;
    tensors.push_back({data, memory.Copy(shape.dims), shape.item_bytes,
                       shape.dtype == ADASUM_OTHER ? "other" : "float",
                       tensors.size() % 2 == 0 ? nullptr : "name",
                       static_cast<int32_t>(shape.dims.size()), shape.dtype});
    outputs.push_back(in_place || data == nullptr ? data : memory.Get(bytes, aligned));
  }
  return {shapes, memory.Copy(tensors), memory.Copy(outputs), static_cast<int64_t>(shapes.size())};
}

bool BreakTensors(Random& random, Memory& memory, TensorList& list) {
  if (random.OneIn(10)) {
    list.count = random.Of<int64_t>({-1, -7, INT64_MIN});
    return true;
  }
  if (list.count == 0) return false;
  if (random.OneIn(10)) {
    list.tensors = nullptr;
    return true;
  }
  const int64_t t = random.Below(list.count);
  AdasumTensor& tensor = list.tensors[t];
  std::vector<int64_t> dims = list.shapes[t].dims;
  switch (random.Below(8)) {
    case 0:
      if (list.shapes[t].bytes() == 0) return false;
      tensor.data = nullptr;
      return true;
    case 1:
      if (tensor.rank == 0) tensor.rank = random.Of<int32_t>({1, 7, INT32_MAX});
      tensor.dims = nullptr;
      return true;
    case 2:
      tensor.rank = random.Of<int32_t>({-1, -5, INT32_MIN});
      return true;
    case 3:
      if (dims.empty()) return false;
      dims[random.Below(tensor.rank)] = random.Of<int64_t>({-1, -3, INT64_MIN});
      tensor.dims = memory.Copy(dims);
      return true;
    case 4:
      // Some products are 0, in 64 bits or at all.
      dims = random.Of<std::vector<int64_t>>({{int64_t{1} << 32, int64_t{1} << 32},
                                              {INT64_MAX, 3},
                                              {INT64_MAX, INT64_MAX, 0},
                                              {0, int64_t{1} << 40, int64_t{1} << 40},
                                              {3037000500, 3037000500},
                                              {INT64_MAX, INT64_MAX}});
      tensor.dims = memory.Copy(dims);
      tensor.rank = static_cast<int32_t>(dims.size());
      return true;
    case 5:
      tensor.item_bytes = tensor.dtype == ADASUM_OTHER
                              ? random.Of<int64_t>({-1, INT64_MIN})
                              : tensor.item_bytes + random.Of<int64_t>({-1, -8, 1, 6, 1LL << 40});
      return true;
    case 6:
      tensor.dtype = random.Of<int32_t>({-1, 5, 99, INT32_MAX, INT32_MIN});
      return true;
    default:
      tensor.dtype_name = nullptr;
      return true;
  }
}

bool BreakOutputs(Random& random, void**& outputs, const TensorList& list) {
  if (list.shapes.empty()) return false;
  const int64_t t = random.Below(static_cast<int64_t>(list.shapes.size()));
  if (random.OneIn(3)) {
    outputs = nullptr;
  } else if (list.shapes[t].bytes() > 0) {
    outputs[t] = nullptr;
  } else {
    return false;
  }
  return true;
}

AdasumReduceOptions RandomOptions(Random& random) {
  return {static_cast<int32_t>(random.Below(3)), static_cast<int32_t>(random.Below(4)),
          random.Of<int64_t>({-1, -1, 0, 1, 100, 5000, 1 << 20, INT64_MAX}),
          random.Of<const char*>({nullptr, "", "a name"}), nullptr};
}

void BreakOptions(Random& random, AdasumReduceOptions& options) {
  switch (random.Below(3)) {
    case 0:
      options.op = random.Of<int32_t>({-1, 3, 1000, INT32_MAX, INT32_MIN});
      break;
    case 1:
      options.algorithm = random.Of<int32_t>({-1, 4, 1000, INT32_MAX, INT32_MIN});
      break;
    default:
      options.fusion_threshold = random.Of<int64_t>({-2, -1000, INT64_MIN});
  }
}

}  // namespace core_test

#include <algorithm>
#include <cmath>
#include <cstring>

#include "values.h"

namespace core_test {

using adasum::DType;

namespace {

struct Format {
  const char* name;
  int64_t bytes;
  int digits;  // of the significand, binary
};

const Format& FormatOf(DType dtype) {
  static const Format formats[] = {{"int8", 1, 0},
                                   {"float16", 2, 11},
                                   {"bfloat16", 2, 8},
                                   {"float32", 4, 24},
                                   {"float64", 8, 53}};
  return formats[static_cast<int>(dtype)];
}

double RoundTo(double value, int digits) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, digits)), exponent - digits);
}

template <typename T>
void Put(T value, char* to) {
  std::memcpy(to, &value, sizeof value);
}

template <typename T>
T Get(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Of a number that float16 holds, and that is not denormal in it.
uint16_t Float16Bits(double value) {
  if (std::isnan(value)) return 0x7e00;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value)) return static_cast<uint16_t>(sign | 0x7c00);
  if (value == 0) return sign;
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(value), &exponent);
  const int digits = static_cast<int>(std::ldexp(fraction, 11)) - 1024;
  return static_cast<uint16_t>(sign | (exponent + 14) << 10 | digits);
}

double OfFloat16(uint16_t bits) {
  const double sign = bits >> 15 ? -1 : 1;
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  if (exponent == 31) return digits != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(digits, -24);
  return sign * std::ldexp(1024 + digits, exponent - 25);
}

}  // namespace

int64_t ItemBytes(DType dtype) { return FormatOf(dtype).bytes; }

double Precision(DType dtype) { return std::max(1e-14, std::ldexp(1.0, -FormatOf(dtype).digits)); }

const char* NameOf(DType dtype) { return FormatOf(dtype).name; }

int64_t CountOf(const Dims& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  return count;
}

Tensor Tensor::OfBytes(DType dtype, Dims dims, int64_t item_bytes, Random& random) {
  Tensor tensor{dtype, dims, item_bytes, std::vector<char>(CountOf(dims) * item_bytes), ""};
  for (char& byte : tensor.data) byte = static_cast<char>(random.Next());
  return tensor;
}

Tensor Tensor::Of(DType dtype, Dims dims, const Vector& values) {
  Tensor tensor{dtype, dims, ItemBytes(dtype), std::vector<char>(values.size() * ItemBytes(dtype)),
                ""};
  char* to = tensor.data.data();
  for (const double value : values) {
    const double nearest = RoundTo(value, FormatOf(dtype).digits);
    if (dtype == DType::kFloat64) Put(nearest, to);
    if (dtype == DType::kFloat32) Put(static_cast<float>(nearest), to);
    if (dtype == DType::kFloat16) Put(Float16Bits(nearest), to);
    if (dtype == DType::kBFloat16) {
      const float wide = static_cast<float>(nearest);
      Put(static_cast<uint16_t>(Get<uint32_t>(reinterpret_cast<const char*>(&wide)) >> 16), to);
    }
    to += tensor.item_bytes;
  }
  return tensor;
}

Vector Tensor::Values() const {
  Vector values;
  for (size_t at = 0; at < data.size(); at += static_cast<size_t>(item_bytes)) {
    const char* from = data.data() + at;
    if (dtype == DType::kFloat64) values.push_back(Get<double>(from));
    if (dtype == DType::kFloat32) values.push_back(Get<float>(from));
    if (dtype == DType::kFloat16) values.push_back(OfFloat16(Get<uint16_t>(from)));
    if (dtype == DType::kBFloat16) {
      const uint32_t bits = static_cast<uint32_t>(Get<uint16_t>(from)) << 16;
      values.push_back(Get<float>(reinterpret_cast<const char*>(&bits)));
    }
  }
  return values;
}

adasum::TensorSpec Tensor::Spec() const {
  return {dtype,       NameOf(dtype), item_bytes, dims.data(), static_cast<int>(dims.size()),
          name.c_str()};
}

std::vector<adasum::TensorSpec> SpecsOf(const Tensors& tensors) {
  std::vector<adasum::TensorSpec> specs;
  for (const Tensor& tensor : tensors) specs.push_back(tensor.Spec());
  return specs;
}

std::vector<const void*> Read(const Tensors& tensors) {
  std::vector<const void*> data;
  for (const Tensor& tensor : tensors) data.push_back(tensor.data.data());
  return data;
}

std::vector<void*> Write(Tensors& tensors) {
  std::vector<void*> data;
  for (Tensor& tensor : tensors) data.push_back(tensor.data.data());
  return data;
}

Tensors LikeOf(const Tensors& tensors) {
  Tensors like(tensors);
  for (Tensor& tensor : like) std::fill(tensor.data.begin(), tensor.data.end(), '\xfb');
  return like;
}

bool SameBytes(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return x.data == y.data; });
}

std::vector<Dims> RandomShapes(Random& random, int64_t most) {
  std::vector<Dims> shapes(random.Between(0, most));
  for (Dims& dims : shapes) {
    // Now and then more than a piece of a message.
    const int64_t size = random.OneIn(60) ? random.Between(70'000, 200'000)
                                          : random.Below(int64_t{1} << random.Below(12));
    switch (random.Below(6)) {
      case 0:
        break;
      case 1:
        dims = {random.Between(1, 5), size / 4, random.Between(1, 3)};
        break;
      case 2:
        dims = {size / 7, 7};
        break;
      default:
        dims = {size};
    }
  }
  return shapes;
}

DType RandomDType(Random& random) { return static_cast<DType>(random.Between(1, 4)); }

std::vector<Vector> RandomVectors(Random& random, int ranks, int64_t count, bool zeros) {
  Vector signs(count);
  for (double& sign : signs) sign = random.OneIn(2) ? 1 : -1;
  std::vector<Vector> vectors(ranks, Vector(count, 0.0));
  for (Vector& vector : vectors) {
    if (zeros && random.OneIn(8)) continue;
    const int64_t kept =
        zeros && random.OneIn(3) ? random.Below(3) : 2;  // even, odd or all elements
    for (int64_t i = 0; i < count; ++i) {
      const double value = signs[i] * static_cast<double>(random.Between(64, 255)) / 256;
      if (kept == 2 || i % 2 == kept) vector[i] = value;
    }
  }
  return vectors;
}

}  // namespace core_test

// Tensors where a call wants them.
#ifndef TF_ADASUM_TESTS_CORE_PLACED_H_
#define TF_ADASUM_TESTS_CORE_PLACED_H_

#include <vector>

#include "ops/core/device.h"
#include "values.h"

namespace core_test {

// Copies on a device as long as it lives; on the host, the tensors themselves.
class Placed {
 public:
  Placed(adasum::Device& device, Tensors& tensors) : device_(device), tensors_(tensors) {
    for (Tensor& tensor : tensors) {
      char* data = tensor.data.data();
      const auto bytes = static_cast<int64_t>(tensor.data.size());
      if (!device.is_host()) {
        data = device.Allocate(bytes);
        device.CopyIn(data, tensor.data.data(), bytes);
      }
      read_.push_back(data);
      write_.push_back(data);
    }
  }
  Placed(const Placed&) = delete;

  ~Placed() {
    if (device_.is_host()) return;
    for (void* memory : write_) device_.Free(static_cast<char*>(memory));
  }

  const void* const* read() const { return read_.data(); }
  void* const* write() const { return write_.data(); }

  // Brings the tensors what has become of their copies.
  void Return() {
    if (device_.is_host()) return;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      Tensor& tensor = tensors_[t];
      device_.CopyOut(tensor.data.data(), static_cast<const char*>(read_[t]),
                      static_cast<int64_t>(tensor.data.size()));
    }
  }

 private:
  adasum::Device& device_;
  Tensors& tensors_;
  std::vector<const void*> read_;
  std::vector<void*> write_;
};

}  // namespace core_test

#endif  // TF_ADASUM_TESTS_CORE_PLACED_H_

// What stands in for accelerator_cuda.cu where there is no CUDA.
#ifndef ADASUM_HAS_CUDA

#include "accelerator.h"
#include "error.h"

namespace adasum {

bool HasCuda() { return false; }

int CudaDevices() { return 0; }

int CurrentCudaDevice() { return -1; }

std::unique_ptr<Accelerator> MakeCudaAccelerator(const AcceleratorUser&) {
  throw Error(ErrorKind::kState,
              "tf_adasum was built without CUDA: install it again where nvcc is found (CUDA_HOME)");
}

}  // namespace adasum

#endif  // ADASUM_HAS_CUDA

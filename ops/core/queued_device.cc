#include "queued_device.h"

#include <algorithm>
#include <cstring>

#include "device_transport.h"
#include "error.h"

namespace adasum {

using device::Block;
using device::Finding;
using device::Kind;
using device::Operation;

namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Everything at a time; and messages of a size at which starting them takes no time to speak of.
constexpr int64_t kPieceBytes = int64_t{1} << 50;
constexpr int64_t kMessageBytes = 4 << 20;

constexpr int64_t kMostCopied = 16 << 20;

}  // namespace

[[noreturn]] void ThrowNoWire() {
  throw Error(ErrorKind::kInvalidArgument,
              "`wire_dtype` is for tensors in the host's memory, not yet for those on a GPU");
}

class QueuedDevice::QueuedKernels : public Kernels {
 public:
  QueuedKernels(QueuedDevice& device, DType dtype, int64_t bytes)
      : Kernels(bytes, dtype == DType::kFloat64, kPieceBytes, kMessageBytes),
        device_(device),
        dtype_(dtype) {}

  void Dot3(const void* a, const void* b, int64_t n, double scale_a, double scale_b,
            DotProducts* sums) const override {
    Receiver receiver{};
    receiver.sums = sums;
    Add(Kind::kDot3, {a, b, nullptr, n, {scale_a, 1, scale_b, 1, 1}}, receiver);
  }
  void MaxAbs(const void* a, int64_t n, double* largest) const override {
    Receiver receiver{};
    receiver.largest = largest;
    Add(Kind::kMaxAbs, {a, nullptr, nullptr, n, {}}, receiver);
  }
  void Inspect(const void* value, const void* start, int64_t n, Inspection* found) const override {
    Receiver receiver{};
    receiver.inspection = found;
    Add(Kind::kInspect, {value, start, nullptr, n, {}}, receiver);
  }
  void Compare(const void* a, const void* b, int64_t n, Comparison* found) const override {
    Receiver receiver{};
    receiver.comparison = found;
    Add(Kind::kCompare, {a, b, nullptr, n, {}}, receiver);
  }
  void Combine(const void* a, const void* b, const Coefficients& c, int64_t n,
               void* out) const override {
    Add(Kind::kCombine, {a, b, out, n, c}, {});
  }
  void Average(const void* a, const void* b, double weight_a, double weight_b, int64_t n,
               void* out) const override {
    Add(Kind::kAverage, {a, b, out, n, {1, weight_a, 1, weight_b, 1}}, {});
  }
  void Delta(const void* value, const void* start, int64_t n, void* out) const override {
    Add(Kind::kDelta, {value, start, out, n, {1, 1, 1, -1, 1}}, {});
  }
  void Apply(const void* start, const void* change, int64_t n, void* out) const override {
    Add(Kind::kApply, {start, change, out, n, {}}, {});
  }
  void Narrow(const float*, double, int64_t, void*) const override { ThrowNoWire(); }
  void Widen(const void*, double, int64_t, float*) const override { ThrowNoWire(); }
  void Copy(const void* from, int64_t n, void* to) const override {
    if (from != to) Add(Kind::kCopy, {from, nullptr, to, n, {}}, {});
  }
  void Zero(int64_t n, void* to) const override {
    Add(Kind::kZero, {nullptr, nullptr, to, n, {}}, {});
  }

 private:
  void Add(Kind kind, const Operation& operation, Receiver receiver) const {
    if (operation.n > 0) device_.Add(kind, dtype_, operation, receiver);
  }

  QueuedDevice& device_;
  const DType dtype_;
};

QueuedDevice::QueuedDevice(std::shared_ptr<Accelerator> accelerator)
    : accelerator_(std::move(accelerator)) {
  const auto add = [this](DType dtype, int64_t bytes) {
    kernels_.push_back(std::make_unique<QueuedKernels>(*this, dtype, bytes));
  };
  add(DType::kFloat16, 2);
  add(DType::kBFloat16, 2);
  add(DType::kFloat32, 4);
  add(DType::kFloat64, 8);
}

QueuedDevice::~QueuedDevice() {
  try {
    accelerator_->Await(accelerator_->Record(Accelerator::kCompute));
  } catch (const Error&) {
    // Then nothing is under way any more.
  }
  if (arena_.capacity == 0) return;
  accelerator_->FreePinned(arena_.pinned);
  accelerator_->Free(arena_.on_device);
}

const Kernels& QueuedDevice::kernels(DType dtype) {
  if (dtype == DType::kOther) ThrowNoArithmetic();
  return *kernels_[static_cast<size_t>(dtype) - 1];
}

void QueuedDevice::Free(char* memory) {
  // It may still be read or written, also by what is not even launched.
  EndBatch();
  accelerator_->Await(accelerator_->Record(Accelerator::kCompute));
  accelerator_->Await(accelerator_->Record(Accelerator::kCopies));
  accelerator_->Free(memory);
}

void QueuedDevice::Add(Kind kind, DType dtype, const Operation& operation, Receiver receiver) {
  if (kind != kind_ || dtype != dtype_) EndBatch();
  kind_ = kind;
  dtype_ = dtype;
  const auto number = static_cast<int32_t>(operations_.size());
  const int64_t bytes = operation.n * kernels(dtype).item_bytes;
  for (int32_t piece = 0; piece * device::kBlockBytes < bytes; ++piece) {
    blocks_.push_back({number, piece});
  }
  operations_.push_back(operation);
  receivers_.push_back(receiver);
}

void QueuedDevice::EndBatch() {
  if (operations_.empty()) return;
  const bool finds = kind_ < Kind::kFirstOfMaps;
  const auto size_of = [](const auto& items) {
    return static_cast<int64_t>(items.size() * sizeof items[0]);
  };
  const int64_t operations_bytes = Aligned(size_of(operations_));
  const int64_t table_bytes = operations_bytes + Aligned(size_of(blocks_));
  const int64_t findings_bytes = finds ? static_cast<int64_t>(blocks_.size() * sizeof(Finding)) : 0;
  const int64_t at = Take(table_bytes + Aligned(findings_bytes));
  char *pinned = arena_.pinned + at, *on_device = arena_.on_device + at;
  std::memcpy(pinned, operations_.data(), static_cast<size_t>(size_of(operations_)));
  std::memcpy(pinned + operations_bytes, blocks_.data(), static_cast<size_t>(size_of(blocks_)));
  accelerator_->CopyIn(Accelerator::kCompute, on_device, pinned, table_bytes);
  accelerator_->Launch({kind_, dtype_, static_cast<int32_t>(blocks_.size()),
                        reinterpret_cast<const Operation*>(on_device),
                        reinterpret_cast<const Block*>(on_device + operations_bytes),
                        reinterpret_cast<Finding*>(on_device + table_bytes)});
  if (finds) {
    accelerator_->CopyOut(Accelerator::kCompute, pinned + table_bytes, on_device + table_bytes,
                          findings_bytes);
    pending_.push_back({kind_, std::move(receivers_), std::move(blocks_),
                        reinterpret_cast<const Finding*>(pinned + table_bytes)});
  }
  operations_.clear();
  blocks_.clear();
  receivers_.clear();
}

// Returns an offset in the arena. What was there before is done with.
int64_t QueuedDevice::Take(int64_t bytes) {
  constexpr int64_t kLeast = 256 << 10;
  if (arena_.used + bytes > arena_.capacity) {
    std::vector<Operation> operations = std::move(operations_);
    operations_.clear();
    Finish();
    operations_ = std::move(operations);
  }
  if (bytes > arena_.capacity) {
    if (arena_.capacity > 0) {
      accelerator_->FreePinned(arena_.pinned);
      accelerator_->Free(arena_.on_device);
    }
    arena_ = {};
    const int64_t capacity = std::max(kLeast, 2 * bytes);
    arena_.pinned = accelerator_->AllocatePinned(capacity);
    try {
      arena_.on_device = accelerator_->Allocate(capacity);
    } catch (...) {
      accelerator_->FreePinned(arena_.pinned);
      throw;
    }
    arena_.capacity = capacity;
  }
  const int64_t at = arena_.used;
  arena_.used += bytes;
  return at;
}

void QueuedDevice::Cancel() {
  operations_.clear();
  blocks_.clear();
  receivers_.clear();
  pending_.clear();
}

void QueuedDevice::Finish() {
  EndBatch();
  accelerator_->Await(accelerator_->Record(Accelerator::kCompute));
  for (const Pending& pending : pending_) Deliver(pending);
  pending_.clear();
  arena_.used = 0;
}

// In the order of the blocks, so that sums have the same bits each time.
void QueuedDevice::Deliver(const Pending& pending) {
  for (size_t i = 0; i < pending.blocks.size(); ++i) {
    const uint64_t* words = pending.findings[i].words;
    const Receiver to = pending.receivers[pending.blocks[i].operation];
    switch (pending.kind) {
      case Kind::kDot3:
        to.sums->ab += BitCast<double>(words[0]);
        to.sums->aa += BitCast<double>(words[1]);
        to.sums->bb += BitCast<double>(words[2]);
        break;
      case Kind::kMaxAbs:
        *to.largest = std::max(*to.largest, BitCast<double>(words[0]));
        break;
      case Kind::kInspect:
        to.inspection->finite = to.inspection->finite && words[0] == 0;
        to.inspection->zero = to.inspection->zero && words[1] == 0;
        to.inspection->start += words[2];
        break;
      default:
        to.comparison->differ = to.comparison->differ || words[0] != 0;
        to.comparison->nonzero = to.comparison->nonzero || words[1] != 0;
        break;
    }
  }
}

std::unique_ptr<Transport> QueuedDevice::Connect(Transport& transport) {
  return std::make_unique<DeviceTransport>(transport, *this);
}

// Through the arena, since pinned memory takes long to get; in pieces, if it is much.
void QueuedDevice::CopyIn(char* to, const void* from, int64_t bytes) {
  EndBatch();
  for (int64_t at = 0; at < bytes; at += kMostCopied) {
    const int64_t piece = std::min(kMostCopied, bytes - at);
    const int64_t place = Take(Aligned(piece));  // which may give the arena other memory
    char* pinned = arena_.pinned + place;
    std::memcpy(pinned, static_cast<const char*>(from) + at, static_cast<size_t>(piece));
    accelerator_->CopyIn(Accelerator::kCompute, to + at, pinned, piece);
  }
  Finish();
}

void QueuedDevice::CopyOut(void* to, const char* from, int64_t bytes) {
  EndBatch();
  for (int64_t at = 0; at < bytes; at += kMostCopied) {
    const int64_t piece = std::min(kMostCopied, bytes - at);
    const int64_t place = Take(Aligned(piece));
    accelerator_->CopyOut(Accelerator::kCompute, arena_.pinned + place, from + at, piece);
    Finish();
    std::memcpy(static_cast<char*>(to) + at, arena_.pinned + place, static_cast<size_t>(piece));
  }
}

}  // namespace adasum

// A device that is none: its memory lies in this process where nothing can be read or written, and
// once more where the emulation can. So code that takes the device's memory for the host's, or
// forgets a copy, ends at once; and code that does not wait for a stream sees what was there
// before.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "accelerator.h"
#include "error.h"

namespace adasum {

namespace {

using device::Block;
using device::Finding;
using device::Kind;
using device::Operation;

constexpr int64_t kPage = 4096;

// The device's memory of all ranks of this process.
class Memory {
 public:
  static Memory& Instance() {
    static Memory* const memory = new Memory();
    return *memory;
  }

  char* Allocate(int64_t bytes) {
    const int64_t size = std::max<int64_t>((bytes + kPage - 1) / kPage * kPage, kPage);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      const auto [at, free] = *hole;
      if (free < size) continue;
      if (mprotect(begin_ + kSize + at, static_cast<size_t>(size), PROT_READ | PROT_WRITE) != 0) {
        throw std::bad_alloc();
      }
      holes_.erase(hole);
      if (free > size) holes_[at + size] = free - size;
      taken_[at] = size;
      // Not zeros, which a mistake could do with.
      std::memset(begin_ + kSize + at, 0xa5, static_cast<size_t>(size));
      return begin_ + at;
    }
    throw std::bad_alloc();
  }

  void Free(char* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto place = taken_.find(memory - begin_);
    if (place == taken_.end()) {
      throw Error(ErrorKind::kInternal, "not memory of the emulated device, or freed before");
    }
    auto [at, size] = *place;
    taken_.erase(place);
    madvise(begin_ + kSize + at, static_cast<size_t>(size), MADV_DONTNEED);
    mprotect(begin_ + kSize + at, static_cast<size_t>(size), PROT_NONE);
    const auto after = holes_.find(at + size);
    if (after != holes_.end()) {
      size += after->second;
      holes_.erase(after);
    }
    const auto next = holes_.lower_bound(at);
    if (next != holes_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += size;
        return;
      }
    }
    holes_[at] = size;
  }

  bool Holds(const void* memory) const {
    const char* address = static_cast<const char*>(memory);
    return address >= begin_ && address < begin_ + kSize;
  }

  char* Reach(const void* memory) const {
    return const_cast<char*>(static_cast<const char*>(memory)) + kSize;
  }

 private:
  static constexpr int64_t kSize = int64_t{1} << 35;

  Memory() {
    void* begin =
        mmap(nullptr, 2 * kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(begin);
    holes_[0] = kSize;
  }

  char* begin_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> holes_;  // by their beginning, their size
  std::map<int64_t, int64_t> taken_;
};

char* OnDevice(const void* memory, const char* what) {
  if (memory == nullptr) return nullptr;
  if (!Memory::Instance().Holds(memory)) {
    throw Error(ErrorKind::kInternal, std::string(what) + " is not on the emulated device");
  }
  return Memory::Instance().Reach(memory);
}

const void* OnHost(const void* memory, const char* what) {
  if (Memory::Instance().Holds(memory)) {
    throw Error(ErrorKind::kInternal, std::string(what) + " is on the emulated device");
  }
  return memory;
}

class Emulated : public Accelerator {
 public:
  Emulated() {
    static std::atomic<int> made{0};
    number_ = made++;
    for (int i = 0; i < kStreams; ++i) natives_[i] = {this, static_cast<Stream>(i)};
  }

  const char* kind() const override { return "emulated device"; }
  std::string name() const override { return std::to_string(number_); }
  void* Native(Stream stream) override { return &natives_[stream]; }

  struct NativeStream {
    Emulated* owner;
    Stream stream;
  };

  void Ask(Stream stream, std::function<void()> what) {
    streams_[stream].push_back(std::move(what));
    ++asked_[stream];
  }

  void RunAll(Stream stream) { Run({stream, asked_[stream]}); }

  char* Allocate(int64_t bytes) override { return Memory::Instance().Allocate(bytes); }
  void Free(char* memory) override { Memory::Instance().Free(memory); }

  char* AllocatePinned(int64_t bytes) override {
    void* memory = std::malloc(static_cast<size_t>(std::max<int64_t>(bytes, 1)));
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0x5a, static_cast<size_t>(bytes));
    return static_cast<char*>(memory);
  }
  void FreePinned(char* memory) override { std::free(memory); }

  void Launch(const device::Launch& launch) override {
    device::Launch reached = launch;
    reached.operations = reinterpret_cast<Operation*>(OnDevice(launch.operations, "a table"));
    reached.of_block = reinterpret_cast<Block*>(OnDevice(launch.of_block, "a table"));
    reached.findings = reinterpret_cast<Finding*>(OnDevice(launch.findings, "a table"));
    Ask(kCompute, [reached] {
      device::WithKindAndDType(reached, [&](auto kind, auto item) {
        // Blocks run in any order, so not in the one that would be right by chance.
        for (int32_t i = reached.blocks - 1; i >= 0; --i) {
          RunBlock<kind(), decltype(item)>(reached, i);
        }
      });
    });
  }

  Event Record(Stream stream) override {
    return std::make_shared<Point>(Point{stream, asked_[stream]});
  }

  void Wait(Stream stream, const Event& event) override {
    Ask(stream, [this, event] { Run(*static_cast<Point*>(event.get())); });
  }

  bool HasHappened(const Event& event) override {
    const Point point = *static_cast<Point*>(event.get());
    // Work is done while the host does other things, but nobody knows when.
    if (++questions_ % 3 == 0) Run(point);
    return done_[point.stream] >= point.number;
  }

  void Await(const Event& event) override { Run(*static_cast<Point*>(event.get())); }

 private:
  void StartCopyIn(Stream stream, void* to, const void* from, int64_t bytes) override {
    char* reached = OnDevice(to, "where a copy goes");
    OnHost(from, "what is copied");
    Ask(stream, [=] { std::memcpy(reached, from, static_cast<size_t>(bytes)); });
  }

  void StartCopyOut(Stream stream, void* to, const void* from, int64_t bytes) override {
    const char* reached = OnDevice(from, "what is copied");
    OnHost(to, "where a copy goes");
    Ask(stream, [=] { std::memcpy(to, reached, static_cast<size_t>(bytes)); });
  }

  struct Point {
    Stream stream;
    int64_t number;  // of things asked for before it
  };

  template <Kind kKind, typename T>
  static void RunBlock(const device::Launch& launch, int32_t i) {
    const Block block = launch.of_block[i];
    Operation operation = launch.operations[block.operation];
    operation.a = OnDevice(operation.a, "an operand");
    operation.b = OnDevice(operation.b, "an operand");
    operation.out = OnDevice(operation.out, "an operand");
    if constexpr (kKind >= Kind::kFirstOfMaps) {
      for (int thread = device::kThreads - 1; thread >= 0; --thread) {
        device::MapThread<kKind, T>(operation, block, thread);
      }
    } else {
      Finding of_thread[device::kThreads];
      for (int thread = 0; thread < device::kThreads; ++thread) {
        of_thread[thread] = device::FindThread<kKind, T>(operation, block, thread);
      }
      for (int distance = device::kThreads / 2; distance > 0; distance /= 2) {
        for (int thread = 0; thread < device::kThreads; ++thread) {
          device::FoldThread<kKind>(of_thread, thread, distance);
        }
      }
      launch.findings[i] = of_thread[0];
    }
  }

  void Run(const Point& point) {
    while (done_[point.stream] < point.number) {
      const std::function<void()> next = std::move(streams_[point.stream].front());
      streams_[point.stream].pop_front();
      ++done_[point.stream];
      next();
    }
  }

  int number_;
  NativeStream natives_[kStreams];
  std::deque<std::function<void()>> streams_[kStreams];
  int64_t asked_[kStreams] = {};
  int64_t done_[kStreams] = {};
  int questions_ = 0;
};

}  // namespace

std::unique_ptr<Accelerator> MakeEmulatedAccelerator() { return std::make_unique<Emulated>(); }

namespace emulated {

char* Allocate(int64_t bytes) { return Memory::Instance().Allocate(bytes); }
void Free(char* memory) { Memory::Instance().Free(memory); }
char* Reach(const void* memory) {
  const Memory& all = Memory::Instance();
  return all.Holds(memory) ? all.Reach(memory) : static_cast<char*>(const_cast<void*>(memory));
}

void Ask(void* stream, std::function<void()> what) {
  const auto* native = static_cast<Emulated::NativeStream*>(stream);
  native->owner->Ask(native->stream, std::move(what));
}

void Run(void* stream) {
  const auto* native = static_cast<Emulated::NativeStream*>(stream);
  native->owner->RunAll(native->stream);
}

}  // namespace emulated

}  // namespace adasum

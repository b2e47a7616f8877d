// Each process makes a file that lies in memory alone (memfd), and the others open it through
// /proc. So nothing has a name that could be left behind, whatever way a process ends, and the size
// of /dev/shm, 64 MB in a container by default, does not matter.

#include "host_memory_mmap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "error.h"

namespace adasum {

namespace {

constexpr const char* kName = "tf_adasum";

// Where a process's segment is to be found. The token, which stands at its end until all have seen
// it, tells it from that of another process with the same id in another container.
struct Address {
  int32_t process;
  int32_t file;
  uint64_t token;
  uint64_t made;  // whether there is one
};

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

uint64_t NewToken() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

class MappedSegments : public Segments {
 public:
  MappedSegments(Transport& transport, const std::vector<int>& ranks, int member, int64_t bytes)
      : token_at_((bytes + 7) / 8 * 8) {
    addresses_.assign(ranks.size(), nullptr);
    // Until all have mapped it, by which time they need no file any more.
    const File file(memfd_create(kName, MFD_CLOEXEC));
    Address own{getpid(), file.get(), NewToken(), 0};
    if (file.get() >= 0 && ftruncate(file.get(), mapped_bytes()) == 0 && MapFile(file, member)) {
      WriteToken(member, own.token);
      own.made = 1;
    }
    std::vector<Address> all(ranks.size());
    all[member] = own;
    Exchange(transport, ranks, member, all);
    for (size_t m = 0; m < ranks.size(); ++m) {
      if (static_cast<int>(m) != member && all[m].made) Open(static_cast<int>(m), all[m]);
    }
    complete_ = std::find(addresses_.begin(), addresses_.end(), nullptr) == addresses_.end();
    for (Address& address : all) address.made = complete_;
    Exchange(transport, ranks, member, all);
    for (const Address& address : all) complete_ = complete_ && address.made;
    if (addresses_[member] != nullptr) WriteToken(member, 0);
  }

  ~MappedSegments() override {
    for (char* address : addresses_) {
      if (address != nullptr) munmap(address, static_cast<size_t>(mapped_bytes()));
    }
  }

  // Whether every member has mapped every other's.
  bool complete() const { return complete_; }

 private:
  int64_t mapped_bytes() const { return token_at_ + static_cast<int64_t>(sizeof(uint64_t)); }

  // Each member's own entry to all others.
  static void Exchange(Transport& transport, const std::vector<int>& ranks, int member,
                       std::vector<Address>& all) {
    const int members = static_cast<int>(ranks.size());
    for (int distance = 1; distance < members; ++distance) {
      const int to = (member + distance) % members, from = (member - distance + members) % members;
      transport.SendReceive(&all[member], sizeof(Address), ranks[to], &all[from], sizeof(Address),
                            ranks[from]);
    }
  }

  bool MapFile(const File& file, int member) {
    void* address = mmap(nullptr, static_cast<size_t>(mapped_bytes()), PROT_READ | PROT_WRITE,
                         MAP_SHARED, file.get(), 0);
    if (address == MAP_FAILED) return false;
    // Fewer entries in the translation buffers, where the system's settings allow it.
    madvise(address, static_cast<size_t>(mapped_bytes()), MADV_HUGEPAGE);
    addresses_[member] = static_cast<char*>(address);
    return true;
  }

  void Open(int member, const Address& address) {
    const std::string path =
        "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.file);
    // Whatever else another container's process of that number may have there is not to be opened.
    char target[64] = "";
    if (readlink(path.c_str(), target, sizeof target - 1) < 0) return;
    if (std::string(target).rfind(std::string("/memfd:") + kName, 0) != 0) return;
    const File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0 || lseek(file.get(), 0, SEEK_END) != mapped_bytes()) return;
    if (!MapFile(file, member) || ReadToken(member) == address.token) return;
    munmap(addresses_[member], static_cast<size_t>(mapped_bytes()));
    addresses_[member] = nullptr;
  }

  void WriteToken(int member, uint64_t token) {
    std::memcpy(addresses_[member] + token_at_, &token, sizeof token);
  }

  uint64_t ReadToken(int member) const {
    uint64_t token = 0;
    std::memcpy(&token, addresses_[member] + token_at_, sizeof token);
    return token;
  }

  const int64_t token_at_;
  bool complete_ = false;
};

}  // namespace

bool ShareHostMemory(Transport& transport, HostMemory::CheckOthers check_others,
                     std::unique_ptr<HostMemory>* memory) {
  const Hosts& hosts = transport.hosts();
  const std::vector<int>& ranks = hosts.ranks[hosts.host_of[transport.rank()]];
  std::vector<int> all(transport.size());
  std::iota(all.begin(), all.end(), 0);
  const auto all_say = [&](bool yes) {
    double no = yes ? 0 : 1;
    GroupAllreduce(transport, {all, transport.rank()}, Reduction::kMax, &no, 1);
    return no == 0;
  };
  if (!all_say(SharedMemoryIsWanted())) return false;
  const int members = static_cast<int>(ranks.size());
  const int member =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), transport.rank()) - ranks.begin());
  const auto map = [&transport, &ranks, member](int64_t bytes) -> std::unique_ptr<Segments> {
    auto segments = std::make_unique<MappedSegments>(transport, ranks, member, bytes);
    if (!segments->complete()) {
      throw Error(ErrorKind::kTransport, "the ranks of this host got no shared memory of " +
                                             std::to_string(bytes) +
                                             " bytes each; TF_ADASUM_SHARED_MEMORY=0 does without");
    }
    return segments;
  };
  bool mapped = true;
  try {
    if (members > 1) {
      *memory = std::make_unique<HostMemory>(member, members, map, std::move(check_others));
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kRankLost) throw;
    mapped = false;
  }
  if (all_say(mapped)) return true;
  memory->reset();
  return false;
}

}  // namespace adasum

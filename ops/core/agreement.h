// Do all ranks call the same thing? Asked before any data moves, so that a difference between ranks
// ends in an error on every rank that names them, and not in a hang or in mixed-up data.
#ifndef TF_ADASUM_OPS_CORE_AGREEMENT_H_
#define TF_ADASUM_OPS_CORE_AGREEMENT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "transport.h"

namespace adasum {

// What has to be equal on all ranks: an ordered list of facts about a call, such as {"op",
// "adasum"}. Facts are kept as words of a hash as long as all is well; describe() is only called
// once the ranks are known to differ.
class CallSignature {
 public:
  virtual ~CallSignature() = default;
  virtual uint64_t Hash() const = 0;
  // One fact a line, "what: value".
  virtual std::vector<std::string> Describe() const = 0;
};

// FNV-1a over 64-bit words; equal on every rank for equal words.
class Hasher {
 public:
  void Add(uint64_t word) { hash_ = (hash_ ^ word) * 0x100000001b3u + (hash_ >> 47); }
  void Add(std::string_view text);
  // Any amount of data, near memory bandwidth.
  void Add(const void* data, int64_t bytes);
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

// What a call's ranks tell each other at its start.
struct Agreed {
  uint64_t flags = 0;  // a bit is set where any rank had it set
  // What each rank said; nothing where nobody says anything. Until the next call.
  std::vector<const char*> said;
};

// Something that all ranks say of the same length, by messages. See small.h.
struct Saying {
  int64_t bytes = 0;
  std::function<void(char* to)> write = nullptr;
};

// The most that all ranks together can say. Measured over a network's latency: more takes longer
// than the exchanges that it saves.
constexpr int64_t kMostGatheredBytes = 64 << 10;

// The memory of what is said, of one transport.
struct SayingBuffers {
  std::vector<char> heard;
  std::vector<char> coming;
};

// Returns when every rank has come with an equal signature, so it is a barrier too. Throws
// Error(kDisagreement) on every rank if the signatures are not all equal; the transport stays
// usable. flags need not be equal.
Agreed Agree(Transport& transport, SayingBuffers& buffers, const CallSignature& signature,
             uint64_t flags = 0, const Saying& saying = {});

// "ranks 0-2, 5", from ascending numbers.
std::string NameRanks(const std::vector<int>& ranks);

// Every rank's text, by rank.
std::vector<std::string> GatherTexts(Transport& transport, const std::string& mine);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_AGREEMENT_H_

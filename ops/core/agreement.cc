// Where all ranks share memory, each writes what it has to say there and reads the others'.
//
// Otherwise the check is a dissemination: in round k a rank tells rank + 2^k what it knows and
// hears from rank - 2^k, so after ceil(log2 size) rounds every rank has heard, directly or not,
// from every other. What it knows is one hash and whether all hashes so far were equal to it; if
// two differ anywhere, every rank's last answer is "not equal". What the ranks say goes with it:
// those of the ranks that have been heard, this rank's first, then those of the ranks before it.

#include "agreement.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "error.h"
#include "faults.h"

namespace adasum {

namespace {

struct alignas(64) Verdict {
  uint64_t hash;
  uint64_t equal;
  uint64_t flags;
};

struct Answer {
  bool equal;
  Agreed agreed;
};

Answer AskInMemory(HostMemory& memory, const Verdict& own) {
  memory.Tell(&own, sizeof own);
  Answer answer{true, {}};
  for (int member = 0; member < memory.members(); ++member) {
    Verdict theirs;
    std::memcpy(&theirs, memory.ToldBy(member), sizeof theirs);
    answer.equal = answer.equal && theirs.hash == own.hash;
    answer.agreed.flags |= theirs.flags;
  }
  return answer;
}

Answer AskByMessages(Transport& transport, SayingBuffers& buffers, Verdict own,
                     const Saying& saying) {
  const int rank = transport.rank(), size = transport.size();
  constexpr int64_t kHeader = sizeof(Verdict);
  // Whatever the others say, it fits.
  constexpr int64_t kCapacity = kHeader + kMostGatheredBytes;
  buffers.heard.resize(kCapacity);
  buffers.coming.resize(kCapacity);
  char *heard = buffers.heard.data(), *coming = buffers.coming.data();
  if (saying.bytes > 0) saying.write(heard + kHeader);
  const uint64_t hash = own.hash;
  int known = 1;
  for (int distance = 1; distance < size; distance *= 2) {
    const int more = std::min(distance, size - distance);
    std::memcpy(heard, &own, sizeof own);
    const int64_t bytes = transport.SendReceiveUpTo(
        heard, kHeader + (own.equal ? more * saying.bytes : 0), (rank + distance) % size, coming,
        kCapacity, (rank - distance + size) % size);
    Verdict theirs;
    std::memcpy(&theirs, coming, sizeof theirs);
    own.equal = own.equal && theirs.equal && theirs.hash == hash;
    own.flags |= theirs.flags;
    if (own.equal && bytes > kHeader) {
      std::memcpy(heard + kHeader + known * saying.bytes, coming + kHeader,
                  static_cast<size_t>(bytes - kHeader));
    }
    known += more;
  }
  Answer answer{own.equal != 0, {own.flags, {}}};
  for (int r = 0; saying.bytes > 0 && r < size; ++r) {
    answer.agreed.said.push_back(heard + kHeader + (rank - r + size) % size * saying.bytes);
  }
  return answer;
}

std::string Join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string Explain(const std::vector<std::string>& texts) {
  constexpr int kShown = 8;
  std::vector<std::vector<std::string>> facts;
  size_t longest = 0;
  for (const std::string& text : texts) {
    facts.push_back(Split(text));
    longest = std::max(longest, facts.back().size());
  }
  // Ranks in calls of different kinds have nothing else that could be compared.
  for (const auto& of_rank : facts) {
    if (of_rank.front() != facts.front().front()) longest = 1;
  }
  std::string message = "the ranks disagree about this call:";
  int differences = 0;
  for (size_t line = 0; line < longest; ++line) {
    // In the order of the first rank that has each.
    std::vector<std::pair<std::string, std::vector<int>>> ranks_by_fact;
    for (size_t rank = 0; rank < facts.size(); ++rank) {
      const std::string fact = line < facts[rank].size() ? facts[rank][line] : "nothing more";
      auto same = std::find_if(ranks_by_fact.begin(), ranks_by_fact.end(),
                               [&](const auto& known) { return known.first == fact; });
      if (same == ranks_by_fact.end()) same = ranks_by_fact.insert(same, {fact, {}});
      same->second.push_back(static_cast<int>(rank));
    }
    if (ranks_by_fact.size() == 1) continue;
    if (++differences > kShown) continue;
    const char* separator = "\n  ";
    for (const auto& [fact, ranks] : ranks_by_fact) {
      message += separator + NameRanks(ranks) + " with " + fact;
      separator = "; ";
    }
  }
  if (differences > kShown) {
    message += "\n  and " + std::to_string(differences - kShown) + " more differences";
  }
  return message;
}

}  // namespace

std::string NameRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += (last > i + 1 ? "-" : ", ") + std::to_string(ranks[last]);
    i = last;
  }
  return text;
}

void Hasher::Add(std::string_view text) {
  Add(text.size());
  for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    Add(word);
  }
}

void Hasher::Add(const void* data, int64_t bytes) {
  // One multiplication after the other would wait for each other; independent lanes do not.
  constexpr int kLanes = 4;
  constexpr int64_t kBlock = kLanes * sizeof(uint64_t);
  const char* at = static_cast<const char*>(data);
  uint64_t lanes[kLanes] = {1, 2, 3, 4}, words[kLanes];
  const auto mix = [&] {
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = (lanes[lane] ^ words[lane]) * 0x9e3779b97f4a7c15u;
      lanes[lane] ^= lanes[lane] >> 32;
    }
  };
  int64_t rest = bytes;
  for (; rest >= kBlock; rest -= kBlock, at += kBlock) {
    std::memcpy(words, at, kBlock);
    mix();
  }
  std::memset(words, 0, kBlock);
  if (rest > 0) std::memcpy(words, at, static_cast<size_t>(rest));
  mix();
  for (const uint64_t lane : lanes) Add(lane);
  Add(static_cast<uint64_t>(bytes));
}

std::vector<std::string> GatherTexts(Transport& transport, const std::string& mine) {
  const int rank = transport.rank(), size = transport.size();
  std::vector<std::string> texts(size);
  texts[rank] = mine;
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size, from = (rank - distance + size) % size;
    const int64_t bytes = static_cast<int64_t>(mine.size());
    int64_t coming = 0;
    transport.SendReceive(&bytes, sizeof bytes, to, &coming, sizeof coming, from);
    texts[from].resize(static_cast<size_t>(coming));
    transport.SendReceive(mine.data(), bytes, to, texts[from].data(), coming, from);
  }
  return texts;
}

Agreed Agree(Transport& transport, SayingBuffers& buffers, const CallSignature& signature,
             uint64_t flags, const Saying& saying) {
  FaultPlace("agree");
  const Verdict own{signature.Hash(), 1, flags};
  HostMemory* memory = transport.memory_of_all();
  Answer answer = memory != nullptr ? AskInMemory(*memory, own)
                                    : AskByMessages(transport, buffers, own, saying);
  FaultPlace("agreed");
  if (answer.equal) return std::move(answer.agreed);
  throw Error(ErrorKind::kDisagreement,
              Explain(GatherTexts(transport, Join(signature.Describe()))));
}

}  // namespace adasum

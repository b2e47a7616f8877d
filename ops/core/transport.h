// How ranks exchange bytes: the one thing that an algorithm needs to know of MPI, threads or NCCL.
#ifndef TF_ADASUM_OPS_CORE_TRANSPORT_H_
#define TF_ADASUM_OPS_CORE_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host_memory.h"

namespace adasum {

// Which ranks run on which host. Equal on all ranks.
struct Hosts {
  std::vector<std::vector<int>> ranks;  // of each host, ascending; hosts by their first rank
  std::vector<int> host_of;             // for each rank

  static Hosts From(const std::vector<int>& host_of);  // any numbers, equal for ranks of one host
};

struct Topology {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host
  int local_size = 1;
  int cross_rank = 0;  // among the ranks of all hosts that have the same local rank
  int cross_size = 1;

  static Topology Of(int rank, const Hosts& hosts);
};

// Messages both ways that are under way, in pieces. What they read and write belongs to them until
// Await has returned.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void AwaitPiece(int64_t piece) = 0;  // until that piece is received
  virtual void Await() = 0;                    // until all is sent and received
};

class Transport {
 public:
  // What is received from a stream was sent to that stream, in the same order.
  enum Stream { kControl, kEvenBuckets, kOddBuckets };

  virtual ~Transport() = default;

  // By all transports of this process, in messages to other ranks; not by threads as ranks.
  static inline std::atomic<int64_t> sent_bytes{0};

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(hosts_.host_of.size()); }
  const Hosts& hosts() const { return hosts_; }

  // Whether on every host its ranks share memory. Equal on all ranks.
  virtual bool shares_memory() const = 0;
  // That of this rank's host; null where this rank is alone on it.
  virtual HostMemory* host_memory() = 0;
  // The memory that all ranks share; null where there is more than one host, or one rank.
  HostMemory* memory_of_all() { return hosts_.ranks.size() == 1 ? host_memory() : nullptr; }

  // Sends to one rank and receives from one rank at the same time, so that any pattern in which
  // each message has its receiver ends without deadlock. Both sides know the number of bytes; with
  // 0 bytes nothing is sent and the rank is not looked at. Throws Error(kTransport).
  virtual void SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                           int64_t receive_bytes, int from, Stream stream = kControl) = 0;

  // The same, over kControl, for a receiver that knows only how many bytes there can be. Returns
  // how many there were; each side sends at least one.
  virtual int64_t SendReceiveUpTo(const void* send, int64_t send_bytes, int to, void* receive,
                                  int64_t capacity, int from) = 0;

  // The same in pieces of so many bytes, the last one shorter, without waiting.
  virtual std::unique_ptr<Transfer> Start(const void* send, int64_t send_bytes, int to,
                                          void* receive, int64_t receive_bytes, int from,
                                          int64_t piece_bytes, Stream stream) = 0;

  // Whether messages can be sent from and received into the memory of devices of that kind.
  virtual bool reads_device(const std::string& /*kind*/) const { return false; }
  // Collective, before the first message of a bucket: what the ranks have to know of each other for
  // that.
  virtual void Connect() {}

  // Whether the ranks that live can go on when others die. Exchanges then throw Error(kRankLost)
  // where a rank has died or revoked them; of the following four nothing is called otherwise.
  virtual bool fault_tolerant() const { return false; }
  // Makes all exchanges of this transport, also those of other ranks that are under way, throw. May
  // be called more than once.
  virtual void Revoke() {}
  // What the ranks that live say together, after a revocation too.
  struct Vote {
    uint32_t flags;  // bits that all of them have set
    bool all_live;   // none has died
  };
  // Collective over those that live: the same answer on all of them.
  virtual Vote AskLiving(uint32_t flags) { return {flags, true}; }
  // Collective over those that live: a transport without the others, which are listed, ascending.
  // What this one holds has to stay: messages may still come in.
  virtual std::unique_ptr<Transport> Shrink(std::vector<int>* /*lost*/) { return nullptr; }
  // The ranks that this one knows to have died. May be called by any thread.
  virtual std::vector<int> KnownLost() { return {}; }
  // Those of them that the message layer does not know of: to wait for them does not end.
  virtual std::vector<int> LostUnnoticed() { return {}; }

  // A few bytes to another rank, whatever that one is doing, and from any rank; for one thread of
  // its own. Both are lost where they cannot be had.
  virtual void SendNote(const void* /*note*/, int64_t /*bytes*/, int /*to*/) {}
  virtual bool TakeNote(void* /*note*/, int64_t /*bytes*/) { return false; }

  void Send(const void* data, int64_t bytes, int to, Stream stream = kControl) {
    SendReceive(data, bytes, to, nullptr, 0, 0, stream);
  }
  void Receive(void* data, int64_t bytes, int from, Stream stream = kControl) {
    SendReceive(nullptr, 0, 0, data, bytes, from, stream);
  }

 protected:
  Transport(int rank, Hosts hosts) : rank_(rank), hosts_(std::move(hosts)) {}

 private:
  const int rank_;
  const Hosts hosts_;
};

// Some ranks, in an order that all of them know, and this rank's place among them.
struct Group {
  std::vector<int> ranks;
  int place;

  int size() const { return static_cast<int>(ranks.size()); }
};

enum class Reduction { kSum, kMax };

// Reduces a few doubles over a group, in the order of a tree: the same bits on every member.
void GroupAllreduce(Transport& transport, const Group& group, Reduction reduction, double* values,
                    size_t count);

// The same where the group's members share memory that all of them can read: of_member[i] are its
// member i's values.
void ReduceInMemory(const std::vector<const double*>& of_member, Reduction reduction,
                    double* values, size_t count);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_TRANSPORT_H_

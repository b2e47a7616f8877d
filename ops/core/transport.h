// How ranks exchange bytes: the one thing that an algorithm needs to know of MPI, threads or NCCL.
#ifndef TF_ADASUM_OPS_CORE_TRANSPORT_H_
#define TF_ADASUM_OPS_CORE_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "host_memory.h"

namespace adasum {

// Which ranks run on which host. Equal on all ranks.
struct Hosts {
  std::vector<std::vector<int>> ranks;  // of each host, ascending; hosts by their first rank
  std::vector<int> host_of;             // for each rank

  static Hosts From(const std::vector<int>& host_of);  // any numbers, equal for ranks of one host
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

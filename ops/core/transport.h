// How ranks exchange bytes: the one thing that an algorithm needs to know of MPI, threads or NCCL.
#ifndef TF_ADASUM_OPS_CORE_TRANSPORT_H_
#define TF_ADASUM_OPS_CORE_TRANSPORT_H_

#include <cstdint>
#include <vector>

namespace adasum {

class Transport {
 public:
  virtual ~Transport() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sends to one rank and receives from one rank at the same time, so that any pattern in which
  // each message has its receiver ends without deadlock. Both sides know the number of bytes; with
  // 0 bytes nothing is sent and the rank is not looked at. Throws Error(kTransport).
  virtual void SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                           int64_t receive_bytes, int from) = 0;

  void Send(const void* data, int64_t bytes, int to) {
    SendReceive(data, bytes, to, nullptr, 0, 0);
  }
  void Receive(void* data, int64_t bytes, int from) {
    SendReceive(nullptr, 0, 0, data, bytes, from);
  }

 protected:
  Transport(int rank, int size) : rank_(rank), size_(size) {}

 private:
  const int rank_;
  const int size_;
};

enum class Reduction { kSum, kMax };

// Reduces a few doubles over a group whose number of members is a power of two; position is this
// rank's place in it. Recursive doubling in the group's order, so every member gets the same bits
// whatever the transport.
void GroupAllreduce(Transport& transport, const std::vector<int>& group, int position,
                    Reduction reduction, std::vector<double>& values);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_TRANSPORT_H_

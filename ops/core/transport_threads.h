// Ranks as threads of one process: for tests, and to simulate many workers with the code that real
// ranks run.
#ifndef TF_ADASUM_OPS_CORE_TRANSPORT_THREADS_H_
#define TF_ADASUM_OPS_CORE_TRANSPORT_THREADS_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "transport.h"

namespace adasum {

// What the threads share. It must outlive their transports.
class ThreadWorld {
 public:
  // The ranks' pretended hosts, and whether the ranks of a host share memory or send messages.
  // reads_devices: messages may be in the memory of the emulated device, as in that of GPUs with a
  // CUDA-aware MPI.
  ThreadWorld(const std::vector<int>& host_of, bool share_memory, bool reads_devices = false);

  int size() const { return static_cast<int>(hosts_.host_of.size()); }
  // Called by each rank's thread, since it waits for the others.
  std::unique_ptr<Transport> Join(int rank);

  // Makes every waiting and later exchange throw, so that one failed rank cannot leave the others
  // waiting.
  void Abort();

  // In messages, by all ranks so far.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  friend class ThreadTransport;

  // A message on its way. The receiver copies straight out of the sender's memory.
  struct Message {
    enum State { kPosted, kCopying, kTaken };
    const void* data;
    int64_t bytes;
    Transport::Stream stream;
    State state = kPosted;
  };

  // Those between an ordered pair of ranks.
  struct Mailbox {
    std::deque<std::shared_ptr<Message>> posted;
    std::mutex mutex;
    std::condition_variable changed;
  };

  Mailbox& mailbox(int from, int to) { return mailboxes_[from * size() + to]; }
  bool aborted();
  // Memory that lives as long as this.
  char* Allocate(int64_t bytes);

  const Hosts hosts_;
  const bool share_memory_;
  const bool reads_devices_;
  std::vector<Mailbox> mailboxes_;
  std::atomic<int64_t> sent_bytes_{0};
  std::mutex mutex_;
  bool aborted_ = false;
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_TRANSPORT_THREADS_H_

// Ranks as threads of one process: for tests, and to simulate many workers with the code that real
// ranks run.
#ifndef TF_ADASUM_OPS_CORE_TRANSPORT_THREADS_H_
#define TF_ADASUM_OPS_CORE_TRANSPORT_THREADS_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "transport.h"

namespace adasum {

// What the threads share. It must outlive their transports.
class ThreadWorld {
 public:
  explicit ThreadWorld(int size);

  int size() const { return size_; }
  std::unique_ptr<Transport> Join(int rank);

  // Makes every waiting and later exchange throw, so that one failed rank cannot leave the others
  // waiting.
  void Abort();

 private:
  friend class ThreadTransport;

  // One message on its way between an ordered pair of ranks. The receiver copies straight out of
  // the sender's memory.
  struct Mailbox {
    enum State { kEmpty, kPosted, kCopying };
    State state = kEmpty;
    const void* data = nullptr;
    int64_t bytes = 0;
    std::mutex mutex;
    std::condition_variable changed;
  };

  Mailbox& mailbox(int from, int to) { return mailboxes_[from * size_ + to]; }
  bool aborted();

  const int size_;
  std::vector<Mailbox> mailboxes_;
  std::mutex abort_mutex_;
  bool aborted_ = false;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_TRANSPORT_THREADS_H_

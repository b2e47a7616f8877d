#include "transport_threads.h"

#include <cstring>
#include <string>

#include "error.h"

namespace adasum {

class ThreadTransport : public Transport {
 public:
  ThreadTransport(ThreadWorld& world, int rank) : Transport(rank, world.size()), world_(world) {}

  void SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                   int64_t receive_bytes, int from) override {
    if (send_bytes > 0) Post(send, send_bytes, to);
    try {
      if (receive_bytes > 0) Take(receive, receive_bytes, from);
    } catch (const Error&) {
      if (send_bytes > 0) Withdraw(to);
      throw;
    }
    if (send_bytes > 0) AwaitTaken(to);
  }

 private:
  using Mailbox = ThreadWorld::Mailbox;

  [[noreturn]] void ThrowAborted() const {
    throw Error(ErrorKind::kTransport, "another rank of this simulation failed");
  }

  void Post(const void* data, int64_t bytes, int to) {
    Mailbox& box = world_.mailbox(rank(), to);
    std::lock_guard<std::mutex> lock(box.mutex);
    box.data = data;
    box.bytes = bytes;
    box.state = Mailbox::kPosted;
    box.changed.notify_all();
  }

  void Take(void* data, int64_t bytes, int from) {
    Mailbox& box = world_.mailbox(from, rank());
    std::unique_lock<std::mutex> lock(box.mutex);
    box.changed.wait(lock, [&] { return box.state == Mailbox::kPosted || world_.aborted(); });
    if (box.state != Mailbox::kPosted) ThrowAborted();
    if (box.bytes != bytes) {
      throw Error(ErrorKind::kTransport, "rank " + std::to_string(rank()) + " expected " +
                                             std::to_string(bytes) + " bytes from rank " +
                                             std::to_string(from) + ", received " +
                                             std::to_string(box.bytes));
    }
    box.state = Mailbox::kCopying;
    lock.unlock();
    std::memcpy(data, box.data, static_cast<size_t>(bytes));
    lock.lock();
    box.state = Mailbox::kEmpty;
    box.changed.notify_all();
  }

  void AwaitTaken(int to) {
    Mailbox& box = world_.mailbox(rank(), to);
    std::unique_lock<std::mutex> lock(box.mutex);
    box.changed.wait(lock, [&] {
      return box.state == Mailbox::kEmpty || (box.state == Mailbox::kPosted && world_.aborted());
    });
    if (box.state == Mailbox::kEmpty) return;
    box.state = Mailbox::kEmpty;
    ThrowAborted();
  }

  // The sender's memory may go away after an error, so the message must not be seen any more.
  void Withdraw(int to) {
    Mailbox& box = world_.mailbox(rank(), to);
    std::unique_lock<std::mutex> lock(box.mutex);
    box.changed.wait(lock, [&] { return box.state != Mailbox::kCopying; });
    box.state = Mailbox::kEmpty;
  }

  ThreadWorld& world_;
};

ThreadWorld::ThreadWorld(int size)
    : size_(size), mailboxes_(static_cast<size_t>(size) * static_cast<size_t>(size)) {}

std::unique_ptr<Transport> ThreadWorld::Join(int rank) {
  return std::make_unique<ThreadTransport>(*this, rank);
}

bool ThreadWorld::aborted() {
  std::lock_guard<std::mutex> lock(abort_mutex_);
  return aborted_;
}

void ThreadWorld::Abort() {
  {
    std::lock_guard<std::mutex> lock(abort_mutex_);
    aborted_ = true;
  }
  for (Mailbox& box : mailboxes_) {
    // Taking the lock between the flag and the call keeps a thread that has just read the flag from
    // missing it.
    std::lock_guard<std::mutex> lock(box.mutex);
    box.changed.notify_all();
  }
}

}  // namespace adasum

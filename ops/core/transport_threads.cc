#include "transport_threads.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "accelerator.h"
#include "error.h"

namespace adasum {

class ThreadTransport : public Transport {
 public:
  ThreadTransport(ThreadWorld& world, int rank) : Transport(rank, world.hosts_), world_(world) {
    const std::vector<int>& ranks = hosts().ranks[hosts().host_of[rank]];
    if (!world.share_memory_ || ranks.size() == 1) return;
    const int member =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    host_memory_ = std::make_unique<HostMemory>(
        member, static_cast<int>(ranks.size()),
        [this, &ranks, member](int64_t bytes) {
          return std::make_unique<HeapSegments>(*this, ranks, member, bytes);
        },
        [this] {
          if (world_.aborted()) ThrowAborted();
        });
  }

  bool shares_memory() const override { return world_.share_memory_; }
  bool reads_device(const std::string&) const override { return world_.reads_devices_; }
  HostMemory* host_memory() override { return host_memory_.get(); }

  void SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                   int64_t receive_bytes, int from, Stream stream) override {
    constexpr int64_t kOnePiece = INT64_MAX;
    Start(send, send_bytes, to, receive, receive_bytes, from, kOnePiece, stream)->Await();
  }

  int64_t SendReceiveUpTo(const void* send, int64_t send_bytes, int to, void* receive,
                          int64_t capacity, int from) override {
    const std::shared_ptr<Message> sent = Post(send, send_bytes, to, kControl);
    int64_t received = 0;
    try {
      received = Take(receive, capacity, from, kControl);
      AwaitTaken(*sent, to);
    } catch (const Error&) {
      Withdraw(*sent, to);
      throw;
    }
    return received;
  }

  std::unique_ptr<Transfer> Start(const void* send, int64_t send_bytes, int to, void* receive,
                                  int64_t receive_bytes, int from, int64_t piece_bytes,
                                  Stream stream) override {
    return std::make_unique<ThreadTransfer>(*this, send, send_bytes, to, receive, receive_bytes,
                                            from, piece_bytes, stream);
  }

 private:
  using Mailbox = ThreadWorld::Mailbox;
  using Message = ThreadWorld::Message;

  class HeapSegments : public Segments {
   public:
    HeapSegments(ThreadTransport& transport, const std::vector<int>& ranks, int member,
                 int64_t bytes) {
      const int members = static_cast<int>(ranks.size());
      addresses_.resize(members);
      addresses_[member] = transport.world_.Allocate(bytes);
      for (int distance = 1; distance < members; ++distance) {
        const int to = (member + distance) % members;
        const int from = (member - distance + members) % members;
        transport.SendReceive(&addresses_[member], sizeof(char*), ranks[to], &addresses_[from],
                              sizeof(char*), ranks[from], kControl);
      }
    }
  };

  // What is to be received is copied when it is waited for, in order.
  class ThreadTransfer : public Transfer {
   public:
    ThreadTransfer(ThreadTransport& transport, const void* send, int64_t send_bytes, int to,
                   void* receive, int64_t receive_bytes, int from, int64_t piece_bytes,
                   Stream stream)
        : transport_(transport),
          to_(to),
          receive_(static_cast<char*>(receive)),
          receive_bytes_(receive_bytes),
          from_(from),
          piece_bytes_(piece_bytes),
          stream_(stream) {
      for (int64_t at = 0; at < send_bytes;) {
        const int64_t bytes = std::min(piece_bytes, send_bytes - at);
        sent_.push_back(transport.Post(static_cast<const char*>(send) + at, bytes, to, stream));
        at += bytes;
      }
    }

    // The sender's memory may go away after an error, so the messages must not be seen any more.
    ~ThreadTransfer() override {
      for (const auto& message : sent_) transport_.Withdraw(*message, to_);
    }

    void AwaitPiece(int64_t piece) override {
      for (; taken_ <= piece; ++taken_) {
        const int64_t at = taken_ * piece_bytes_,
                      bytes = std::min(piece_bytes_, receive_bytes_ - at);
        const int64_t came = transport_.Take(receive_ + at, bytes, from_, stream_);
        if (came != bytes) {
          throw Error(ErrorKind::kTransport, "rank " + std::to_string(transport_.rank()) +
                                                 " expected " + std::to_string(bytes) +
                                                 " bytes from rank " + std::to_string(from_) +
                                                 ", received " + std::to_string(came));
        }
      }
    }

    void Await() override {
      if (receive_bytes_ > 0) AwaitPiece((receive_bytes_ - 1) / piece_bytes_);
      for (const auto& message : sent_) transport_.AwaitTaken(*message, to_);
      sent_.clear();
    }

   private:
    ThreadTransport& transport_;
    const int to_;
    char* const receive_;
    const int64_t receive_bytes_;
    const int from_;
    const int64_t piece_bytes_;
    const Stream stream_;
    int64_t taken_ = 0;
    std::vector<std::shared_ptr<Message>> sent_;
  };

  [[noreturn]] void ThrowAborted() const {
    throw Error(ErrorKind::kTransport, "another rank of this simulation failed");
  }

  std::shared_ptr<Message> Post(const void* data, int64_t bytes, int to, Stream stream) {
    auto message = std::make_shared<Message>(Message{data, bytes, stream});
    world_.sent_bytes_ += bytes;
    Mailbox& box = world_.mailbox(rank(), to);
    std::lock_guard<std::mutex> lock(box.mutex);
    box.posted.push_back(message);
    box.changed.notify_all();
    return message;
  }

  // Returns the message's size, of which no more than capacity is copied.
  int64_t Take(void* data, int64_t capacity, int from, Stream stream) {
    Mailbox& box = world_.mailbox(from, rank());
    std::unique_lock<std::mutex> lock(box.mutex);
    const auto find = [&] {
      return std::find_if(box.posted.begin(), box.posted.end(),
                          [&](const auto& message) { return message->stream == stream; });
    };
    box.changed.wait(lock, [&] { return find() != box.posted.end() || world_.aborted(); });
    const auto place = find();
    if (place == box.posted.end()) ThrowAborted();
    const std::shared_ptr<Message> message = *place;
    box.posted.erase(place);
    message->state = Message::kCopying;
    lock.unlock();
    const void* bytes = message->data;
    if (world_.reads_devices_) {
      bytes = emulated::Reach(bytes);
      data = emulated::Reach(data);
    }
    std::memcpy(data, bytes, static_cast<size_t>(std::min(capacity, message->bytes)));
    lock.lock();
    message->state = Message::kTaken;
    box.changed.notify_all();
    return message->bytes;
  }

  void AwaitTaken(Message& message, int to) {
    Mailbox& box = world_.mailbox(rank(), to);
    std::unique_lock<std::mutex> lock(box.mutex);
    box.changed.wait(lock, [&] {
      return message.state == Message::kTaken ||
             (message.state == Message::kPosted && world_.aborted());
    });
    if (message.state != Message::kTaken) ThrowAborted();
  }

  void Withdraw(Message& message, int to) {
    Mailbox& box = world_.mailbox(rank(), to);
    std::unique_lock<std::mutex> lock(box.mutex);
    box.changed.wait(lock, [&] { return message.state != Message::kCopying; });
    const auto same = [&](const std::shared_ptr<Message>& other) {
      return other.get() == &message;
    };
    const auto place = std::find_if(box.posted.begin(), box.posted.end(), same);
    if (place != box.posted.end()) box.posted.erase(place);
  }

  ThreadWorld& world_;
  std::unique_ptr<HostMemory> host_memory_;
};

ThreadWorld::ThreadWorld(const std::vector<int>& host_of, bool share_memory, bool reads_devices)
    : hosts_(Hosts::From(host_of)),
      share_memory_(share_memory),
      reads_devices_(reads_devices),
      mailboxes_(host_of.size() * host_of.size()) {}

std::unique_ptr<Transport> ThreadWorld::Join(int rank) {
  return std::make_unique<ThreadTransport>(*this, rank);
}

bool ThreadWorld::aborted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return aborted_;
}

char* ThreadWorld::Allocate(int64_t bytes) {
  constexpr size_t kAlignment = 64;
  // Not aligned_alloc, whose memory would have to be filled with zeros: most of it is never used.
  std::unique_ptr<char, void (*)(void*)> memory(
      static_cast<char*>(std::calloc(1, static_cast<size_t>(bytes) + kAlignment)), std::free);
  if (memory == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  char* aligned = memory.get() + (kAlignment - address % kAlignment) % kAlignment;
  std::lock_guard<std::mutex> lock(mutex_);
  memory_.push_back(std::move(memory));
  return aligned;
}

void ThreadWorld::Abort() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
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

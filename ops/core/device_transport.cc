#include "device_transport.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <utility>

#include "agreement.h"
#include "error.h"

namespace adasum {

namespace {

const char* const kNames[] = {"auto", "staged", "direct", "nccl"};

// What a rank can do and wants, in a text that others read.
struct Offer {
  std::string wanted;
  std::string not_direct;  // why not; empty where it can
  std::string not_nccl;
  std::string gpu;

  std::string Text() const {
    return wanted + "\n" + not_direct + "\n" + not_nccl + "\n" + gpu + "\n";
  }

  static Offer Of(const std::string& text) {
    std::istringstream lines(text);
    Offer offer;
    for (std::string* line : {&offer.wanted, &offer.not_direct, &offer.not_nccl, &offer.gpu}) {
      std::getline(lines, *line);
    }
    return offer;
  }
};

std::string OneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

Offer OwnOffer(const Transport& transport, const Accelerator& accelerator) {
  const char* text = std::getenv("TF_ADASUM_DEVICE_TRANSPORT");
  Offer offer{text == nullptr || *text == 0 ? "auto" : OneLine(text), "", "", accelerator.name()};
  if (!transport.reads_device(accelerator.kind())) {
    offer.not_direct =
        "the message layer does not read and write the memory of GPUs, as a CUDA-aware MPI does";
  }
  std::string why;
  if (transport.fault_tolerant()) {
    // A message of NCCL to a rank that has died waits for ever.
    offer.not_nccl = "with ULFM NCCL is not used";
  } else if (nccl::Load(&why) == nullptr) {
    offer.not_nccl = OneLine(why);
  }
  return offer;
}

std::string Rank(size_t rank) { return "rank " + std::to_string(rank); }

// The first reason, of any rank, why all cannot go a way; empty where they can.
std::string Obstacle(const std::string& way, const std::vector<Offer>& offers, const Hosts& hosts) {
  std::map<std::pair<int, std::string>, size_t> users;
  for (size_t r = 0; r < offers.size(); ++r) {
    const Offer& offer = offers[r];
    const std::string& why = way == "direct" ? offer.not_direct : offer.not_nccl;
    if (!why.empty()) return Rank(r) + ": " + why;
    const auto [user, is_first] = users.insert({{hosts.host_of[r], offer.gpu}, r});
    if (!is_first && way == "nccl") {
      return Rank(user->second) + " and " + Rank(r) + " use one GPU, which NCCL refuses";
    }
  }
  return "";
}

}  // namespace

// What is sent is copied to the host piece by piece, and goes on its way once it is there; what
// comes is copied from there.
class DeviceTransport::StagedTransfer : public Transfer {
 public:
  StagedTransfer(DeviceTransport& owner, const void* send, int64_t send_bytes, int to,
                 void* receive, int64_t receive_bytes, int from, int64_t piece_bytes, Stream stream)
      : owner_(owner),
        accelerator_(owner.accelerator_),
        send_bytes_(send_bytes),
        to_(to),
        receive_(static_cast<char*>(receive)),
        receive_bytes_(receive_bytes),
        piece_bytes_(piece_bytes),
        stream_(stream) {
    accelerator_.Wait(Accelerator::kCopies, accelerator_.Record(Accelerator::kCompute));
    if (receive_bytes > 0) {
      in_ = owner.TakeStaging(receive_bytes);
      coming_ = owner.transport_.Start(nullptr, 0, 0, in_.memory, receive_bytes, from, piece_bytes,
                                       stream);
    }
    if (send_bytes == 0) return;
    out_ = owner.TakeStaging(send_bytes);
    for (int64_t at = 0; at < send_bytes; at += piece_bytes) {
      accelerator_.CopyOut(Accelerator::kCopies, out_.memory + at,
                           static_cast<const char*>(send) + at, PieceBytes(send_bytes, at));
      copied_.push_back(accelerator_.Record(Accelerator::kCopies));
    }
    owner.sending_.push_back(this);
  }

  ~StagedTransfer() override {
    owner_.sending_.remove(this);
    going_.clear();
    coming_.reset();
    const Accelerator::Event now = accelerator_.Record(Accelerator::kCopies);
    for (Staging* staging : {&in_, &out_}) {
      if (staging->memory == nullptr) continue;
      staging->last_use = now;
      owner_.ReturnStaging(*staging);
    }
  }

  void AwaitPiece(int64_t piece) override {
    owner_.SendWhatIsReady();
    SendUpTo(piece);
    for (; arrived_ <= piece; ++arrived_) {
      coming_->AwaitPiece(arrived_);
      const int64_t at = arrived_ * piece_bytes_;
      accelerator_.CopyIn(Accelerator::kCopies, receive_ + at, in_.memory + at,
                          PieceBytes(receive_bytes_, at));
      accelerator_.Wait(Accelerator::kCompute, accelerator_.Record(Accelerator::kCopies));
      owner_.SendWhatIsReady();
    }
  }

  void Await() override {
    SendUpTo(pieces() - 1);
    if (receive_bytes_ > 0) AwaitPiece((receive_bytes_ - 1) / piece_bytes_);
    if (coming_ != nullptr) coming_->Await();
    for (const auto& piece : going_) piece->Await();
    going_.clear();
  }

  // Sends its pieces that have been copied; all of them up to the last one that is waited for.
  // Returns whether all are sent.
  bool Send(int64_t last_awaited) {
    for (; sent_ < pieces(); ++sent_) {
      const Accelerator::Event& copied = copied_[sent_];
      if (sent_ <= last_awaited) {
        accelerator_.Await(copied);
      } else if (!accelerator_.HasHappened(copied)) {
        return false;
      }
      const int64_t at = sent_ * piece_bytes_;
      going_.push_back(owner_.transport_.Start(out_.memory + at, PieceBytes(send_bytes_, at), to_,
                                               nullptr, 0, 0, piece_bytes_, stream_));
    }
    return true;
  }

 private:
  int64_t pieces() const { return static_cast<int64_t>(copied_.size()); }
  int64_t PieceBytes(int64_t all, int64_t at) const { return std::min(piece_bytes_, all - at); }

  // Messages of one stream have to keep their order, so those that began before go first.
  void SendUpTo(int64_t last) {
    if (sent_ > std::min(last, pieces() - 1)) return;
    while (owner_.sending_.front() != this) {
      StagedTransfer* before = owner_.sending_.front();
      before->Send(before->pieces());
      owner_.sending_.pop_front();
    }
    if (Send(last)) owner_.sending_.pop_front();
  }

  DeviceTransport& owner_;
  Accelerator& accelerator_;
  const int64_t send_bytes_;
  const int to_;
  char* const receive_;
  const int64_t receive_bytes_;
  const int64_t piece_bytes_;
  const Stream stream_;
  Staging in_{nullptr, 0, nullptr};
  Staging out_{nullptr, 0, nullptr};
  std::unique_ptr<Transfer> coming_;
  int64_t arrived_ = 0;
  std::vector<Accelerator::Event> copied_;
  int64_t sent_ = 0;
  std::vector<std::unique_ptr<Transfer>> going_;
};

DeviceTransport::DeviceTransport(Transport& transport, QueuedDevice& device)
    : Transport(transport.rank(), transport.hosts()),
      transport_(transport),
      device_(device),
      accelerator_(device.accelerator()) {}

DeviceTransport::~DeviceTransport() {
  for (const Staging& staging : free_) {
    accelerator_.Await(staging.last_use);
    accelerator_.FreePinned(staging.memory);
  }
}

// Without waiting.
void DeviceTransport::SendWhatIsReady() {
  while (!sending_.empty() && sending_.front()->Send(-1)) sending_.pop_front();
}

// All ranks have to go the same way: the one that any rank names, or the best that all can go.
std::string DeviceTransport::Choose() const {
  std::vector<Offer> offers;
  for (const std::string& text :
       GatherTexts(transport_, OwnOffer(transport_, accelerator_).Text())) {
    offers.push_back(Offer::Of(text));
  }
  std::string wanted = "auto";
  for (size_t r = 0; r < offers.size(); ++r) {
    const std::string& theirs = offers[r].wanted;
    if (std::find(std::begin(kNames), std::end(kNames), theirs) == std::end(kNames)) {
      throw Error(ErrorKind::kInvalidArgument,
                  "TF_ADASUM_DEVICE_TRANSPORT must be auto, direct, nccl or staged. Received: '" +
                      theirs + "' on " + Rank(r));
    }
    if (theirs == "auto") continue;
    if (wanted != "auto" && theirs != wanted) {
      throw Error(ErrorKind::kInvalidArgument,
                  "TF_ADASUM_DEVICE_TRANSPORT must be the same on all ranks. Received: " + wanted +
                      ", and " + theirs + " on " + Rank(r));
    }
    wanted = theirs;
  }
  if (wanted == "auto") {
    for (const char* way : {"direct", "nccl"}) {
      if (Obstacle(way, offers, hosts()).empty()) return way;
    }
    return "staged";
  }
  const std::string obstacle = wanted == "staged" ? "" : Obstacle(wanted, offers, hosts());
  if (!obstacle.empty()) {
    throw Error(ErrorKind::kInvalidArgument,
                "TF_ADASUM_DEVICE_TRANSPORT=" + wanted + " is not possible. " + obstacle);
  }
  return wanted;
}

void DeviceTransport::Connect() {
  if (way_ != Way::kUnknown) return;
  std::string way = Choose();
  if (way == "nccl") {
    std::string why;
    links_ = std::make_unique<nccl::Links>(*nccl::Load(&why), transport_, accelerator_);
  }
  way_ = way == "nccl" ? Way::kNccl : way == "direct" ? Way::kDirect : Way::kStaged;
  static std::atomic<bool> has_said{false};
  if (rank() != 0 || has_said.exchange(true)) return;
  std::fprintf(stderr, "tf_adasum: tensors on GPUs go %s.\n",
               way_ == Way::kDirect ? "from one to the other by a CUDA-aware MPI"
               : way_ == Way::kNccl ? "from one to the other by NCCL"
                                    : "through memory of the hosts");
  std::fflush(stderr);
}

void DeviceTransport::SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                                  int64_t receive_bytes, int from, Stream stream) {
  if (stream == kControl) {
    transport_.SendReceive(send, send_bytes, to, receive, receive_bytes, from, stream);
    return;
  }
  const int64_t piece_bytes = device_.kernels(DType::kFloat32).message_bytes;
  Start(send, send_bytes, to, receive, receive_bytes, from, piece_bytes, stream)->Await();
}

int64_t DeviceTransport::SendReceiveUpTo(const void* send, int64_t send_bytes, int to,
                                         void* receive, int64_t capacity, int from) {
  return transport_.SendReceiveUpTo(send, send_bytes, to, receive, capacity, from);
}

std::unique_ptr<Transfer> DeviceTransport::Start(const void* send, int64_t send_bytes, int to,
                                                 void* receive, int64_t receive_bytes, int from,
                                                 int64_t piece_bytes, Stream stream) {
  if (stream != kControl) {
    device_.EndBatch();
    if (way_ == Way::kStaged) {
      return std::make_unique<StagedTransfer>(*this, send, send_bytes, to, receive, receive_bytes,
                                              from, piece_bytes, stream);
    }
    if (way_ == Way::kNccl) {
      return links_->Start(send, send_bytes, to, receive, receive_bytes, from, piece_bytes, stream);
    }
    // The message layer does not know of streams.
    accelerator_.Await(accelerator_.Record(Accelerator::kCompute));
  }
  return transport_.Start(send, send_bytes, to, receive, receive_bytes, from, piece_bytes, stream);
}

DeviceTransport::Staging DeviceTransport::TakeStaging(int64_t bytes) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->bytes >= bytes && (best == free_.end() || it->bytes < best->bytes)) best = it;
  }
  if (best == free_.end()) return {accelerator_.AllocatePinned(bytes), bytes, nullptr};
  const Staging staging = *best;
  free_.erase(best);
  accelerator_.Await(staging.last_use);
  return staging;
}

void DeviceTransport::ReturnStaging(Staging staging) {
  // Of ever larger ones, only the largest are worth keeping.
  constexpr size_t kMost = 8;
  free_.push_back(std::move(staging));
  if (free_.size() <= kMost) return;
  const auto smallest =
      std::min_element(free_.begin(), free_.end(),
                       [](const Staging& a, const Staging& b) { return a.bytes < b.bytes; });
  accelerator_.Await(smallest->last_use);
  accelerator_.FreePinned(smallest->memory);
  free_.erase(smallest);
}

}  // namespace adasum

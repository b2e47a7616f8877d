#include "start_watch.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "launcher.h"
#include "watchdog.h"

namespace adasum {

namespace {

constexpr double kAbort = 600;

const char* FirstOf(std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    const char* text = std::getenv(variable);
    if (text != nullptr && *text != '\0') return text;
  }
  return nullptr;
}

// This process's place on its host and the number of the job's processes there, as the launcher
// tells; -1 where it does not.
int LocalRank() {
  const char* text = FirstOf({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"});
  return text == nullptr ? -1 : std::atoi(text);
}

int LocalSize() {
  const char* text = FirstOf({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  return text == nullptr ? -1 : std::atoi(text);
}

// The rank of a process of this host, if they are numbered host by host: what launchers do unless
// they are told otherwise.
std::string NameOf(int local_rank) {
  const char* rank = FirstOf({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"});
  const std::string local = "local rank " + std::to_string(local_rank);
  if (rank == nullptr) return local;
  return "rank " + std::to_string(std::atoi(rank) - LocalRank() + local_rank) + " (" + local + ")";
}

// What the processes of one job, and no others, have in common on this host.
std::string Job() {
  const char* id = FirstOf({"PMIX_NAMESPACE"});
  if (id != nullptr) return id;
  const char *job = FirstOf({"SLURM_JOB_ID"}), *step = FirstOf({"SLURM_STEP_ID"});
  if (job != nullptr && step != nullptr) return std::string(job) + "." + step;
  return "child of " + std::to_string(getppid());
}

struct Address {
  sockaddr_un address{};
  socklen_t size = 0;
};

// A name that begins with NUL is no file's.
Address AddressOf(int local_rank) {
  const std::string name = "tf_adasum start " + Job() + " " + std::to_string(local_rank);
  Address of;
  of.address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof of.address.sun_path - 1);
  // The end tells the processes apart.
  std::memcpy(of.address.sun_path + 1, name.data() + name.size() - length, length);
  of.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return of;
}

bool HasCome(int local_rank) {
  const int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return true;
  const Address of = AddressOf(local_rank);
  const bool come =
      connect(descriptor, reinterpret_cast<const sockaddr*>(&of.address), of.size) == 0;
  close(descriptor);
  return come;
}

void Say(const std::string& text) {
  std::fprintf(stderr, "tf_adasum: %s\n", text.c_str());
  std::fflush(stderr);
}

}  // namespace

StartWatch::StartWatch(double warning)
    : warning_(warning), abort_(SecondsOfEnvironment("TF_ADASUM_START_ABORT_SECONDS", kAbort)) {
  if (LocalRank() < 0) return;  // no launcher
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket_ >= 0) {
    const Address own = AddressOf(LocalRank());
    bind(socket_, reinterpret_cast<const sockaddr*>(&own.address), own.size);
  }
  thread_ = std::thread([this] { Watch(); });
}

StartWatch::~StartWatch() {
  if (thread_.joinable()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  if (socket_ >= 0) close(socket_);
}

// Whether it took that long; otherwise the start has come to its end.
bool StartWatch::WaitsUntil(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return ends_; });
}

void StartWatch::Watch() {
  constexpr double kNever = 1e9;
  const double warning = warning_ > 0 ? warning_ : kNever, abort = abort_ > 0 ? abort_ : kNever;
  if (WaitsUntil(std::min(warning, abort)) && warning < abort) {
    if (IsSpokesman()) {
      Say("warning: for " + std::to_string(std::lround(warning)) +
          " s the processes of this job have been waiting for each other to start. " + Missing());
    }
    if (!WaitsUntil(abort - warning)) return;
  } else if (warning < abort) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ends_) return;
  }
  if (IsSpokesman()) {
    Say("error: the processes of this job have not met within " +
        std::to_string(std::lround(abort_)) + " s (TF_ADASUM_START_ABORT_SECONDS). " + Missing());
  } else {
    std::this_thread::sleep_for(std::chrono::seconds(2));  // it may be here until then
  }
  EndLauncherIfItStays();
  // MPI is not there yet to end the others: a process that fails makes the launcher do it.
  std::_Exit(EXIT_FAILURE);
}

bool StartWatch::IsSpokesman() const {
  for (int local_rank = 0; local_rank < LocalRank(); ++local_rank) {
    if (HasCome(local_rank)) return false;
  }
  return true;
}

std::string StartWatch::Missing() const {
  if (LocalSize() < 0) return "It started " + NameOf(LocalRank()) + " on this host.";
  std::string missing;
  for (int local_rank = 0; local_rank < LocalSize(); ++local_rank) {
    if (HasCome(local_rank)) continue;
    missing += (missing.empty() ? "" : ", ") + NameOf(local_rank);
  }
  const std::string all = std::to_string(LocalSize());
  if (missing.empty()) {
    return "All " + all +
           " of this host have come, so one of another host has not, or they cannot reach each "
           "other: see what the other hosts say.";
  }
  return "Of the " + all + " of this host these have not come to tf_adasum.init(): " + missing +
         ".";
}

}  // namespace adasum

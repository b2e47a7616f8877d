#include "lives.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

namespace adasum {

namespace {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

// 0 where there is no such process.
uint64_t StartOf(int32_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The program's name, in parentheses, may hold anything; the start is the 20th word after it.
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream words(text.substr(end + 1));
  std::string word;
  for (int i = 0; i < 20; ++i) words >> word;
  return words ? std::stoull(word) : 0;
}

}  // namespace

Process Process::Own(int rank) { return {getpid(), rank, StartOf(getpid())}; }

Lives::Lives(const std::vector<Process>& processes) {
  for (const Process& process : processes) {
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, process.id, 0));
    if (descriptor < 0) continue;
    // After opening, so that it is this process whose start is looked at.
    if (process.started == 0 || StartOf(process.id) != process.started) {
      close(descriptor);
      continue;
    }
    lives_.push_back({process.rank, descriptor});
  }
}

Lives::~Lives() {
  for (const Life& life : lives_) close(life.descriptor);
}

std::vector<int> Lives::Ended() const {
  std::vector<pollfd> polled;
  for (const Life& life : lives_) polled.push_back({life.descriptor, POLLIN, 0});
  std::vector<int> ended;
  if (polled.empty() || poll(polled.data(), polled.size(), 0) <= 0) return ended;
  for (size_t i = 0; i < polled.size(); ++i) {
    if (polled[i].revents != 0) ended.push_back(lives_[i].rank);
  }
  return ended;
}

}  // namespace adasum

#include "launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace adasum {

namespace {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

// Milliseconds: until it is asked to end, asked again, which makes it hurry, and forced.
constexpr int kPatience[] = {10'000, 3'000, 3'000};

constexpr const char* kLaunchers[] = {"prterun",  "prted",   "orterun",       "orted",
                                      "mpirun",   "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy"};

// A process's name and parent; a parent of 0 where there is no such process.
struct Program {
  std::string name;
  int parent = 0;
};

Program ProgramOf(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t begin = text.find('('), end = text.rfind(')');
  if (begin == std::string::npos || end == std::string::npos) return {};
  Program program{text.substr(begin + 1, end - begin - 1), 0};
  std::istringstream rest(text.substr(end + 1));
  std::string state;
  rest >> state >> program.parent;
  return program;
}

// 0 where there is none.
int FindLauncher() {
  int process = getppid();
  for (int generation = 0; generation < 10 && process > 1; ++generation) {
    const Program program = ProgramOf(process);
    const auto is_name = [&](const char* name) { return program.name == name; };
    if (std::any_of(std::begin(kLaunchers), std::end(kLaunchers), is_name)) return process;
    process = program.parent;
  }
  return 0;
}

}  // namespace

void EndLauncherIfItStays() {
  const int process = FindLauncher();
  if (process == 0) return;
  // Not by its number, which may be another process's by then.
  const int launcher = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  // Not fork(), which would run what others have registered for it, in a process of many threads.
  if (launcher < 0 || syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) != 0) return;
  setsid();
  // Nobody is to wait for the end of what this process could still write.
  for (int descriptor = 0; descriptor < 3; ++descriptor) close(descriptor);
  syscall(SYS_close_range, 3, launcher - 1, 0);
  syscall(SYS_close_range, launcher + 1, ~0U, 0);
  const int signals[] = {SIGTERM, SIGTERM, SIGKILL};
  for (int i = 0; i < 3; ++i) {
    pollfd ended{launcher, POLLIN, 0};
    if (poll(&ended, 1, kPatience[i]) > 0) break;
    syscall(SYS_pidfd_send_signal, launcher, signals[i], nullptr, 0);
  }
  _exit(0);
}

}  // namespace adasum

#include "watchdog.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>

#include "agreement.h"
#include "error.h"

namespace adasum {

namespace {

// Between two looks, where patience does not ask for more.
constexpr double kTick = 0.5;
// How long a rank has to answer: its watchdog looks twice a second, on a machine that may be busy.
constexpr double kAnswer = 3;
// How long a launcher has to end the ranks that another one's death leaves, or to tell them of it:
// on a busy machine that takes seconds, and here they wait to go on.
constexpr double kEndsAll = 3, kTellsAll = 20;

double Now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

std::string Seconds(double seconds) { return std::to_string(std::lround(seconds)) + " s"; }

void Say(const std::string& text) {
  std::fprintf(stderr, "tf_adasum: %s\n", text.c_str());
  std::fflush(stderr);
}

}  // namespace

double SecondsOfEnvironment(const char* variable, double unset) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return unset;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds >= 0) || std::isinf(seconds)) {
    throw Error(ErrorKind::kInvalidArgument, std::string(variable) +
                                                 " must be a number of seconds, or 0 for no limit. "
                                                 "Received: " +
                                                 text);
  }
  return seconds;
}

Patience Patience::OfEnvironment() {
  const Patience unset;
  return {SecondsOfEnvironment("TF_ADASUM_STALL_WARNING_SECONDS", unset.warning),
          SecondsOfEnvironment("TF_ADASUM_STALL_ABORT_SECONDS", unset.abort)};
}

void WithinSeconds(double seconds, const std::string& what, const std::function<void()>& body) {
  if (seconds == 0) {
    body();
    return;
  }
  std::promise<void> done;
  const std::future<void> ended = done.get_future();
  std::thread limit([&] {
    if (ended.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready) {
      return;
    }
    Say("error: a process has not come to " + what + " within " + Seconds(seconds) +
        " (TF_ADASUM_STALL_ABORT_SECONDS).");
    std::_Exit(EXIT_FAILURE);
  });
  body();
  done.set_value();
  limit.join();
}

// Where a rank is.
struct Watchdog::Note {
  struct Lane {
    uint64_t begun;
    uint64_t ended;
    double seconds;  // since the last of the two
    char call[80];   // the last one
  };
  int32_t rank;
  int32_t is_question;
  uint64_t question;  // the number of the asking rank's question
  int32_t is_ending;
  Lane lanes[kLanes];

  bool IsIn(int lane, uint64_t call) const {
    return lanes[lane].begun == call && lanes[lane].ended < call;
  }
};

struct Watchdog::Waiting {
  uint64_t call = 0;
  double asked = 0;  // when; 0 where not
  double next_warning = 0;
  bool warned = false;
};

Watchdog::Watchdog(std::shared_ptr<Transport> transport, const Patience& patience,
                   std::function<void()> end_job)
    : patience_(patience),
      end_job_(std::move(end_job)),
      transport_(std::move(transport)),
      waiting_(kLanes),
      thread_([this] { Work(); }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Watchdog::Call::Call(Watchdog* watchdog, Lane lane, const char* kind, const std::string& name)
    : watchdog_(watchdog), lane_(lane) {
  if (watchdog_ == nullptr) return;
  const double now = Now();
  std::lock_guard<std::mutex> lock(watchdog_->mutex_);
  Progress& progress = watchdog_->lanes_[lane];
  ++progress.begun;
  progress.since = now;
  progress.kind = kind;
  progress.name = name;
}

Watchdog::Call::~Call() {
  if (watchdog_ == nullptr) return;
  const double now = Now();
  std::lock_guard<std::mutex> lock(watchdog_->mutex_);
  Progress& progress = watchdog_->lanes_[lane_];
  progress.ended = progress.begun;
  progress.since = now;
}

void Watchdog::Follow(std::shared_ptr<Transport> transport) {
  // Not while the thread still asks the one before.
  std::lock_guard<std::mutex> working(working_mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  transport_ = std::move(transport);
  ending_.clear();
}

void Watchdog::IsEnding() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_ending_ = true;
}

// Of ranks that are all ending, the last one to say so learns that the others are; and these do
// when it asks them, so that they need no answer of one that has left.
bool Watchdog::OthersGoOn() {
  IsEnding();
  std::lock_guard<std::mutex> working(working_mutex_);
  std::shared_ptr<Transport> transport;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transport = transport_;
  }
  Ask(*transport);
  const double asked = Now();
  while (true) {
    Answer(*transport);
    std::set<int> ended = ending_;
    const std::vector<int> lost = transport->KnownLost();
    ended.insert(lost.begin(), lost.end());
    ended.insert(transport->rank());
    if (static_cast<int>(ended.size()) == transport->size()) return false;
    for (const Note& answer : answers_) {
      if (ended.count(answer.rank) == 0) return true;
    }
    // Where exchanges are revoked none can answer. Then one is to end the others, and these leave
    // it time to: of a job that several abort at a time, Open MPI's launcher may return 0, or
    // crash.
    if (Now() - asked > (IsFirst(*transport) ? kAnswer : 2 * kAnswer)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void Watchdog::Work() {
  double tick = kTick;
  for (const double limit : {patience_.warning, patience_.abort}) {
    if (limit > 0) tick = std::min(tick, std::max(limit / 4, 0.01));
  }
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, std::chrono::duration<double>(tick), [this] { return ends_; });
      if (ends_) return;
    }
    std::lock_guard<std::mutex> working(working_mutex_);
    std::shared_ptr<Transport> transport;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      transport = transport_;
    }
    if (transport->size() == 1) continue;
    Answer(*transport);
    Look(*transport);
    LookForTheDead(*transport);
  }
}

Watchdog::Note Watchdog::Own(int rank) const {
  Note note{};
  note.rank = rank;
  const double now = Now();
  std::lock_guard<std::mutex> lock(mutex_);
  note.is_ending = is_ending_;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Progress& progress = lanes_[lane];
    Note::Lane& to = note.lanes[lane];
    to.begun = progress.begun;
    to.ended = progress.ended;
    to.seconds = now - progress.since;
    std::snprintf(to.call, sizeof to.call, "%s '%s'", progress.kind, progress.name.c_str());
  }
  return note;
}

// Questions of others, and their answers.
void Watchdog::Answer(Transport& transport) {
  Note note;
  while (transport.TakeNote(&note, sizeof note)) {
    if (note.is_ending) ending_.insert(note.rank);
    if (note.is_question) {
      Note own = Own(transport.rank());
      own.question = note.question;
      transport.SendNote(&own, sizeof own, note.rank);
    } else if (note.question == question_) {
      answers_.push_back(note);
    }
  }
}

void Watchdog::Ask(Transport& transport) {
  answers_.clear();
  ++question_;
  Note note = Own(transport.rank());
  note.is_question = 1;
  note.question = question_;
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (rank != transport.rank()) transport.SendNote(&note, sizeof note, rank);
  }
}

void Watchdog::Look(Transport& transport) {
  for (int lane = 0; lane < kLanes; ++lane) {
    Progress progress;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      progress = lanes_[lane];
    }
    Waiting& waiting = waiting_[lane];
    const bool is_in = progress.begun > progress.ended;
    if (!is_in || progress.begun != waiting.call) {
      if (waiting.warned && IsSpokesman(transport.rank(), static_cast<Lane>(lane), waiting.call)) {
        Say("call " + std::to_string(waiting.call) + " has ended, the ranks go on");
      }
      waiting = {};
      waiting.call = progress.begun;
      waiting.next_warning = patience_.warning;
    }
    if (is_in) Report(transport, static_cast<Lane>(lane), progress);
  }
}

void Watchdog::Report(Transport& transport, Lane lane, const Progress& progress) {
  Waiting& waiting = waiting_[lane];
  const double waited = Now() - progress.since;
  const bool warns = patience_.warning > 0 && waited >= waiting.next_warning;
  const bool ends = patience_.abort > 0 && waited >= patience_.abort;
  if (!warns && !ends) return;
  if (waiting.asked == 0) {
    Ask(transport);
    waiting.asked = Now();
    return;
  }
  const int others = transport.size() - 1;
  const bool all_answered = static_cast<int>(answers_.size()) == others;
  if (!all_answered && Now() - waiting.asked < kAnswer) return;
  const bool speaks = IsSpokesman(transport.rank(), lane, progress.begun);
  const std::string text = "rank " + std::to_string(transport.rank()) + " has been waiting for " +
                           Seconds(waited) + " in its call " + std::to_string(progress.begun) +
                           ", " + progress.kind + " '" + progress.name + "'. " +
                           Missing(transport, lane, progress.begun);
  if (ends) {
    // Those that do not speak leave the others time to. Where none answers, all speak, but one
    // ends.
    const bool is_first = answers_.empty() ? IsFirst(transport) : speaks;
    if (!is_first && Now() - waiting.asked < 2 * kAnswer) return;
    End("error: " + text + "\nThe job ends, since TF_ADASUM_STALL_ABORT_SECONDS is " +
        Seconds(patience_.abort) + ".");
  }
  waiting.next_warning *= 2;
  waiting.asked = 0;
  waiting.warned = true;
  if (!speaks) return;
  const std::string end = patience_.abort > 0
                              ? "The job will end after " + Seconds(patience_.abort) +
                                    " (TF_ADASUM_STALL_ABORT_SECONDS)."
                              : "It will wait for ever, since TF_ADASUM_STALL_ABORT_SECONDS is 0.";
  Say("warning: " + text + " " + end);
}

// One is enough to tell the user: the lowest of the ranks that wait in a call.
bool Watchdog::IsSpokesman(int rank, Lane lane, uint64_t call) const {
  return std::none_of(answers_.begin(), answers_.end(), [&](const Note& answer) {
    return answer.rank < rank && answer.IsIn(lane, call);
  });
}

// Of those that live.
bool Watchdog::IsFirst(Transport& transport) {
  const std::vector<int> lost = transport.KnownLost();
  return static_cast<int>(std::count_if(lost.begin(), lost.end(), [&](int rank) {
           return rank < transport.rank();
         })) == transport.rank();
}

std::string Watchdog::Missing(Transport& transport, Lane lane, uint64_t call) const {
  const std::vector<int> lost = transport.KnownLost();
  if (answers_.empty() && !lost.empty() && transport.fault_tolerant()) {
    // No notes get through where exchanges are revoked.
    return "The process of " + NameRanks(lost) +
           " has died, and the others do not get over it: one of them is stopped, or cut off.";
  }
  if (answers_.empty() && transport.size() > 2) {
    return "Which ranks are missing is not known: none answers, or MPI was initialised at a thread "
           "level below MULTIPLE.";
  }
  std::string text;
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (rank == transport.rank()) continue;
    std::string where;
    const auto answer = std::find_if(answers_.begin(), answers_.end(),
                                     [&](const Note& note) { return note.rank == rank; });
    if (std::count(lost.begin(), lost.end(), rank)) {
      where = "has died";
    } else if (answer == answers_.end()) {
      where = "does not answer: it is stopped, gone, or cut off";
    } else if (answer->lanes[lane].begun < call) {
      const Note::Lane& last = answer->lanes[lane];
      where = last.begun == 0 ? "has made no call yet"
                              : std::string(last.begun > last.ended ? "is in" : "has been out of") +
                                    " its call " + std::to_string(last.begun) + ", " + last.call +
                                    ", for " + Seconds(last.seconds);
    } else {
      continue;
    }
    text +=
        (text.empty() ? "Missing: rank " : "; rank ") + std::to_string(rank) + ", which " + where;
  }
  if (text.empty()) return "All ranks are in it, so the messages between them do not get on.";
  return text + ".";
}

void Watchdog::LookForTheDead(Transport& transport) {
  const std::vector<int> lost = transport.LostUnnoticed();
  if (lost.empty()) {
    dead_since_ = 0;
    return;
  }
  if (dead_since_ == 0) dead_since_ = Now();
  const double patience = transport.fault_tolerant() ? kTellsAll : kEndsAll;
  if (Now() - dead_since_ < patience + (IsFirst(transport) ? 0 : 2 * kAnswer)) return;
  End("error: the process of " + NameRanks(lost) + " has died, and the launcher has not " +
      (transport.fault_tolerant()
           ? "told MPI, as where a process exits with a status that is not 0."
           : "ended the job."));
}

void Watchdog::End(const std::string& why) {
  Say(why);
  // MPI's way of ending may itself wait for something.
  std::thread([] {
    std::this_thread::sleep_for(std::chrono::seconds(5));
    std::_Exit(EXIT_FAILURE);
  }).detach();
  end_job_();
  std::_Exit(EXIT_FAILURE);
}

}  // namespace adasum

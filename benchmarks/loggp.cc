// What messages between two ranks cost, in the terms of the LogGP model; for scale_model.py.
//
//   cmake --build build/cmake-* --target loggp_benchmark
//   mpirun -np 2 build/cmake-*/loggp_benchmark
//
// Rank 0 prints one line of JSON, medians in seconds: for each number of bytes half of a round
// trip, and an exchange, in which both ranks send and receive as much; `o_send` and `o_receive`,
// for how long a rank is busy with a small message; `g`, the time from one to the next in a row of
// them.

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr int kSmall = 8;
constexpr int kInARow = 64;

int rank, nghr;

void Send(const std::vector<char>& data, int64_t bytes) {
  MPI_Send(data.data(), static_cast<int>(bytes), MPI_BYTE, nghr, 0, MPI_COMM_WORLD);
}

void Receive(std::vector<char>& data, int64_t bytes) {
  MPI_Recv(data.data(), static_cast<int>(bytes), MPI_BYTE, nghr, 0, MPI_COMM_WORLD,
           MPI_STATUS_IGNORE);
}

void WaitFor(double seconds) {
  const double begin = MPI_Wtime();
  while (MPI_Wtime() - begin < seconds) continue;
}

double Seconds(const std::function<void()>& run) {
  const double begin = MPI_Wtime();
  run();
  return MPI_Wtime() - begin;
}

double Median(std::vector<double> seconds) {
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

// `once` returns what is to be counted of one time that it is done.
double Repeat(int times, const std::function<double()>& once) {
  std::vector<double> seconds;
  for (int i = -times / 10 - 1; i < times; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double counted = once();
    if (i >= 0) seconds.push_back(counted);
  }
  return Median(seconds);
}

struct Buffers {
  std::vector<char> out, in;
};

double HalfRoundTrip(Buffers& buffers, int64_t bytes, int times) {
  return Repeat(times,
                [&] {
                  return Seconds([&] {
                    if (rank == 0) Send(buffers.out, bytes);
                    Receive(buffers.in, bytes);
                    if (rank == 1) Send(buffers.out, bytes);
                  });
                }) /
         2;
}

double Exchange(Buffers& buffers, int64_t bytes, int times) {
  const int count = static_cast<int>(bytes);
  return Repeat(times, [&] {
    return Seconds([&] {
      MPI_Sendrecv(buffers.out.data(), count, MPI_BYTE, nghr, 0, buffers.in.data(), count, MPI_BYTE,
                   nghr, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    });
  });
}

// The sender does not wait for the receiver, who comes when the message is there.
double Overhead(Buffers& buffers, bool of_sender) {
  const double seconds = Repeat(2000, [&] {
    if (rank == 1) WaitFor(20e-6);
    return Seconds([&] { rank == 0 ? Send(buffers.out, kSmall) : Receive(buffers.in, kSmall); });
  });
  double of_ranks[2];
  MPI_Gather(&seconds, 1, MPI_DOUBLE, of_ranks, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  return of_ranks[of_sender ? 0 : 1];
}

double Gap(Buffers& buffers) {
  const auto row = [&](int messages) {
    return Repeat(1000, [&] {
      return Seconds([&] {
        for (int i = 0; i < messages; ++i) {
          rank == 0 ? Send(buffers.out, kSmall) : Receive(buffers.in, kSmall);
        }
        rank == 0 ? Receive(buffers.in, kSmall) : Send(buffers.out, kSmall);
      });
    });
  };
  const double one = row(1);
  return (row(kInARow) - one) / (kInARow - 1);
}

std::string List(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) {
    char number[32];
    std::snprintf(number, sizeof(number), "%s%.9g", text.empty() ? "" : ", ", value);
    text += number;
  }
  return "[" + text + "]";
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0, size = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != 2) {
    std::fprintf(stderr, "loggp_benchmark: 2 ranks are needed, not %d\n", size);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  nghr = 1 - rank;
  constexpr int64_t kLargest = 16 << 20;
  Buffers buffers{std::vector<char>(kLargest, 1), std::vector<char>(kLargest, 2)};
  std::vector<double> sizes, half_round_trips, exchanges;
  for (int64_t bytes = kSmall; bytes <= kLargest; bytes *= 2) {
    const int times = static_cast<int>(std::clamp<int64_t>((64 << 20) / bytes, 15, 2000));
    sizes.push_back(static_cast<double>(bytes));
    half_round_trips.push_back(HalfRoundTrip(buffers, bytes, times));
    exchanges.push_back(Exchange(buffers, bytes, times));
  }
  const double o_send = Overhead(buffers, true), o_receive = Overhead(buffers, false);
  const double g = Gap(buffers);
  if (rank == 0) {
    std::printf(
        "{\"bytes\": %s, \"half_round_trips\": %s, \"exchanges\": %s, \"o_send\": %.9g, "
        "\"o_receive\": %.9g, \"g\": %.9g}\n",
        List(sizes).c_str(), List(half_round_trips).c_str(), List(exchanges).c_str(), o_send,
        o_receive, g);
  }
  MPI_Finalize();
  return 0;
}

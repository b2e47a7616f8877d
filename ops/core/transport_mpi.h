// Ranks as MPI processes.
#ifndef TF_ADASUM_OPS_CORE_TRANSPORT_MPI_H_
#define TF_ADASUM_OPS_CORE_TRANSPORT_MPI_H_

#include <memory>
#include <string>
#include <vector>

#include "lives.h"
#include "transport.h"

namespace adasum {

// Owns a duplicate of the communicator that it was made from, so its messages never meet the
// user's. The thread that makes it and those that use it may differ, but only one may use it at a
// time.
class MpiTransport : public Transport {
 public:
  // communicator points to the user's MPI_Comm, or is null for MPI_COMM_WORLD. MPI is initialised
  // where it is not yet. Throws Error(kState) after MPI_Finalize or where MPI's thread level is too
  // low.
  static std::unique_ptr<MpiTransport> Create(const void* communicator);
  // Another one between the same ranks, for a thread of its own. Collective. Throws Error(kState)
  // where MPI does not allow several threads.
  std::unique_ptr<MpiTransport> Duplicate() const;
  // One between the ranks that give the same part, in the same order; null where this rank gives a
  // negative one. Collective over all.
  std::unique_ptr<MpiTransport> Part(int part) const;
  ~MpiTransport() override;

  bool shares_memory() const override { return shares_memory_; }
  bool reads_device(const std::string& kind) const override;
  HostMemory* host_memory() override { return host_memory_.get(); }
  void SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                   int64_t receive_bytes, int from, Stream stream) override;
  int64_t SendReceiveUpTo(const void* send, int64_t send_bytes, int to, void* receive,
                          int64_t capacity, int from) override;
  std::unique_ptr<Transfer> Start(const void* send, int64_t send_bytes, int to, void* receive,
                                  int64_t receive_bytes, int from, int64_t piece_bytes,
                                  Stream stream) override;

  bool fault_tolerant() const override;
  void Revoke() override;
  Vote AskLiving(uint32_t flags) override;
  std::unique_ptr<Transport> Shrink(std::vector<int>* lost) override;
  std::vector<int> KnownLost() override;
  std::vector<int> LostUnnoticed() override;
  void SendNote(const void* note, int64_t bytes, int to) override;
  bool TakeNote(void* note, int64_t bytes) override;

 private:
  struct Handle;  // keeps mpi.h out of this header
  MpiTransport(int rank, Hosts hosts, std::vector<Process> processes,
               std::unique_ptr<Handle> handle);
  void CheckOthers();
  void ShareMemory();
  std::vector<int> KnownToMpi() const;

  const std::vector<Process> processes_;  // of all ranks, on their hosts
  const std::unique_ptr<Handle> handle_;
  const std::unique_ptr<Lives> lives_;
  bool shares_memory_ = false;
  std::unique_ptr<HostMemory> host_memory_;
};

// Whether MPI sends from and receives into the memory of GPUs.
bool MpiReadsCuda();

// Whether MPI goes on after a process has died: `mpirun --with-ft ulfm`.
bool MpiIsFaultTolerant();

// The number of processes that were started together; 1 where MPI is not initialised.
int MpiJobSize();
// Ends all of them. Also those outside of the user's communicator: they would wait for this one.
[[noreturn]] void AbortMpi(int exit_code);

// Finalizes MPI if Create was what initialised it; otherwise MPI belongs to somebody else. Not
// where MPI is fault tolerant: it may wait for the dead, and the launcher does without.
void FinalizeMpi();

// Has MPI_Finalize call the action first, while MPI can still be used, whoever finalizes MPI. To be
// called once, after MPI is initialised.
void BeforeMpiEnds(void (*action)());

// "Open MPI", "MPICH" or "Intel MPI", from the headers of the build.
std::string MpiBuiltFor();
// The first line of what the library in this process says of itself. Works before MPI is
// initialised.
std::string MpiRunning();
// The thread level that MPI gave, as its constant's name without "MPI_THREAD_".
std::string MpiThreadLevel();

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_TRANSPORT_MPI_H_

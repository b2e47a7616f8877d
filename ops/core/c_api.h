/* The core as a flat C interface: what the TensorFlow ops, Python's ctypes and other languages link
 * against.
 *
 * Every function that can fail returns 0 or one of AdasumStatus; adasum_last_error() then gives the
 * text, for the calling thread. Arguments that cannot be right are ADASUM_INVALID_ARGUMENT on the
 * rank that passes them; but a pointer that is not null must lead to what the call asks for.
 * Collectives may be called from any thread; within one process they run one at a time. All counts,
 * dimensions and byte numbers are 64-bit. */
#ifndef TF_ADASUM_OPS_CORE_C_API_H_
#define TF_ADASUM_OPS_CORE_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ADASUM_EXPORT __attribute__((visibility("default")))

typedef enum {
  ADASUM_OK = 0,
  ADASUM_INVALID_ARGUMENT = 1, /* wrong whatever the other ranks pass */
  ADASUM_DISAGREEMENT = 2,     /* the ranks pass different things; returned on every rank */
  ADASUM_TRANSPORT = 3,        /* the message layer failed */
  ADASUM_STATE = 4,            /* not initialised, or MPI is already finalized */
  ADASUM_INTERNAL = 5,
  ADASUM_RANK_LOST = 6 /* a rank has died, and the others do not go on without it */
} AdasumStatus;

typedef enum {
  ADASUM_OTHER = 0, /* moved as bytes by broadcast and allgather, refused by allreduce */
  ADASUM_FLOAT16 = 1,
  ADASUM_BFLOAT16 = 2,
  ADASUM_FLOAT32 = 3,
  ADASUM_FLOAT64 = 4
} AdasumDType;

typedef enum { ADASUM_OP_ADASUM = 0, ADASUM_OP_SUM = 1, ADASUM_OP_AVERAGE = 2 } AdasumOp;

typedef enum {
  ADASUM_RVH = 0,             /* the tree of the paper's Algorithm 1 over all ranks */
  ADASUM_RING = 1,            /* one rank after the other, the paper's section 4.2.3 */
  ADASUM_HIERARCHICAL = 2,    /* the mean of each host's ranks, then the tree over the hosts */
  ADASUM_HIERARCHICAL_SUM = 3 /* the sum of each host's ranks, then the tree over the hosts */
} AdasumAlgorithm;

typedef enum {
  ADASUM_HOST = 0,
  ADASUM_CUDA = 1,    /* where this library was built with CUDA */
  ADASUM_EMULATED = 2 /* for tests: memory that the host's code cannot touch */
} AdasumMemory;

/* Where tensors are, if not in the host's memory. */
typedef struct {
  int32_t memory; /* AdasumMemory */
  /* A cudaStream_t of the calling thread's current device: what it holds comes first, and what is
   * put there afterwards comes last. */
  void* stream;
  /* How to get more of the device's memory, which is kept until adasum_shutdown; both null for the
   * device's own way. allocate returns null where there is none left. */
  void* (*allocate)(int64_t bytes, void* context);
  void (*free)(void* memory, void* context);
  void* context;
} AdasumDevice;

/* How tensors are reduced. Everything must be equal on all ranks, but for device's stream and
 * functions. */
typedef struct {
  int32_t op;        /* AdasumOp */
  int32_t algorithm; /* AdasumAlgorithm */
  /* Tensors are reduced in buckets of at most so many bytes, or of one tensor; two are in work at a
   * time. -1: TF_ADASUM_FUSION_THRESHOLD or HOROVOD_FUSION_THRESHOLD in the environment, or else a
   * size that was measured to be good. */
  int64_t fusion_threshold;
  const char* name;           /* shown in errors; may be empty or null */
  const AdasumDevice* device; /* where all tensors of the call are; null for the host */
} AdasumReduceOptions;

/* A dense tensor, row-major; in the host's memory at any address. */
typedef struct {
  const void* data;
  const int64_t* dims;
  int64_t item_bytes;
  const char* dtype_name; /* for error texts; must be equal on all ranks */
  const char* name;       /* the same; may be null */
  int32_t rank;           /* number of dims */
  int32_t dtype;          /* AdasumDType */
} AdasumTensor;

typedef struct {
  int32_t rank, size;
  int32_t local_rank, local_size; /* among the ranks of this host */
  int32_t cross_rank, cross_size; /* among the ranks of all hosts with this local rank */
} AdasumTopology;

/* comm: pointer to an MPI_Comm, which is duplicated, or null for MPI_COMM_WORLD. Collective over
 * comm. Says which ranks have not come after the seconds of
 * TF_ADASUM_STALL_WARNING_SECONDS (60), and ends the process after those of
 * TF_ADASUM_START_ABORT_SECONDS (600; 0 for never). Over collectives watches a thread, see
 * TF_ADASUM_STALL_ABORT_SECONDS (1800). */
ADASUM_EXPORT int adasum_init(const void* comm);
/* Collective: every rank must come, or all get ADASUM_DISAGREEMENT. What this process held is given
 * back in either case. MPI stays, so that adasum_init may be called again. */
ADASUM_EXPORT int adasum_shutdown(void);
/* The process's last call: finalizes MPI if adasum_init had initialised it. */
ADASUM_EXPORT void adasum_finalize(void);
ADASUM_EXPORT int adasum_is_initialized(void);
ADASUM_EXPORT int adasum_topology(AdasumTopology* topology);
/* From now on, until adasum_shutdown, the ranks that live go on without those that die: what a
 * collective returns it returns on all that live, and it was done without the dead; ranks are
 * renumbered, and adasum_topology tells. Where a rank dies in adasum_sync before anything is
 * written, the others' changes are reduced; later, all go back to the starts. To be called on all
 * ranks before the same collective. ADASUM_STATE where MPI cannot do that. */
ADASUM_EXPORT int adasum_go_on_without_the_dead(void);
/* Whether MPI can do that: 0 or 1. */
ADASUM_EXPORT int adasum_is_fault_tolerant(void);
/* How often ranks were lost since adasum_init. */
ADASUM_EXPORT int64_t adasum_shrinkings(void);
typedef struct {
  int32_t old_rank, old_size; /* of this process, before */
  int32_t new_rank, new_size;
  int32_t lost_count;
} AdasumShrinking;
/* The index-th time. lost gets the first max_lost of the lost ranks, by their numbers before. */
ADASUM_EXPORT int adasum_shrinking(int64_t index, AdasumShrinking* shrinking, int32_t* lost,
                                   int32_t max_lost);
/* For tests: calls hook with the name of each place that a thread comes to in a collective; null
 * for none. */
ADASUM_EXPORT void adasum_set_fault_hook(void (*hook)(const char* place));
/* The number of processes in MPI_COMM_WORLD, whatever the communicator. */
ADASUM_EXPORT int adasum_job_size(void);
/* This process is about to end because of an error: it may tell so some time before it does. */
ADASUM_EXPORT void adasum_is_ending(void);
/* Ends every process of MPI_COMM_WORLD; does not return. */
ADASUM_EXPORT void adasum_abort(int exit_code);
/* Ends this process; does not return. Where others go on without the dead, by a signal, since of a
 * process that ends by itself Open MPI's launcher tells them nothing. Where all others are ending
 * too, with status 1, so that the job fails. */
ADASUM_EXPORT void adasum_die_alone(void);
ADASUM_EXPORT const char* adasum_last_error(void);

/* "Open MPI" or "MPICH": what this library was compiled for. */
ADASUM_EXPORT const char* adasum_mpi_built_for(void);
/* The first line of MPI_Get_library_version of what is loaded. */
ADASUM_EXPORT const char* adasum_mpi_running(void);
ADASUM_EXPORT const char* adasum_mpi_thread_level(void);
/* The instruction set of the kernels: "avx512", "avx2" or "plain". TF_ADASUM_SIMD in the
 * environment may name a lower one than the best. */
ADASUM_EXPORT const char* adasum_simd(void);
/* Whether the ranks of a host read each other's memory, rather than to send each other messages: 0
 * or 1; -1 before adasum_init. TF_ADASUM_SHARED_MEMORY=0 in the environment makes them send. */
ADASUM_EXPORT int adasum_shares_memory(void);

/* Reduces each tensor over the ranks, each by itself. outputs[i] has the size of inputs[i] and may
 * be the same memory. */
ADASUM_EXPORT int adasum_allreduce(const AdasumTensor* inputs, void* const* outputs, int64_t count,
                                   const AdasumReduceOptions* options);

/* What a sync reads and writes: new_* may be the memory that was read. */
typedef struct {
  int64_t count;              /* of the following four */
  const AdasumTensor* values; /* what the rank has trained */
  const void* const* starts;  /* what all ranks held at the last sync; equal on all ranks */
  void* const* new_values;
  void* const* new_starts;    /* may be null unless flush, or with a flight */
  int64_t state_count;        /* of the following two */
  const AdasumTensor* states; /* averaged over the ranks */
  void* const* new_states;
} AdasumSyncTensors;

typedef struct {
  AdasumReduceOptions reduce;
  /* Whether this rank took steps. If not, it has a change to bring only if that is not zero. */
  int32_t pending;
  /* Whether to go on, with changes of zero, until every rank flushes: for a rank that has come to
   * an end of its steps while others may have more. */
  int32_t flush;
  /* A change that is not finite is an error on every rank, or counts as zero. The latter is an
   * error too where skips_in_a_row, the number of this rank's last syncs that were so, is 2 or
   * more. */
  int32_t raise_nonfinite;
  int64_t skips_in_a_row;
  /* -1, or any number that tells apart what this process syncs beside training, and that need not
   * be equal on all ranks: then the call hands over the change, and returns. The next call with
   * that number waits until it is reduced and brings the result: new_starts is start + result, and
   * new_values is value + (result - the change that was handed over). With flush, nothing is left
   * under way. No states, and new_starts is not null. */
  int64_t flight;
  /* ADASUM_FLOAT16 or ADASUM_BFLOAT16: float32 changes are sent as that, times 2^wire_exponent,
   * which must be equal on all ranks; ADASUM_OTHER (0): all as they are. Where a change does not
   * fit, it is reduced again with an exponent that is lower by one. residuals: for each value,
   * float32 memory of its size that holds what rounding dropped the last time, zeros at first; or
   * null. Null where nothing is kept. Not with a flight. */
  int32_t wire_dtype;
  int64_t wire_exponent;
  int64_t wire_good_syncs; /* what the last sync's result said, 0 at first */
  float* const* residuals;
} AdasumSyncOptions;

typedef struct {
  int64_t syncs;     /* reductions done; 0 where no rank had a change */
  int32_t skipped;   /* this rank's change was not finite */
  int32_t identical; /* all ranks seem to have had the same change */
  /* For the next sync: the exponent is lower after one that did not fit, and for float16 higher by
   * one after each 200 that did. */
  int64_t wire_exponent, wire_good_syncs;
} AdasumSyncResult;

/* Brings ranks that trained on their own together: value - start is reduced, and start + result is
 * written to new_values and new_starts; not where ADASUM_INVALID_ARGUMENT or ADASUM_DISAGREEMENT is
 * returned. orthogonality, which may be null, is set for each of count tensors to
 * |Adasum(g1, ..., gn)|^2 / sum |gi|^2 (the paper's section 3.6), NaN where that is not known. */
ADASUM_EXPORT int adasum_sync(const AdasumSyncTensors* tensors, const AdasumSyncOptions* options,
                              AdasumSyncResult* result, double* orthogonality);

/* For an optimizer whose state is divided among the ranks of a host (the paper's section 4.3): each
 * owns some tensors. The same number of ranks of each host, its lanes, are owners, and a tensor has
 * the same lane on every host. The first call of any of the functions that follow, but for
 * adasum_partition, is collective over all ranks. Tensors are in the host's memory. */
typedef struct {
  int32_t lanes; /* of each host */
  int32_t lane;  /* this rank's; `lanes` or more where it owns nothing */
} AdasumPartition;
ADASUM_EXPORT int adasum_partition(AdasumPartition* partition);
/* Each number's sum over the host's ranks. */
ADASUM_EXPORT int adasum_host_sum(const double* numbers, double* sums, int64_t count,
                                  const char* name);
/* The sum over the host's ranks of each tensor, for its owner alone. owner_of[i]: tensor i's lane.
 * Of outputs those of other owners' tensors are not looked at. fusion_threshold: as in
 * AdasumReduceOptions. */
ADASUM_EXPORT int adasum_reduce_to_owners(const AdasumTensor* tensors, void* const* outputs,
                                          const int32_t* owner_of, int64_t count,
                                          int64_t fusion_threshold, const char* name);
/* Copies what their owners have to the host's ranks. outputs[i] may be tensor i's memory. */
ADASUM_EXPORT int adasum_share_from_owners(const AdasumTensor* tensors, void* const* outputs,
                                           const int32_t* owner_of, int64_t count,
                                           int64_t fusion_threshold, const char* name);
/* adasum_sync of hosts rather than ranks, each as what its ranks are together. Of starts and
 * new_starts, of which neither may be null, those of other owners' tensors are not looked at. No
 * states, flight or wire. */
ADASUM_EXPORT int adasum_partition_sync(const AdasumSyncTensors* tensors, const int32_t* owner_of,
                                        const AdasumSyncOptions* options, AdasumSyncResult* result,
                                        double* orthogonality);

/* Copies root's tensors to every rank, in place. changed, which may be null, is set to 1 if any bit
 * of this rank's tensors was different. */
ADASUM_EXPORT int adasum_broadcast(const AdasumTensor* tensors, void* const* outputs, int64_t count,
                                   int root, const char* name, int* changed,
                                   const AdasumDevice* device);

/* Puts the ranks' tensors one after the other along the first dimension, in which alone they may
 * differ. allocate is called once, with that dimension's sum, and returns where the result goes, or
 * null to give up. */
typedef void* (*AdasumAllocate)(int64_t first_dimension, void* context);
ADASUM_EXPORT int adasum_allgather(const AdasumTensor* input, AdasumAllocate allocate,
                                   void* context, const char* name, const AdasumDevice* device);

ADASUM_EXPORT int adasum_barrier(const char* name);

/* adasum_allreduce with ranks that are threads of this process. The ranks' tensors follow one
 * another in inputs and outputs, counts[r] of them for rank r. host_of[r] is rank r's pretended
 * host; null for one host. Needs no adasum_init. With ADASUM_EMULATED for a device, tensors are
 * copied there and back. */
ADASUM_EXPORT int adasum_simulate(int ranks, const int32_t* host_of, const AdasumTensor* inputs,
                                  void* const* outputs, const int64_t* counts,
                                  const AdasumReduceOptions* options);
/* adasum_sync with ranks that are threads of this process: tensors, options and results have one
 * element for each rank, whose memory is its own; host_of as above. No flight, no device.
 * orthogonality, which may be null, is that of the first rank's tensors, the same for all.
 * sent_bytes, which may be null, is set to the bytes that all ranks together have sent in messages:
 * those of one host hardly any unless TF_ADASUM_SHARED_MEMORY=0 in the environment makes them. */
ADASUM_EXPORT int adasum_simulate_sync(int ranks, const int32_t* host_of,
                                       const AdasumSyncTensors* tensors,
                                       const AdasumSyncOptions* options, AdasumSyncResult* results,
                                       double* orthogonality, int64_t* sent_bytes);

/* Memory of a device, for those who have no other way to it; and bytes from there to the host's
 * memory or, with to_device, back. Done when they return. */
ADASUM_EXPORT int adasum_device_allocate(const AdasumDevice* device, int64_t bytes, void** memory);
ADASUM_EXPORT int adasum_device_free(const AdasumDevice* device, void* memory);
ADASUM_EXPORT int adasum_device_copy(const AdasumDevice* device, void* to, const void* from,
                                     int64_t bytes, int32_t to_device);
/* The bytes that this process has sent in messages to other ranks. */
ADASUM_EXPORT int64_t adasum_sent_bytes(void);
/* The bytes that this process has copied between the host and devices, both ways: also tables, and
 * what kernels have found. */
ADASUM_EXPORT int64_t adasum_device_copied_bytes(void);
/* Whether this library was built with CUDA: 0 or 1; and how many GPUs it finds here. */
ADASUM_EXPORT int adasum_has_cuda(void);
ADASUM_EXPORT int adasum_cuda_devices(void);
/* Whether the MPI that is loaded says of itself that it reads and writes memory of GPUs: 0 or 1. */
ADASUM_EXPORT int adasum_mpi_reads_cuda(void);
/* Why NCCL cannot be used; empty where it is found. */
ADASUM_EXPORT const char* adasum_nccl_problem(void);

#ifdef __cplusplus
}
#endif

#endif /* TF_ADASUM_OPS_CORE_C_API_H_ */

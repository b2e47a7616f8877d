// The launcher that has started this process.
#ifndef TF_ADASUM_OPS_CORE_LAUNCHER_H_
#define TF_ADASUM_OPS_CORE_LAUNCHER_H_

namespace adasum {

// For a process that ends the job. mpirun waits for its daemons on other hosts to confirm the end,
// by default for a quarter of an hour where a host cannot be reached, and a batch job with it. So
// another process, which this makes, ends it if it is still there after a while. Does nothing where
// no launcher of MPI's is among this process's parents.
void EndLauncherIfItStays();

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_LAUNCHER_H_

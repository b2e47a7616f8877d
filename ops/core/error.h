// The one exception type of the core. It never crosses the C API: c_api.cc turns it into a code and
// a text.
#ifndef TF_ADASUM_OPS_CORE_ERROR_H_
#define TF_ADASUM_OPS_CORE_ERROR_H_

#include <stdexcept>
#include <string>

namespace adasum {

enum class ErrorKind {
  kInvalidArgument = 1,  // the caller's values are wrong, whatever the other ranks pass
  kDisagreement = 2,     // the ranks pass different things; raised on every rank
  kTransport = 3,        // the message layer failed
  kState = 4,            // not initialised, or already shut down
  kInternal = 5,
  kRankLost = 6,  // a rank has died, or another one has given up because one has
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_ERROR_H_

// The signatures of the ops of a partitioned optimizer (the paper's section 4.3); see ops.cc.

#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status SameShape(InferenceContext* c) {
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

// The shapes of the inputs that this rank owns.
absl::Status OwnedShapes(InferenceContext* c) {
  std::vector<int> owners;
  int lane = 0, at = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("owner_of", &owners));
  TF_RETURN_IF_ERROR(c->GetAttr("lane", &lane));
  for (size_t i = 0; i < owners.size() && at < c->num_outputs(); ++i) {
    if (owners[i] == lane) c->set_output(at++, c->input(static_cast<int>(i)));
  }
  if (at == c->num_outputs()) return absl::OkStatus();
  return absl::InvalidArgumentError("`Owned` must have a dtype for each tensor of this lane");
}

absl::Status PartitionSyncShapes(InferenceContext* c) {
  int64_t variables = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &variables));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  c->set_output(2, c->Vector(variables));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("AdasumHostSum")
    .Input("numbers: double")
    .Input("order: K * resource")
    .Output("sums: double")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(SameShape)
    .Doc("Each number's sum over the ranks of this host.");

REGISTER_OP("AdasumReduceToOwners")
    .Input("tensors: T")
    .Input("order: K * resource")
    .Output("owned: Owned")
    .Attr("T: list({half, bfloat16, float, double}) >= 1")
    .Attr("Owned: list({half, bfloat16, float, double}) >= 0")
    .Attr("owner_of: list(int)")
    .Attr("lane: int")
    .Attr("fusion_threshold: int = -1")
    .Attr("names: list(string) = []")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(OwnedShapes)
    .Doc(R"doc(
The sums over this host's ranks, of those tensors that this rank owns.

owner_of: the lane of each tensor's owner; equal on all ranks.
lane: this rank's.
)doc");

REGISTER_OP("AdasumShareFromOwners")
    .Input("variables: N * resource")
    .Input("order: K * resource")
    .Attr("N: int >= 1")
    .Attr("owner_of: list(int)")
    .Attr("fusion_threshold: int = -1")
    .Attr("names: list(string) = []")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Assigns what their owners have to the variables of this host's ranks.");

REGISTER_OP("AdasumPartitionSync")
    .Input("variables: N * resource")
    .Input("starts: M * resource")
    .Input("pending: bool")
    .Input("skips_in_a_row: int64")
    .Input("order: K * resource")
    .Output("syncs: int64")
    .Output("skipped: bool")
    .Output("orthogonality: float")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("owner_of: list(int)")
    .Attr("lane: int")
    .Attr("op: {'adasum', 'sum', 'average'}")
    .Attr("algorithm: {'rvh', 'ring', 'hierarchical', 'hierarchical_sum'} = 'rvh'")
    .Attr("fusion_threshold: int = -1")
    .Attr("flush: bool = false")
    .Attr("nonfinite: {'skip', 'raise'} = 'skip'")
    .Attr("names: list(string) = []")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(PartitionSyncShapes)
    .Doc(R"doc(
AdasumSync of hosts: each owner reduces what it owns with the owners on other hosts.

starts: of the variables that this rank owns; assigned too.
)doc");

// The ops' signatures and shape functions. All are stateful: a collective must run as often, and in
// the same order, as the program says, whatever a graph optimizer thinks of its inputs.
//
// For the order each op also takes a variable, `order`, of which tf.function believes that every op
// writes it. It would keep stateful ops that take no variables in order by itself, but not among
// those that take some, and in what XLA compiles not at all. The CPU kernels do not look at it; for
// XLA, see xla_kernels.cc.

#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status SameShapes(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
  return absl::OkStatus();
}

absl::Status SyncShapes(InferenceContext* c) {
  int64_t variables = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &variables));
  for (const char* name : {"pending", "skips_in_a_row"}) {
    std::vector<ShapeHandle> input;
    TF_RETURN_IF_ERROR(c->input(name, &input));
    TF_RETURN_IF_ERROR(c->WithRank(input[0], 0, &input[0]));
  }
  std::vector<ShapeHandle> scale;
  TF_RETURN_IF_ERROR(c->input("wire_scale", &scale));
  TF_RETURN_IF_ERROR(c->Merge(scale[0], c->Vector(2), &scale[0]));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  c->set_output(2, c->Vector(variables));
  c->set_output(3, c->Vector(2));
  return absl::OkStatus();
}

// The first dimension is the sum of the ranks', which only they know.
absl::Status UnknownFirstDimension(InferenceContext* c) {
  ShapeHandle gathered;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &gathered));
  TF_RETURN_IF_ERROR(c->ReplaceDim(gathered, 0, c->UnknownDim(), &gathered));
  c->set_output(0, gathered);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("AdasumAllreduce")
    .Input("tensors: T")
    .Input("order: K * resource")
    .Output("reduced: T")
    .Attr("T: list({half, bfloat16, float, double}) >= 0")
    .Attr("op: {'adasum', 'sum', 'average'}")
    .Attr("algorithm: {'rvh', 'ring', 'hierarchical', 'hierarchical_sum'} = 'rvh'")
    .Attr("fusion_threshold: int = -1")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(SameShapes)
    .Doc(R"doc(
Reduces each tensor by itself over all ranks, in fused exchanges.

fusion_threshold: bytes of a bucket of tensors; -1 for the default.
call_name: must be equal on all ranks; shown in errors.
)doc");

REGISTER_OP("AdasumSync")
    .Input("variables: N * resource")
    .Input("starts: N * resource")
    .Input("states: M * resource")
    .Input("residuals: R * resource")
    .Input("pending: bool")
    .Input("skips_in_a_row: int64")
    .Input("wire_scale: int64")
    .Input("order: K * resource")
    .Output("syncs: int64")
    .Output("skipped: bool")
    .Output("orthogonality: float")
    .Output("next_wire_scale: int64")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("op: {'adasum', 'sum', 'average'}")
    .Attr("algorithm: {'rvh', 'ring', 'hierarchical', 'hierarchical_sum'} = 'rvh'")
    .Attr("fusion_threshold: int = -1")
    .Attr("flush: bool = false")
    .Attr("flight: int = -1")
    .Attr("nonfinite: {'skip', 'raise'} = 'skip'")
    .Attr("wire_dtype: {'', 'float16', 'bfloat16'} = ''")
    .Attr("R: int >= 0")
    .Attr("names: list(string) = []")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(SyncShapes)
    .Doc(R"doc(
Reduces variable - start over all ranks and assigns start + result to variable.

names: of the variables, or none; must be equal on all ranks.
variables: what each rank has trained on its own.
starts: what all ranks held at the last sync; of the same shapes and dtypes. Assigned too with flush,
  or with a flight.
states: averaged over all ranks.
pending: whether this rank took steps; if not, it has a change to bring only if that is not zero.
skips_in_a_row: how many of this rank's last syncs were skipped.
flush: go on, with changes of zero, until every rank flushes.
flight: a number of the optimizer's own if its syncs run beside training, or -1: the change is handed
  over, and what is assigned is what has become of the one that was handed over the last time.
nonfinite: what becomes of a change that is not finite: an error on all ranks, or it counts as zero.
wire_dtype: that of what float32 changes are sent as, times a power of two; '' for as they are.
wire_scale: the exponent of that, and how many syncs there were since it changed; equal on all ranks.
residuals: none, or for each variable one like it, for what rounding drops; zeros at first. Those of
  variables that are not float32 are not looked at.
syncs: how many reductions were done; 0 where no rank had a change.
skipped: whether this rank's change was not finite.
next_wire_scale: for the next sync.
orthogonality: for each variable |Adasum(g1, ..., gn)|^2 / sum |gi|^2; NaN where that is not known.
)doc");

REGISTER_OP("AdasumBroadcast")
    .Input("tensors: T")
    .Input("order: K * resource")
    .Output("of_root: T")
    .Attr("T: list(type) >= 1")
    .Attr("root_rank: int")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(SameShapes)
    .Doc("Gives every rank root_rank's tensors.");

REGISTER_OP("AdasumBroadcastVariables")
    .Input("variables: N * resource")
    .Input("order: K * resource")
    .Output("changed: bool")
    .Attr("N: int >= 0")
    .Attr("root_rank: int")
    .Attr("names: list(string) = []")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Assigns root_rank's values to the variables.

changed: whether any bit of this rank's values was different.
)doc");

REGISTER_OP("AdasumAllgather")
    .Input("tensor: T")
    .Input("order: K * resource")
    .Output("gathered: T")
    .Attr("T: type")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(UnknownFirstDimension)
    .Doc("Puts the ranks' tensors one after the other along the first dimension.");

REGISTER_OP("AdasumPlace")
    .Output("rank: int64")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc("This rank and the number of ranks now, which other ranks' deaths change. No collective.");

REGISTER_OP("AdasumBarrier")
    .Input("order: K * resource")
    .Attr("K: int >= 0")
    .Attr("call_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Returns when every rank has come.");

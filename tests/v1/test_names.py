"""Names, op types and what printing shows, as in TensorFlow 1."""

import re

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad import nn
from regrad.core.dims import Dim
from regrad.graph.graph import OpGraph
from regrad.shapes.infer import Spec
from regrad.v1.graph import regions, tf_names
from tests.helpers.rows import refused

pytestmark = pytest.mark.usefixtures("graph")


def const(name):
    return tf.constant(1.0, name=name).op.name


# -- unique names --------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [
    ("a a a", "a a_1 a_2"), ("a a_1 a", "a a_1 a_2"), ("a a a_1", "a a_1 a_1_1"),
    ("a a a A", "a a_1 a_2 A_3"), ("A a", "A a_1"), ("a/b a/b", "a/b a/b_1"),
])  # fmt: skip
def test_names_are_made_unique_in_a_graph(asked, given):
    assert [const(name) for name in asked.split()] == given.split()
    with tf.Graph().as_default():
        assert const("a") == "a"


def test_a_graph_that_is_open_cannot_be_reset(graph):
    refused(tf.reset_default_graph, AssertionError, "nested graphs")
    assert tf.get_default_graph() is graph


@pytest.mark.parametrize("name", ["a:0", "_a", "-a", "ä", "a b/c"])
def test_names_of_other_characters_are_refused(name):
    refused(lambda: tf.constant(1.0, name=name), ValueError)


@pytest.mark.parametrize("name", ["a.b", "a-b", "A_1", "a/b", "0a", ".a", "a\\b", "a>b"])
def test_names_of_these_characters_are_fine(name):
    assert const(name) == name


def test_scopes_nest_and_are_made_unique():
    with tf.name_scope("s") as s:
        with tf.name_scope("t") as t:
            names = [s, t, const("a"), const("a")]
        with tf.name_scope("t") as t:
            names += [t, const("a")]
        with tf.name_scope(None) as root:
            names += [root, const("a")]
    with tf.name_scope("other"), tf.name_scope(s):  # again, by its full name
        names += [const("a")]
    with tf.name_scope(None, "layer", [tf.constant(1.0)]) as default:
        names += [default]
    with tf.name_scope("mine", "layer") as mine:
        names += [mine]
    due = "s/ s/t/ s/t/a s/t/a_1 s/t_1/ s/t_1/a  a s/a layer/ mine/"
    assert names == due.split(" ")


def test_a_scope_is_left_by_an_exception():
    with pytest.raises(ZeroDivisionError), tf.name_scope("s"):
        raise ZeroDivisionError
    assert const("a") == "a"


# -- the graph by name ---------------------------------------------------------------------------


def test_the_graph_finds_what_it_has(graph):
    x = tf.constant(1.0, name="x")
    y = tf.negative(x, name="y")
    assert graph.get_tensor_by_name("y:0") is graph.as_graph_element("y:0") is y
    assert graph.get_operation_by_name("y") is y.op
    assert [op.name for op in graph.get_operations()] == ["x", "y"]
    assert y.graph is graph
    for find, name in [(graph.get_tensor_by_name, "z:0"), (graph.get_operation_by_name, "z")]:
        with pytest.raises(KeyError):
            find(name)


def test_outputs_are_numbered():
    first, second = tf.split(tf.constant([1.0, 2.0]), 2, name="halves")
    assert (first.name, second.name) == ("halves:0", "halves:1")
    assert (first.value_index, second.value_index) == (0, 1)
    assert first.op is second.op


def test_a_variable_is_four_ops(graph):
    with tf.name_scope("s"):
        v, w = tf.Variable(1.0), tf.Variable(1.0, name="w")
    ops = {op.name.partition("s/Variable")[2]: op.type for op in graph.get_operations()[:4]}
    assert ops == {"/initial_value": "Const", "": "VariableV2", "/Assign": "Assign",
                   "/read": "Identity"}  # fmt: skip
    assert (v.name, w.name, v.op.name) == ("s/Variable:0", "s/w:0", "s/Variable")


# -- printing ------------------------------------------------------------------------------------


def printed():
    x = tf.constant([1.0, 2.0], name="x")
    with tf.control_dependencies([tf.no_op(name="first")]):
        sign = tf.sign(x, name="s")
    return {"x": x, "s": sign, "op": sign.op, "first": sign.op.control_inputs[0],
            "Variable": tf.Variable(1.0), "i": tf.Variable([1], name="i"),
            "gradients": tf.gradients(sign * 2.0, x), "none": tf.gradients(tf.constant(1.0), x),
            "known": tf.constant([[1.0, 2.0]]).shape, "partly": tf.TensorShape([None, 3]),
            "unknown": tf.placeholder(tf.float32).shape, "one": x.shape}  # fmt: skip


DEFINITION = re.escape('name: "s"\nop: "Sign"\ninput: "x"\ninput: "^first"\n')
PRINTED = {  # patterns of str and repr
    "first": (re.escape('name: "first"\nop: "NoOp"\n'), "<tf.Operation 'first' type=NoOp>"),
    "op": (rf'{DEFINITION}[^ÿ]*key: "T"[^ÿ]*', "<tf.Operation 's' type=Sign>"),
    "Variable": (r"<tf.Variable 'Variable:0' shape=\(\) dtype=float32_ref>",) * 2,
    "i": (r"<tf.Variable 'i:0' shape=\(1,\) dtype=int32_ref>",) * 2,
    "gradients": (r"\[<tf.Tensor 'gradients/[^']*:0' shape=\(2,\) dtype=float32>\]",) * 2,
    "none": (r"\[None\]",) * 2, "known": (r"\(1, 2\)", ".*"), "partly": (r"\(\?, 3\)", ".*"),
    "unknown": ("<unknown>", ".*"), "one": (r"\(2,\)", ".*"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_what_printing_shows(name):
    value, (as_text, as_repr) = printed()[name], PRINTED[name]
    assert re.fullmatch(as_text, str(value))
    assert re.fullmatch(as_repr, repr(value))


# -- dtypes and shapes ---------------------------------------------------------------------------

DTYPES = "float16 float32 float64 int8 int32 int64 uint8 bool complex64"


@pytest.mark.parametrize("name", DTYPES.split())
def test_dtypes(name):
    dtype, kind = getattr(tf, name), np.dtype(name).type
    assert (repr(dtype), str(dtype)) == (f"tf.{name}", f"<dtype: '{name}'>")
    assert (dtype.name, dtype.base_dtype) == (name, dtype)
    assert dtype.is_floating == name.startswith("float")
    assert dtype.is_integer == ("int" in name)
    assert dtype == kind
    assert dtype != tf.string
    assert dtype.as_numpy_dtype is kind
    assert tf.as_dtype(name) is tf.as_dtype(np.dtype(name)) is dtype
    assert {dtype: 1}[dtype] == 1


def test_tensors_and_variables_tell_their_dtype():
    x, v = tf.constant(1.0), tf.Variable(1.0)
    assert x.dtype is v.dtype.base_dtype is tf.float32
    assert v.dtype.name == "float32_ref"
    assert (tf.constant("a").dtype, tf.constant(True).dtype) == (tf.string, tf.bool)


def test_shapes_and_sizes():
    known = tf.constant([[1.0, 2.0]]).shape
    partly, unknown = tf.placeholder(tf.float32, [None, 2]).get_shape(), tf.TensorShape(None)
    assert [s.ndims for s in (known, partly, unknown)] == [2, 2, None]
    assert (known.as_list(), partly.as_list()) == ([1, 2], [None, 2])
    assert known == [1, 2]
    refused(unknown.as_list, ValueError)
    assert (partly[0].value, partly[1].value, int(partly[1])) == (None, 2, 2)
    assert tf.zeros([partly[1], 3]).shape.as_list() == [2, 3]


def test_values_that_are_known_while_the_graph_is_built():
    x = tf.placeholder(tf.float32, [2, None, 3])
    found = tf.get_static_value(tf.constant([[1.5]])), tf.get_static_value(tf.shape(x)[::2] * 2)
    assert [(a.tolist(), a.dtype) for a in found] == [([[1.5]], np.float32), ([4, 6], np.int32)]
    assert tf.get_static_value([1, 2]).tolist() == [1, 2]
    unknown = [x, tf.shape(x), tf.Variable(1.0)]
    assert [tf.get_static_value(y, partial=True) for y in unknown] == [None] * 3
    assert tf.executing_eagerly() is False


# -- tensors as Python objects -------------------------------------------------------------------


def test_tensors_are_keys():
    x, y, v = tf.constant([1.0]), tf.constant([1.0]), tf.Variable(1.0)
    names = {x: "x", y: "y", v: "v", x.op: "op"}
    assert [names[key] for key in (x, y, v, x.op)] == ["x", "y", "v", "op"]
    assert len({x, y, x}) == 2


@pytest.mark.parametrize("use", [bool, len, iter, list, float, int, np.asarray,
                                 lambda x: 0.0 < x < 2.0], ids=lambda f: f.__name__)  # fmt: skip
def test_a_tensor_has_no_value_before_it_is_run(use):
    refused(lambda: use(tf.constant([1.0])), TypeError)


# -- types, inputs and attributes of ops -----------------------------------------------------------

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


def tensors():
    graph = OpGraph()

    new = lambda shape, dtype=F32: graph.placeholder(Spec(shape, np.dtype(dtype)))  # noqa: E731

    return {"x": new((2, 3)), "ids": new((2,), np.int32), "image": new((1, 4, 4, 2)),
            "filter": new((3, 3, 2, 5)), "square": new((2, 2)), "batch": new((None, 3)),
            "unranked": new(None)}  # fmt: skip


def node_of(y):
    return (y[0] if isinstance(y, tuple | list) else y)._data.node


def shown(node):
    """Inputs as numbers (own tensors) and `(name, value)`, values as lists."""
    return [
        item if isinstance(item, int) else (item[0], np.asarray(item[1]).tolist())
        for item in tf_names.inputs(node)
    ]


# op type -> (expression, inputs, attributes that are due)
CASES = [
    ("Sum", "rg.sum(x, axis=1)", [0, ("reduction_indices", 1)], {"keep_dims": False, "T": F32}),
    ("Sum", "rg.sum(x)", [0, ("reduction_indices", [0, 1])], {"Tidx": I32}),
    ("Mean", "rg.mean(x, axis=(0,), keepdims=True)", [0, ("reduction_indices", [0])],
     {"keep_dims": True}),
    ("Max", "rg.max(x, axis=-1)", [0, ("reduction_indices", -1)], {"keep_dims": False}),
    ("Prod", "rg.prod(x, axis=0)", [0, ("reduction_indices", 0)], {}),
    ("All", "rg.all(x, axis=0)", [0, ("reduction_indices", 0)], {"keep_dims": False}),
    ("ArgMax", "rg.argmax(x, axis=1)", [0, ("dimension", 1)], {"T": F32, "Tidx": I32}),
    ("MatMul", "rg.matmul(square, x, True)", [0, 1],
     {"transpose_a": True, "transpose_b": False, "T": F32}),
    ("Cast", "rg.astype(x, rg.int32)", [0], {"SrcT": F32, "DstT": I32, "Truncate": False}),
    ("AddN", "rg.add_n([x, x])", [0, 1], {"N": 2, "T": F32}),
    ("Pack", "rg.stack([x, x, x], axis=1)", [0, 1, 2], {"N": 3, "axis": 1, "T": F32}),
    ("Unpack", "rg.unstack(x, axis=1)", [0], {"num": 3, "axis": 1}),
    ("ConcatV2", "rg.concat([x, x], axis=1)", [0, 1, ("axis", 1)], {"N": 2, "Tidx": I32}),
    ("Split", "rg.split(x, 3, axis=1)", [("split_dim", 1), 0], {"num_split": 3}),
    ("Split", "rg.split(x, [1, 2], axis=1)", [0, ("size_splits", [1, 2]), ("split_dim", 1)],
     {"num_split": 2, "Tlen": I32}),
    ("Reshape", "rg.reshape(x, (3, 2))", [0, ("shape", [3, 2])], {"Tshape": I32}),
    ("ExpandDims", "rg.expand_dims(x, 1)", [0, ("dim", 1)], {"Tdim": I32}),
    ("Squeeze", "rg.squeeze(image, 0)", [0], {"squeeze_dims": [0]}),
    ("Squeeze", "rg.squeeze(image)", [0], {"squeeze_dims": []}),
    ("Transpose", "rg.permute_dims(x, (1, 0))", [0, ("perm", [1, 0])], {"Tperm": I32}),
    ("Transpose", "rg.permute_dims(image)", [0, ("perm", [3, 2, 1, 0])], {}),
    ("Tile", "rg.tile(x, (1, 2))", [0, ("multiples", [1, 2])], {"Tmultiples": I32}),
    ("BroadcastTo", "rg.broadcast_to(x, (5, 2, 3))", [0, ("shape", [5, 2, 3])], {"Tidx": I32}),
    ("ReverseV2", "rg.flip(x, axis=(1,))", [0, ("axis", [1])], {"Tidx": I32}),
    ("Roll", "rg.roll(x, 2, axis=1)", [0, ("shift", 2), ("axis", 1)], {"Taxis": I32}),
    ("PadV2", "rg.pad(x, [(1, 0), (0, 2)])", [0, ("paddings", [[1, 0], [0, 2]])],
     {"Tpaddings": I32}),
    ("PadV2", "rg.pad(x, [(1, 0), (0, 2)], constant_value=5)",
     [0, ("paddings", [[1, 0], [0, 2]]), ("constant_values", 5.0)], {"T": F32}),
    ("MirrorPad", "rg.pad(x, [(1, 0), (0, 2)], 'reflect')",
     [0, ("paddings", [[1, 0], [0, 2]])], {"mode": b"REFLECT"}),
    ("GatherV2", "rg.take(x, ids, axis=1)", [0, 1, ("axis", 1)],
     {"batch_dims": 0, "Tparams": F32, "Tindices": I32}),
    ("UnsortedSegmentSum", "rg.segment_sum(x, ids, 4)", [0, 1, ("num_segments", 4)],
     {"Tindices": I32}),
    ("OneHot", "rg.one_hot(ids, 4, on_value=5.0)",
     [0, ("depth", 4), ("on_value", 5.0), ("off_value", 0.0)], {"axis": -1, "T": F32, "TI": I32}),
    ("TopKV2", "rg.top_k(x, 2)", [0, ("k", 2)], {"sorted": True, "T": F32}),
    ("Slice", "rg.slice(x, [0, 1], [2, 2])", [0, ("begin", [0, 1]), ("size", [2, 2])],
     {"Index": I32}),
    ("StridedSlice", "x[1]", [0, ("begin", [1, 0]), ("end", [2, 0]), ("strides", [1, 1])],
     {"shrink_axis_mask": 1, "begin_mask": 2, "end_mask": 2, "new_axis_mask": 0}),
    ("StridedSlice", "x[:, None, ::-2]",
     [0, ("begin", [0, 0, 2]), ("end", [0, 0, -2]), ("strides", [1, 1, -2])],
     {"new_axis_mask": 2, "begin_mask": 1, "end_mask": 5, "shrink_axis_mask": 0}),
    ("SelectV2", "rg.where(x > 0, x, x)", [0, 1, 2], {"T": F32}),
    ("SparseSoftmaxCrossEntropyWithLogits",
     "nn.sparse_softmax_cross_entropy_with_logits(ids, x)", [0, 1], {"T": F32, "Tlabels": I32}),
    ("Cumsum", "rg.cumulative_sum(x, axis=1, reverse=True)", [0, ("axis", 1)],
     {"exclusive": False, "reverse": True, "Tidx": I32}),
    ("Conv2D", "nn.conv2d(image, filter, (1, 2), 'same')", [0, 1],
     {"strides": [1, 1, 2, 1], "padding": b"SAME", "data_format": b"NHWC",
      "dilations": [1, 1, 1, 1], "explicit_paddings": []}),
    ("Conv2D", "nn.conv2d(image, filter, 1, [(1, 2), (0, 3)])", [0, 1],
     {"padding": b"EXPLICIT", "explicit_paddings": [0, 0, 1, 2, 0, 3, 0, 0]}),
    ("MaxPool", "nn.max_pool(image, 2, 1, 'valid')", [0],
     {"ksize": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "padding": b"VALID",
      "data_format": b"NHWC", "T": F32}),
    ("LeakyRelu", "nn.leaky_relu(x, 0.5)", [0], {"alpha": 0.5, "T": F32}),
    ("LRN", "nn.local_response_normalization(image, 2)", [0],
     {"depth_radius": 2, "bias": 1.0, "alpha": 1.0, "beta": 0.5}),
    ("ResizeBilinear", "nn.resize_bilinear(image, (8, 8), align_corners=True)",
     [0, ("size", [8, 8])], {"align_corners": True, "half_pixel_centers": False}),
    ("SpaceToBatchND", "nn.space_to_batch(image, (2, 2), [(0, 0), (0, 0)])",
     [0, ("block_shape", [2, 2]), ("paddings", [[0, 0], [0, 0]])], {"Tblock_shape": I32}),
    ("MatrixTriangularSolve", "rg.linalg.triangular_solve(square, x)", [0, 1],
     {"lower": True, "adjoint": False}),
    ("Svd", "rg.linalg.svd(x, full_matrices=True)", [0],
     {"compute_uv": True, "full_matrices": True}),
    ("Softmax", "nn.softmax(x)", [0], {"T": F32}), ("Relu", "nn.relu(x)", [0], {"T": F32}),
    ("Placeholder", "batch", [], {"dtype": F32, "shape": [None, 3]}),
    ("Einsum", "rg.einsum('ij,kj->ik', x, x)", [0, 1], {"equation": b"ij,kj->ik", "N": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "expression", "inputs", "attrs"), CASES, ids=lambda v: str(v))
def test_views(op_type, expression, inputs, attrs):
    node = node_of(eval(expression, {"rg": rg, "nn": nn, **tensors()}))
    assert node.op.type == op_type
    assert shown(node) == inputs
    got = tf_names.attrs(node)
    assert {name: got.get(name) for name in attrs} == attrs
    assert [type(got[name]) for name in attrs] == [type(due) for due in attrs.values()]
    # each own tensor is shown once, and constants are int32 or of the op's dtype
    listed = tf_names.inputs(node)
    assert sorted(i for i in listed if isinstance(i, int)) == list(range(len(node.xs)))
    kinds = {value.dtype for _, value in (i for i in listed if not isinstance(i, int))}
    assert kinds <= {I32, F32}


def test_sizes_of_the_run():
    x = tensors()["batch"]
    ((_, shape),) = tf_names.inputs(node_of(rg.reshape(x, (x.shape[0], 3, 1))))[1:]
    assert isinstance(shape[0], Dim)
    assert shape[1:] == [3, 1]
    node = node_of(x[:, 1])
    assert shown(node)[1:] == [("begin", [0, 1]), ("end", [0, 2]), ("strides", [1, 1])]
    assert tf_names.attrs(node)["begin_mask"] == tf_names.attrs(node)["end_mask"] == 1
    with tf.Graph().as_default():
        rest = tf.placeholder(tf.float32, [None, 3])[1:].op._node
    assert tf_names.attrs(rest)["begin_mask"] == 2


def test_all_axes_of_an_unknown_rank():
    x = tensors()["unranked"]
    assert tf_names.inputs(node_of(rg.sum(x))) == [0, ("reduction_indices", None)]
    assert tf_names.attrs(x._data.node) == {"dtype": F32, "shape": None}


def test_random_numbers():
    with tf.Graph().as_default():
        node = tf.random_uniform([2, 3], seed=7).op._node
        while node.op.type != "RandomUniform":
            node = next(node.sources()).node
    assert shown(node) == [("shape", [2, 3])]
    got = tf_names.attrs(node)
    assert (got["dtype"], got["T"], got["seed2"]) == (F32, I32, 7)


def test_state():
    with tf.Graph().as_default() as graph:
        v = tf.Variable([1.0, 2.0], name="v")
        tf.train.MomentumOptimizer(0.5, 0.9, use_nesterov=True).minimize(tf.reduce_sum(v))
    nodes = {node.op.type: node for node in graph.nodes}
    assert tf_names.attrs(v.op._node)["shape"] == [2]
    assert tf_names.attrs(graph.by_name["v/read"]) == {"T": F32}
    due = {"T": F32, "validate_shape": True, "use_locking": False}
    assert tf_names.attrs(nodes["Assign"]) == due
    assert tf_names.attrs(nodes["ApplyMomentum"])["use_nesterov"] is True
    assert tf_names.attrs(nodes["NoOp"]) == {}
    inputs = graph.view_of(nodes["ApplyMomentum"]).inputs
    assert [x.name for x in inputs][:2] == ["v:0", "v/Momentum:0"]


def test_an_op_type_without_a_row_shows_what_it_has():
    node = node_of(rg.tril(tensors()["x"], k=1))
    assert tf_names.inputs(node) == [0]
    assert tf_names.attrs(node) == {"T": F32, "k": 1}


# Op types, and the attributes that TensorFlow 1.15 gives them beside T.
ATTRIBUTES = """
AddN N | All keep_dims Tidx | Any keep_dims Tidx | ApplyAdadelta use_locking
ApplyAdagrad use_locking update_slots | ApplyAdam use_locking use_nesterov
ApplyCenteredRMSProp use_locking | ApplyFtrlV2 use_locking | ApplyGradientDescent use_locking
ApplyMomentum use_locking use_nesterov | ApplyRMSProp use_locking | ArgMax Tidx output_type
ArgMin Tidx output_type | Assert summarize | Assign validate_shape use_locking
AssignAdd use_locking | AssignSub use_locking | AvgPool ksize strides padding data_format
AvgPool3D ksize strides padding data_format | AvgPoolGrad ksize strides padding data_format
BatchToSpaceND Tblock_shape Tcrops | BiasAdd data_format | BroadcastTo Tidx
Cast SrcT DstT Truncate | ConcatV2 N Tidx | Const value dtype
Conv2D strides use_cudnn_on_gpu padding explicit_paddings data_format dilations
Conv2DBackpropFilter strides use_cudnn_on_gpu padding explicit_paddings data_format dilations
Conv2DBackpropInput strides use_cudnn_on_gpu padding explicit_paddings data_format dilations
Conv3D strides padding data_format dilations
Conv3DBackpropFilterV2 strides padding data_format dilations
Conv3DBackpropInputV2 strides padding data_format dilations | Cumprod exclusive reverse Tidx
Cumsum exclusive reverse Tidx | DepthwiseConv2dNative strides padding data_format dilations
DepthwiseConv2dNativeBackpropFilter strides padding data_format dilations
DepthwiseConv2dNativeBackpropInput strides padding data_format dilations
Dilation2D strides rates padding | Einsum equation N | ExpandDims Tdim | FFT Tcomplex
GatherNd Tparams Tindices | GatherV2 batch_dims Tparams Tindices Taxis | IFFT Tcomplex
IdentityN T | If Tcond Tin Tout | Imag Tout | IsVariableInitialized dtype
LRN depth_radius bias alpha beta | LeakyRelu alpha | LinSpace Tidx
MatrixInverse adjoint | MatrixSolve adjoint | MatrixTriangularSolve lower adjoint
Max keep_dims Tidx | MaxPool ksize strides padding data_format
MaxPool3D ksize strides padding data_format | MaxPoolGrad ksize strides padding data_format
Mean keep_dims Tidx | Min keep_dims Tidx | MirrorPad Tpaddings mode
Multinomial seed seed2 output_dtype | OneHot axis TI | Pack N axis | Placeholder dtype shape
PlaceholderWithDefault dtype shape | Print U message first_n summarize | Prod keep_dims Tidx
PyFunc token Tin Tout | Qr full_matrices | RandomShuffle seed seed2
RandomStandardNormal seed seed2 dtype | RandomUniform seed seed2 dtype
RandomUniformInt seed seed2 Tout | Range Tidx | Real Tout | Reshape Tshape
ResizeBilinear align_corners half_pixel_centers
ResizeBilinearGrad align_corners half_pixel_centers
ResizeNearestNeighbor align_corners half_pixel_centers
ResizeNearestNeighborGrad align_corners half_pixel_centers | ReverseV2 Tidx | Roll Tshift Taxis
ScatterNd Tindices | SelfAdjointEigV2 compute_v | Shape out_type | Slice Index
SpaceToBatchND Tblock_shape Tpaddings | SparseSoftmaxCrossEntropyWithLogits Tlabels
Squeeze squeeze_dims
StridedSlice Index begin_mask end_mask ellipsis_mask new_axis_mask shrink_axis_mask
Sum keep_dims Tidx | Svd compute_uv full_matrices | TensorScatterUpdate Tindices | Tile Tmultiples
TopKV2 sorted | Transpose Tperm | TruncatedNormal seed seed2 dtype | Unpack num axis
UnsortedSegmentSum Tindices Tnumsegments | VariableV2 shape dtype container shared_name | While T
"""
WITHOUT_T = (  # whose dtypes have other names
    "All Any Cast Const FFT GatherNd GatherV2 IFFT If IsVariableInitialized Placeholder "
    "PlaceholderWithDefault PyFunc Range VariableV2"
)


@pytest.mark.parametrize("line", [row for line in ATTRIBUTES.strip().splitlines()
                                  for row in line.split(" | ")])  # fmt: skip
def test_attributes_of_tensorflows_definitions(line):
    op_type, *names = line.split()
    declared = tf_names.VIEWS.get(op_type)
    if declared is None:
        found = {"T", *rg.find_op(op_type).attrs}
    else:
        found = {entry.partition("=")[0] for entry in declared.partition("|")[2].split()}
    assert {*names} <= found
    assert ("T" in found) is (op_type not in WITHOUT_T.split())


def test_a_missing_attribute_names_those_that_there_are():
    op = tf.nn.bias_add(tf.zeros([2, 3]), tf.zeros([3]), name="b").op
    refused(lambda: op.get_attr("data_forma"), ValueError, "'b' has no attr named 'data_forma'",
            "'data_format'", "It has T, data_format")  # fmt: skip


def test_rows_are_for_op_types_that_exist():
    assert tf.train.Optimizer  # whose ops are registered when it is imported
    known = {*rg.op_types(), regions.IF.type, regions.WHILE.type}
    assert set(tf_names.VIEWS) - known == set()

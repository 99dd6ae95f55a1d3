"""What TensorFlow 1 has and `regrad.v1` has not, with the nearest thing to call."""

from __future__ import annotations

from typing import NoReturn

from regrad.errors import near

# name (or beginning of names) under `tf.` -> what to do instead
INSTEAD = {
    "app": "parse arguments with argparse",
    "flags": "parse arguments with argparse",
    "logging": "Python's logging",
    "gfile": "Python's open and os.path",
    "summary": "print or plot what session.run returns",
    "data": "a Python loop that feeds batches by feed_dict",
    "contrib": "the function of the same purpose in tf.nn, tf.layers or tf.train",
    "keras": "tf.layers and tf.train",
    "estimator": "a loop over session.run(train_op, feed_dict)",
    "feature_column": "tf.one_hot and tf.gather",
    "metrics": "compute the measure with NumPy from what session.run returns",
    "sets": "Python sets of what session.run returns",
    "sparse": "dense tensors, with tf.scatter_nd and tf.gather_nd",
    "SparseTensor": "dense tensors, with tf.scatter_nd and tf.gather_nd",
    "sparse_": "dense tensors, with tf.scatter_nd and tf.gather_nd",
    "SparseTensorValue": "dense tensors",
    "string": "Python strings, before feeding",
    "strings": "Python strings, before feeding",
    "string_": "Python strings, before feeding",
    "decode_": "Python (PIL, csv, ...), before feeding",
    "parse_": "Python, before feeding",
    "read_file": "Python's open, before feeding",
    "write_file": "Python's open, on what session.run returns",
    "io": "Python's open",
    "FIFOQueue": "a Python loop that feeds batches",
    "RandomShuffleQueue": "a Python loop that feeds batches",
    "QueueBase": "a Python loop that feeds batches",
    "TensorArray": "tf.stack and tf.unstack, or a loop variable that tf.concat makes longer",
    "map_fn": "ops on the whole batch, or tf.while_loop",
    "scan": "tf.while_loop",
    "foldl": "tf.while_loop",
    "foldr": "tf.while_loop",
    "make_template": "a function with tf.variable_scope(..., reuse=tf.AUTO_REUSE)",
    "function": "a Python function, which adds to the graph each time it is called",
    "Defun": "a Python function with tf.custom_gradient",
    "get_local_variable": "tf.get_variable(..., collections=[tf.GraphKeys.LOCAL_VARIABLES])",
    "import_graph_def": "build the graph by the code that made it, and restore with tf.train.Saver",
    "GraphDef": "graph.get_operations(), or graph.to_dot()",
    "MetaGraphDef": "the code that made the graph, and tf.train.Saver",
    "NodeDef": "str(op)",
    "saved_model": "tf.train.Saver",
    "graph_util": "tf.train.Saver",
    "GraphOptions": "tf.ConfigProto, whose settings have no effect",
    "OptimizerOptions": "tf.ConfigProto, whose settings have no effect",
    "enable_eager_execution": "regrad itself: import regrad as rg computes at once",
    "executing_eagerly": "regrad itself: import regrad as rg computes at once",
    "GradientTape": "regrad.grad, value_and_grad and variable_grads",
    "distribute": "one process",
    "fft": "NumPy's, through tf.py_func",
    "ifft": "NumPy's, through tf.py_func",
    "signal": "NumPy's or SciPy's, through tf.py_func",
    "spectral": "NumPy's, through tf.py_func",
    "lite": "nothing near it",
    "test": "pytest and numpy.testing",
    "resource_loader": "importlib.resources",
    "sysconfig": "nothing near it",
    "load_op_library": "@regrad.op, which makes an op out of a kernel in Python",
    "user_ops": "@regrad.op, which makes an op out of a kernel in Python",
    "disable_v2_behavior": "nothing: regrad.v1 is TensorFlow 1's graph mode already",
    "disable_eager_execution": "nothing: regrad.v1 is TensorFlow 1's graph mode already",
    "bincount": "tf.reduce_sum(tf.one_hot(x, n), 0)",
    "histogram_fixed_width": "NumPy's, on what session.run returns",
    "unique_with_counts": "NumPy's, through tf.py_func",
    "quantize": "tf.round with an override of the op type Round",
    "fake_quant_": "tf.round with an override of the op type Round",
    "dynamic_partition": "tf.boolean_mask",
    "dynamic_stitch": "tf.scatter_nd",
    "edit_distance": "Python, on what session.run returns",
    "scatter_": "tf.assign(v, ...) of a new value made with tf.scatter_nd",
    "variable_creator_scope": "tf.variable_scope(..., custom_getter=...)",
    "PartitionedVariable": "one tf.Variable",
    "add_check_numerics_ops": "tf.Assert of tf.is_finite",
    "check_numerics": "tf.Assert of tf.is_finite",
}


def refuse(module: str, name: str, known: list[str]) -> NoReturn:
    """Raise AttributeError for a name that is not covered, with the nearest thing to call."""
    found = INSTEAD.get(name) or next(
        (use for start, use in INSTEAD.items() if start.endswith("_") and name.startswith(start)),
        None,
    )
    if found is None:
        hint = near(name, known) or " docs/tf1.md lists what is covered."
        raise AttributeError(f"{module}.{name} is not covered by regrad.v1.{hint}")
    raise AttributeError(f"{module}.{name} is not covered by regrad.v1. Use instead: {found}.")

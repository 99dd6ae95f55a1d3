"""What TensorFlow 1 has and `regrad.v1` has not, with the nearest thing to call."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

from regrad.errors import near

# name (or beginning of names) under `tf.` -> what to do instead
INSTEAD = {
    "app": "parse arguments with argparse",
    "flags": "parse arguments with argparse",
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
    "nn.dynamic_rnn": "tf.while_loop, or a Python loop over tf.unstack",
    "nn.static_rnn": "a Python loop over tf.unstack",
    "nn.bidirectional_dynamic_rnn": "tf.while_loop, twice",
    "nn.rnn_cell": "the cell's formula in a function, with tf.get_variable",
    "nn.ctc_": "PyTorch's or your own, through tf.py_func with a gradient",
    "nn.nce_loss": "tf.nn.sampled candidates drawn with NumPy and fed",
    "nn.sampled_softmax_loss": "tf.nn.softmax_cross_entropy_with_logits_v2",
    "nn.raw_rnn": "tf.while_loop",
    "nn.max_pool_with_argmax": "tf.nn.max_pool",
    "nn.fractional_": "tf.nn.max_pool or tf.nn.avg_pool",
    "nn.quantized_": "the float op with an override of its gradient",
    "layers.Dense": "tf.layers.dense",
    "layers.Conv2D": "tf.layers.conv2d",
    "layers.Layer": "a function with tf.variable_scope and tf.get_variable",
    "layers.separable_conv2d": "tf.nn.separable_conv2d",
    "layers.max_pooling1d": "tf.layers.max_pooling2d of an image of height 1",
    "layers.average_pooling1d": "tf.layers.average_pooling2d of an image of height 1",
    "train.Coordinator": "a Python loop",
    "train.MonitoredTrainingSession": "tf.Session",
    "train.MonitoredSession": "tf.Session",
    "train.Supervisor": "tf.Session",
    "train.SessionRunHook": "a Python loop around session.run",
    "train.Scaffold": "tf.Session and tf.train.Saver",
    "train.start_queue_runners": "feed batches by feed_dict",
    "train.batch": "a Python loop that feeds batches",
    "train.shuffle_batch": "a Python loop that feeds shuffled batches",
    "train.ClusterSpec": "one process",
    "train.Server": "one process",
    "train.SyncReplicasOptimizer": "the optimizer itself",
    "train.ProximalGradientDescentOptimizer": "tf.train.GradientDescentOptimizer",
    "train.AdagradDAOptimizer": "tf.train.AdagradOptimizer",
    "train.Feature": "NumPy arrays, fed",
    "train.Example": "NumPy arrays, fed",
    "image.decode_": "Python (PIL), before feeding",
    "image.random_": "NumPy, before feeding",
    "image.adjust_": "NumPy, before feeding",
    "losses.hinge": "tf.losses.hinge_loss",
}


def refuse_in(module: ModuleType, label: str) -> None:
    """Make a module raise AttributeError with the nearest thing to call, for names it lacks."""

    def missing(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = [n for n in vars(module) if not n.startswith("_")]
        use = _instead(f"{label}.{name}".removeprefix("tf."))
        hint = f" Use instead: {use}." if use else near(name, known)
        hint = hint or " docs/tf1.md lists what is covered."
        raise AttributeError(f"{label}.{name} is not covered by regrad.v1.{hint}")

    module.__getattr__ = missing  # type: ignore[method-assign]


def _instead(name: str) -> str | None:
    families = (
        use for start, use in INSTEAD.items() if start[-1] in "_." and name.startswith(start)
    )
    return INSTEAD.get(name) or next(families, None)

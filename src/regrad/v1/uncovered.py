"""Names of TensorFlow 1 that `regrad.v1` does not cover, each with the closest replacement."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

from regrad.core.hints import unknown
from regrad.errors import near

# Replacement -> names under `tf.`. A name that ends in `_` or `.` is a prefix.
_REPLACED = {
    "Python's open and os.path": "gfile",
    "a Python loop that feeds batches by feed_dict": "data",
    "tf.layers and tf.train": "keras",
    "a loop over session.run(train_op, feed_dict)": "estimator",
    "tf.one_hot and tf.gather": "feature_column",
    "dense tensors, with tf.scatter_nd and tf.gather_nd": "SparseTensor sparse_",
    "Python (PIL, csv, ...), before feeding": "decode_",
    "Python, before feeding": "parse_",
    "Python's open, before feeding": "read_file",
    "Python's open, on the results of session.run": "write_file",
    "a Python loop that feeds batches": "FIFOQueue RandomShuffleQueue train.batch",
    "tf.stack and tf.unstack, or a loop variable that tf.concat extends": "TensorArray",
    "tf.while_loop": "nn.raw_rnn",
    "a function with tf.variable_scope(..., reuse=tf.AUTO_REUSE)": "make_template",
    "a Python function, which adds ops to the graph at each call": "function",
    "tf.get_variable(..., collections=[tf.GraphKeys.LOCAL_VARIABLES])": "get_local_variable",
    "the code that made the graph, and tf.train.Saver": "import_graph_def train.import_meta_graph",
    "tf.train.Saver": "saved_model",
    "regrad itself (import regrad as rg), which is eager": "enable_eager_execution",
    "regrad.grad, value_and_grad and variable_grads": "GradientTape",
    "one process": "distribute train.ClusterSpec train.Server",
    "NumPy's function, through tf.py_func": "unique_with_counts",
    "SciPy's function, through tf.py_func": "spectral.dct signal.dct",
    "tf.gather of frames, and tf.spectral.rfft of them": "signal.stft",
    "pytest and numpy.testing": "test",
    "@regrad.op, which makes an op from a Python kernel": "load_op_library",
    "tf.reduce_sum(tf.one_hot(x, n), 0)": "bincount",
    "NumPy's function, on the results of session.run": "histogram_fixed_width",
    "tf.round with an override of the op type Round": "quantize fake_quant_",
    "tf.boolean_mask": "dynamic_partition",
    "tf.scatter_nd": "dynamic_stitch",
    "Python, on the results of session.run": "edit_distance",
    "tf.assign(v, ...) with a new value from tf.scatter_nd": "scatter_",
    "tf.variable_scope(..., custom_getter=...)": "variable_creator_scope",
    "one tf.Variable": "PartitionedVariable",
    "tf.Assert of tf.is_finite": "add_check_numerics_ops",
    "PyTorch's function or your own, through tf.py_func with a gradient": "nn.ctc_",
    "tf.nn.sampled candidates drawn with NumPy and fed": "nn.nce_loss",
    "tf.nn.softmax_cross_entropy_with_logits_v2": "nn.sampled_softmax_loss",
    "tf.nn.max_pool": "nn.max_pool_with_argmax",
    "tf.nn.max_pool or tf.nn.avg_pool": "nn.fractional_",
    "the float op with an override of its gradient": "nn.quantized_",
    "tf.nn.separable_conv2d": "layers.separable_conv2d",
    "tf.layers.max_pooling2d of an image of height 1": "layers.max_pooling1d",
    "tf.layers.average_pooling2d of an image of height 1": "layers.average_pooling1d",
    "a Python loop": "train.Coordinator",
    "tf.Session": "train.MonitoredTrainingSession train.MonitoredSession train.Supervisor",
    "a Python loop around session.run": "train.SessionRunHook",
    "tf.Session and tf.train.Saver": "train.Scaffold",
    "feed batches by feed_dict": "train.start_queue_runners train.string_input_producer",
    "a Python loop that feeds shuffled batches": "train.shuffle_batch",
    "the optimizer itself": "train.SyncReplicasOptimizer",
    "tf.train.GradientDescentOptimizer": "train.ProximalGradientDescentOptimizer",
    "tf.train.AdagradOptimizer": "train.AdagradDAOptimizer",
    "NumPy arrays, fed": "train.Feature train.Example",
    "Python (PIL), before feeding": "image.decode_",
    "NumPy, before feeding": "image.random_ image.adjust_",
    "tf.losses.hinge_loss": "losses.hinge",
    "compute the measure with NumPy from the results of session.run": "metrics.",
    "tf.contrib.layers, with tf.contrib.framework.arg_scope": "contrib.slim",
    "the distribution's formula, with tf.random_normal": "distributions contrib.distributions",
    "the function of the same purpose in tf.nn, tf.layers or tf.train": "contrib.",
}
INSTEAD = {name: use for use, names in _REPLACED.items() for name in names.split()}


def refuse_in(module: ModuleType, label: str) -> None:
    """Make a module raise AttributeError, with the closest replacement, for names it lacks."""

    def missing(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = [n for n in vars(module) if not n.startswith("_")]
        use = _instead(f"{label}.{name}".removeprefix("tf."))
        hint = f" Use instead: {use}." if use else near(name, known)
        hint = hint or " docs/tf1.md lists the covered names."
        raise unknown(f"{label}.{name} is not covered by regrad.v1.{hint}", label)

    module.__getattr__ = missing  # type: ignore[method-assign]


def _instead(name: str) -> str | None:
    families = (
        use for start, use in INSTEAD.items() if start[-1] in "_." and name.startswith(start)
    )
    return INSTEAD.get(name) or next(families, None)

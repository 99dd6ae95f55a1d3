"""Names of TensorFlow 1 that `regrad.v1` does not cover, each with the closest replacement."""

from __future__ import annotations

import re
from types import ModuleType
from typing import NoReturn

from regrad.core.hints import unknown
from regrad.errors import near

# Replacement -> names under `tf.`. A name that ends in `_` or `.` is a prefix.
_REPLACED = {
    "Python's open and os.path": "gfile read_file write_file python_io",
    "a Python loop that feeds batches by feed_dict": "data FIFOQueue RandomShuffleQueue "
    "train.batch train.shuffle_batch train.start_queue_runners train.string_input_producer "
    "train.Coordinator",
    "Python (NumPy, PIL, csv, ...), before feeding": "decode_ parse_ train.Feature train.Example "
    "image.decode_ image.random_ image.adjust_",
    "Python and NumPy, on results of session.run": "edit_distance histogram_fixed_width metrics.",
    "NumPy's or SciPy's function, through tf.py_func": "unique_with_counts random_gamma "
    "random_poisson lbeta igamma betainc spectral.dct signal.dct",
    "tf.layers, tf.train and a loop over session.run(train_op, feed_dict)": "keras estimator "
    "train.SessionRunHook",
    "tf.Session and tf.train.Saver": "train.MonitoredTrainingSession train.MonitoredSession "
    "train.Supervisor train.Scaffold",
    "the code that made the graph, and tf.train.Saver": "GraphDef import_graph_def graph_util "
    "train.import_meta_graph train.export_meta_graph train.write_graph saved_model",
    "the function of the same purpose in tf.summary": "scalar_summary image_summary "
    "histogram_summary audio_summary merge_summary merge_all_summaries train.SummaryWriter",
    "Python's strings, before feeding": "strings string_ as_string substr",
    "tf.matmul": "batch_matmul",
    "tf.where": "select",
    "tf.abs": "complex_abs",
    "tf.check_numerics": "verify_tensor_all_finite",
    "tf.is_variable_initialized": "report_uninitialized_variables assert_variables_initialized",
    "tf.__version__": "VERSION",
    "one process, with its own optimizer": "distribute train.ClusterSpec train.Server "
    "train.SyncReplicasOptimizer",
    "tf.one_hot and tf.gather": "feature_column",
    "dense tensors, with tf.scatter_nd and tf.gather_nd": "SparseTensor sparse_",
    "tf.stack and tf.unstack, or a loop variable that tf.concat extends": "TensorArray",
    "tf.while_loop": "nn.raw_rnn",
    "a function with tf.variable_scope(..., reuse=tf.AUTO_REUSE)": "make_template",
    "a Python function, which adds ops to the graph at each call": "function",
    "tf.get_variable(..., collections=[tf.GraphKeys.LOCAL_VARIABLES])": "get_local_variable",
    "regrad itself (import regrad as rg), which is eager": "enable_eager_execution",
    "regrad.grad, value_and_grad and variable_grads": "GradientTape",
    "tf.gather of frames, and tf.spectral.rfft of them": "signal.stft",
    "pytest and numpy.testing": "test",
    "@regrad.op, which makes an op from a Python kernel": "load_op_library",
    "tf.reduce_sum(tf.one_hot(x, n), 0)": "bincount",
    "the float op, and tf.round with an override of the op type Round": "quantization "
    "quantize fake_quant_ nn.quantized_",
    "tf.boolean_mask and tf.scatter_nd": "dynamic_partition dynamic_stitch",
    "tf.assign(v, ...) with a new value from tf.scatter_nd": "scatter_",
    "PyTorch's function or your own, through tf.py_func with a gradient": "nn.ctc_",
    "tf.nn.softmax_cross_entropy_with_logits_v2": "nn.nce_loss nn.sampled_softmax_loss",
    "tf.nn.max_pool or tf.nn.avg_pool": "nn.max_pool_with_argmax nn.fractional_",
    "tf.nn.separable_conv2d": "layers.separable_conv2d",
    "tf.contrib.layers, with tf.contrib.framework.arg_scope": "contrib.slim",
    "the distribution's formula, with tf.random_normal": "distributions contrib.distributions",
    "the function of the same purpose in tf.nn, tf.layers or tf.train": "contrib.",
}
INSTEAD = {name: use for use, names in _REPLACED.items() for name in names.split()}


def refuse_in(module: ModuleType) -> None:
    """Make a module raise AttributeError, with the closest replacement, for names it lacks."""
    path = module.__name__.replace("regrad.v1", "tf").replace("training.rnn", "nn.rnn")
    label = re.sub(r"\.(functions|training)", "", path)

    def missing(name: str) -> NoReturn:
        full = f"{label}.{name}"
        lacks = full.removeprefix("tf.")
        uses = [
            use for key, use in INSTEAD.items()
            if lacks == key or (key[-1] in "_." and lacks.startswith(key))
        ]  # fmt: skip
        known = [n for n in vars(module) if not n.startswith("_") and n != "annotations"]
        hint = f" Use instead: {uses[0]}." if uses else near(name, known)
        hint = hint or " docs/tf1.md lists the covered names."
        raise unknown(f"{full} is not covered by regrad.v1.{hint}", label)

    module.__getattr__ = missing  # type: ignore[method-assign]

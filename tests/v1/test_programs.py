"""Programs of TensorFlow 1 as they are: their imports, flags, data and summaries; the report."""

import os
import re
import subprocess
import sys
import types
import warnings

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import MissingPackageError
from regrad.v1 import __main__ as runner
from regrad.v1 import app, errors
from regrad.v1.errors import InstallError, NoEffectWarning
from regrad.v1.programs import digits
from regrad.v1.programs.differences import DIFFERENCES
from tests.helpers.paths import DOCS
from tests.helpers.rows import refused


@pytest.fixture
def installed():
    with tf.install():
        yield


@pytest.fixture
def clean(monkeypatch):
    """No flags are defined, nothing was said yet, and the program's arguments are undone."""
    monkeypatch.setattr(sys, "argv", ["test"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(errors, "SAID", set())
    for key, value in vars(app.Flags()).items():
        monkeypatch.setitem(app.FLAGS.__dict__, key, value)
    known = set(app.FLAGS.__dict__)
    yield
    for key in set(app.FLAGS.__dict__) - known:
        del app.FLAGS.__dict__[key]


# -- modules ---------------------------------------------------------------------------------------

IMPORTS = {  # an import in a program, and the expected object
    "import tensorflow as tf; found = tf.placeholder": tf.placeholder,
    "import tensorflow.compat.v1 as tf; found = tf.nn.relu": tf.nn.relu,
    "from tensorflow.compat import v1; found = v1.train.Saver": tf.train.Saver,
    "from tensorflow.python.framework import ops; found = ops.RegisterGradient":
        tf.RegisterGradient,
    "import tensorflow.python.framework.ops as ops; found = ops.name_scope": tf.name_scope,
    "from tensorflow.python.ops import array_ops; found = array_ops.reshape": tf.reshape,
    "from tensorflow.python.ops import nn_ops; found = nn_ops.conv2d": tf.nn.conv2d,
    "from tensorflow.python.ops import init_ops; found = init_ops.zeros": tf.initializers.zeros,
    # Modules inside TensorFlow that have the names of functions.
    "from tensorflow.python.ops import variable_scope as vs; found = vs.variable_scope":
        tf.variable_scope,
    "import tensorflow.python.ops.gradients as g; found = g.gradients": tf.gradients,
    "from tensorflow.python.ops import confusion_matrix as c; found = c.confusion_matrix":
        tf.confusion_matrix,
    "import tensorflow as tf; found = tf.python.ops.one_hot.argmax": tf.argmax,
    "from tensorflow.python.ops.losses import losses; found = losses.hinge_loss":
        tf.losses.hinge_loss,
    "from tensorflow.python.ops import losses; found = losses.huber_loss": tf.losses.huber_loss,
    "from tensorflow.python.ops import image_ops; found = image_ops.resize_images":
        tf.image.resize_images,
    "from tensorflow.contrib import layers; found = layers.conv2d": tf.contrib.layers.conv2d,
    "from tensorflow.contrib.layers import batch_norm as found": tf.contrib.layers.batch_norm,
    "from tensorflow.contrib.framework.python.ops import arg_scope as found":
        tf.contrib.framework.arg_scope,
    "import tensorflow; found = tensorflow.contrib.layers.flatten": tf.contrib.layers.flatten,
    "import tensorflow as tf; found = tf.app.flags.FLAGS": app.FLAGS,
    "import tensorflow as tf; found = tf.python.framework.ops.Tensor": tf.Tensor,
    "from tensorflow.python.platform import flags; found = flags.FLAGS": app.FLAGS,
    "import tensorflow as tf; found = tf.__version__": "1.15",
    "from tensorflow.examples.tutorials.mnist import input_data; found = input_data.read_data_sets":
        digits.read_data_sets,
    "import tensorflow as tf; found = tf.examples.tutorials.mnist.input_data.DataSet":
        digits.DataSet,
}  # fmt: skip


@pytest.mark.parametrize("code", IMPORTS)
def test_imports_give_regrads_names(installed, code):
    names = {}
    exec(code, names)
    assert names["found"] is IMPORTS[code] or names["found"] == IMPORTS[code]


REFUSED = {  # code with a name that is not covered, and words of the error
    "from tensorflow.contrib import slim": "tf.contrib.slim is not covered.*tf.contrib.layers",
    "import tensorflow.contrib.slim as slim": "tf.contrib.slim is not covered.*tf.contrib.layers",
    "import tensorflow.keras": "tf.keras is not covered.*Use instead: tf.layers",
    "from tensorflow.keras.layers import Dense": "tf.keras is not covered",
    "import tensorflow as tf; tf.data": "feeds batches by feed_dict",
    "import tensorflow as tf; tf.gfile.GFile": "Python's open",
    "import tensorflow as tf; tf.estimator": "a loop over session.run",
    "import tensorflow as tf; tf.distributions": "the distribution's formula",
    "import tensorflow as tf; tf.FIFOQueue": "a Python loop",
    "import tensorflow as tf; tf.import_graph_def": "the code that made the graph",
    "from tensorflow.python.client import device_lib": "tensorflow.python.client is not covered",
    "from tensorflow.python.trackable.data import ListWrapper": "is not covered",
    "from tensorflow.nn import Relu": "tf.nn.Relu is not covered.*'relu'",
    "import tensorflow as tf; tf.Placeholder": "Did you mean 'placeholder'",
    "import tensorflow.placeholder": "tensorflow.placeholder is not a module",
    "from tensorflow.python.ops import variables as v; v.Tensr": "tf.Tensr is not covered.*Tensor",
}


@pytest.mark.parametrize("code", REFUSED)
def test_names_that_are_absent_say_what_to_call(installed, code):
    refused(lambda: exec(code, {}), (ImportError, AttributeError), REFUSED[code])


def test_tensorflow_itself_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    refused(tf.install, InstallError, "imported already.*python -m regrad.v1")


def test_uninstall_leaves_nothing():
    finders, modules = [*sys.meta_path], set(sys.modules)
    with tf.install():
        tf.install()
        import tensorflow.contrib.layers  # noqa: F401
    assert sys.meta_path == finders
    assert not {n for n in set(sys.modules) - modules if n.startswith("tensorflow")}
    tf.uninstall()


def test_other_packages_are_imported_as_ever(installed, tmp_path, monkeypatch):
    (tmp_path / "not_tensorflow.py").write_text("import tensorflow as tf\nfound = tf.abs")
    monkeypatch.syspath_prepend(tmp_path)
    from not_tensorflow import found, tf

    assert found is globals()["tf"].abs
    assert tf.__path__ == [] and not hasattr(tf, "__builtins__")


def test_functions_of_inner_modules(installed, graph):
    from tensorflow.python.layers import utils
    from tensorflow.python.ops import control_flow_ops, gen_nn_ops, variables

    x = tf.constant([-1.0, 2.0])
    ran = tf.Variable(0.0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        y = control_flow_ops.with_dependencies([ran.assign(5.0)], x)
        assert session.run(gen_nn_ops.relu_grad(tf.constant([3.0, 4.0]), y)).tolist() == [0, 4]
        assert session.run(ran) == 5.0
        assert session.run(utils.smart_cond(x[0] > 0.0, lambda: x, lambda: -x))[0] == 1.0
    assert utils.smart_cond(tf.constant(False), int, str) == ""
    assert isinstance(ran, variables.RefVariable)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("zero_debias", [True, False])
def test_assign_moving_average(installed, graph, zero_debias, dtype):
    from tensorflow.python.training import moving_averages

    fed = np.random.default_rng(0).normal(size=(4, 3)).astype(dtype)
    value = tf.placeholder(dtype, [3])
    mean = tf.Variable(np.ones(3, dtype), name="mean", trainable=False)
    update = moving_averages.assign_moving_average(mean, value, 0.9, zero_debias)
    weighted = [1.0 * 0.9**4 if not zero_debias else 0.0] * 3  # what is left of the initial value
    for age, row in enumerate(reversed(fed)):
        weighted = weighted + 0.1 * 0.9**age * row
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        found = [session.run(update, {value: row}) for row in fed][-1]
        np.testing.assert_allclose(session.run(mean), found, rtol=0)
    expected = weighted / (1 - 0.9**4) if zero_debias else weighted
    np.testing.assert_allclose(found, expected, rtol=1e-5 if dtype == "float32" else 1e-7)
    names = {v.op.name for v in tf.global_variables()} - {"mean"}
    assert names == ({"mean/biased", "mean/local_step"} if zero_debias else set())


# -- flags -----------------------------------------------------------------------------------------


def test_flags_come_from_the_command_line(clean, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["p.py", "--steps=3", "-rate", "0.5", "word", "--noshow"])
    tf.flags.DEFINE_integer("steps", 1, "100 % of the steps.")
    tf.flags.DEFINE_float("rate", 0.1, "")
    tf.flags.DEFINE_string("name", None, "")
    tf.flags.DEFINE_boolean("show", True, "")
    tf.flags.DEFINE_bool("save", False, "")
    flags = tf.flags.FLAGS
    assert (flags.steps, flags.rate, flags.name, flags.show, flags.save) == (
        3, 0.5, None, False, False,
    )  # fmt: skip
    flags.steps = 7
    tf.flags.DEFINE_string("late", "a", "")
    assert (flags.late, flags.steps) == ("a", 7)
    assert flags.flag_values_dict() == {
        "steps": 7, "rate": 0.5, "name": None, "show": False, "save": False, "late": "a",
    }  # fmt: skip
    refused(lambda: flags.step, AttributeError, "no flag 'step' is defined", "'steps'")


@pytest.mark.parametrize(("word", "due"), [
    ("", True), ("=true", True), ("=YES", True), ("=1", True), ("=False", False), ("=f", False),
    ("=no", False),
])  # fmt: skip
def test_flags_of_booleans_have_a_word_or_none(clean, monkeypatch, word, due):
    monkeypatch.setattr(sys, "argv", ["p.py", f"--show{word}"])
    tf.flags.DEFINE_boolean("show", None, "")
    assert tf.flags.FLAGS.show is due


def test_a_flag_of_a_wrong_kind_ends_the_program(clean, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["p.py", "--show=maybe"])
    tf.flags.DEFINE_boolean("show", True, "")
    assert refused(lambda: tf.flags.FLAGS.show, SystemExit).code == 2
    assert "argument --show/-show: invalid boolean value: 'maybe'" in capsys.readouterr().err


def test_run_passes_the_other_words_and_exits(clean, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["p.py", "--n", "3", "word"])
    tf.flags.DEFINE_integer("n", 1, "")
    seen = []
    end = refused(lambda: tf.app.run(lambda words: seen.append(words) or 4), SystemExit)
    assert (seen, end.code, tf.flags.FLAGS.n) == ([["p.py", "word"]], 4, 3)


# -- data and summaries ----------------------------------------------------------------------------


@pytest.mark.parametrize("one_hot", [False, True])
def test_the_digits_of_scikit_learn(clean, one_hot):
    from sklearn.datasets import load_digits

    with pytest.warns(NoEffectWarning, match="1,797 digits of scikit-learn") as said:
        data = digits.read_data_sets("nowhere", one_hot=one_hot, seed=0)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        square = digits.read_data_sets(reshape=False, dtype=tf.uint8, validation_size=0)
    assert [part.num_examples for part in data] == [1300, 200, 297]
    assert [part.num_examples for part in square] == [1500, 0, 297]
    pixels, numbers = load_digits(return_X_y=True)
    small = data.test.images.reshape(-1, 28, 28)[:, 3:27:3, 3:27:3].reshape(-1, 64) * 16
    found = data.test.labels.argmax(1) if one_hot else data.test.labels
    whole = [*map(tuple, pixels)]
    assert [numbers[whole.index(tuple(row))] for row in small] == found.tolist()
    assert (square.test.images.shape, square.test.images.max()) == ((297, 28, 28, 1), 255)
    assert data.train.images.dtype == np.float32


def test_batches_go_through_the_data():
    data = digits.DataSet(np.arange(5), np.arange(5) * 10, seed=1)
    drawn = [data.next_batch(2) for _ in range(5)]
    images, labels = (np.concatenate(part) for part in zip(*drawn, strict=True))
    assert sorted(images[:5]) == sorted(images[5:]) == [0, 1, 2, 3, 4]
    assert (labels == images * 10).all()
    assert data.epochs_completed == 2
    assert data.next_batch(12, shuffle=False)[0].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_without_scikit_learn(clean, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused(digits.read_data_sets, MissingPackageError, "needs sklearn.*pip install .*examples")


def test_summaries_write_nothing_and_say_so_once(clean, graph, tmp_path):
    with pytest.warns(NoEffectWarning, match="writes no files") as said:
        assert tf.summary.merge_all() is None
        assert tf.summary.scalar("a loss:0", tf.constant(1.0)).op.name == "a_loss_0"
        tf.summary.histogram("weights", tf.ones([3]), collections=["mine"])
        merged = tf.summary.merge_all()
        assert merged.op.name == "Merge/MergeSummary"
        writer = tf.summary.FileWriter(tmp_path / "logs", graph)
    assert len(said) == 1 and said[0].filename == __file__
    with tf.Session() as session:
        assert session.run([merged, tf.constant(2.0)]) == [b"", 2.0]
    assert writer.get_logdir() == tmp_path / "logs"
    with writer as same:
        assert same is writer
        writer.add_summary(b"", 1)
    assert os.listdir(tmp_path) == []
    assert [len(graph.get_collection(key)) for key in ("summaries", "mine")] == [1, 1]


# -- the command -----------------------------------------------------------------------------------

PROGRAM = """
import tensorflow as tf
from tensorflow.python.framework import ops

tf.app.flags.DEFINE_integer("steps", 2, "")

@ops.RegisterGradient("PassOfThisTest")
def rule(op, grad):
    return grad

def main(_):
    x = tf.placeholder(tf.float32, [2])
    with tf.get_default_graph().gradient_override_map({"Sign": "PassOfThisTest"}):
        y = tf.sign(x)
    with tf.Session() as session:
        print(tf.app.flags.FLAGS.steps, session.run(tf.gradients(y, x), {x: [1.0, 2.0]}))
    print(tf.clip_by_value(y, 0.0, 1.0).op.type, __file__)

if __name__ == "__main__":
    tf.app.run()
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def test_a_program_runs_with_its_arguments_and_a_report(clean, program, capsys):
    end = refused(lambda: runner.main(["--report", program, "--steps=5"]), SystemExit)
    first, second, *report = capsys.readouterr().out.splitlines()
    assert (end.code, first) == (None, "5 [array([1., 1.], dtype=float32)]")
    assert second == f"ClipByValue {program}"
    text = " ".join(" ".join(report).split())
    assert "tf.python.framework.ops.RegisterGradient" in text
    assert "1 Sign" in text and "1 ClipByValue" in text
    assert "override: Sign <- PassOfThisTest: 1 created, rule ran 1 times" in text
    assert "difference: `tf.clip_by_value`: one `ClipByValue`" in text
    assert "tf.norm" not in text
    assert "tensorflow" not in sys.modules


@pytest.mark.slow
def test_the_program_of_the_page_prints_the_text_of_the_page(tmp_path):
    page = (DOCS / "tf1.md").read_text(encoding="utf-8")
    code, text = re.search(r"^```py\n(.*?)^```.*?^```text\n(.*?)^```", page, re.S | re.M).groups()
    (tmp_path / "bnn.py").write_text(code)
    command = [sys.executable, "-m", "regrad.v1", "--report", "bnn.py", "--steps=60"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[1:] == text.splitlines()[1:]
    assert float(done.stdout.split()[1]) > 0.9
    assert "NoEffectWarning: input_data.read_data_sets returns" in done.stderr


def test_a_missing_program(capsys):
    assert refused(lambda: runner.main(["no/such.py"]), SystemExit).code == 2
    assert "there is no file 'no/such.py'" in capsys.readouterr().err


def test_the_differences_are_those_of_the_page():
    page = (DOCS / "tf1.md").read_text(encoding="utf-8")
    rows = {tuple(line.strip("| ").split(" | ")[::2]) for line in page.splitlines()}
    assert [row for row in DIFFERENCES if row[1:] not in rows] == []
    spaces = tf, tf.image, tf.linalg, tf.losses, tf.math, tf.nn, tf.summary, tf.train
    known = {name for space in spaces for name in vars(space)}
    keys = {key for row in DIFFERENCES for key in row[0].split()}
    assert {key for key in keys - known if key.islower()} <= {
        "rfft2d", "rfft3d", "irfft2d", "irfft3d", "read_data_sets", "scalar", "merge",
    }  # fmt: skip

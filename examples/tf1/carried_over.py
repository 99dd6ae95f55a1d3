"""A TensorFlow 1 script that uses most of the gradients API of TensorFlow 1.

The script is for comparison. Each line is a name and numbers that depend on nothing random, so the
output is the same wherever the program runs. Each function builds one graph and prints its results.

Run:     python examples/tf1/carried_over.py
Prints:  fifty-eight lines; TensorFlow's own are in tests/golden/tf1_carried_over.txt.
Source:  Each function names its own source.
"""

import argparse

import numpy as np

import regrad.v1 as tf


def show(name, values, feed_dict=None):
    """Print one line: numbers to five digits, strings unchanged."""
    if not isinstance(values, str):
        values = text(tf.get_default_session().run(values, feed_dict=feed_dict))
    print(f"{name:44} {values}")


def text(value):
    if isinstance(value, (list, tuple)) or np.ndim(value):
        return "[" + ", ".join(text(v) for v in value) + "]"
    return f"{round(float(value), 6) + 0.0:.5g}"  # the sum turns -0 into 0


# -- rules by op type ------------------------------------------------------------------------------


@tf.RegisterGradient("ClippedSign")
def _clipped_sign(op, grad):
    x = op.inputs[0]
    return tf.where(tf.abs(x) <= 1.0, grad, tf.zeros_like(grad))


@tf.RegisterGradient("HalfMatMul")
def _half_matmul(op, grad):
    """Return the gradient of MatMul, halved for the second factor."""
    a, b = op.inputs
    transpose_a, transpose_b = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    da = tf.matmul(grad, b, transpose_b=not transpose_b)
    db = tf.matmul(a, grad, transpose_a=not transpose_a)
    da = tf.transpose(da) if transpose_a else da
    return da, 0.5 * (tf.transpose(db) if transpose_b else db)


@tf.RegisterGradient("SumAsMean")
def _sum_as_mean(op, grad):
    """Return the gradient of the mean; None for the axes, which are the second input."""
    x, axes = op.inputs
    count = tf.reduce_sum(tf.ones_like(x), axes, keepdims=True)
    if not op.get_attr("keep_dims"):
        grad = tf.reshape(grad, tf.shape(count))
    return tf.ones_like(x) * grad / count, None


@tf.RegisterGradient("ThroughOutput")
def _through_output(op, grad):
    y = op.outputs[0]
    return grad * y * (1.0 - y)


tf.NotDifferentiable("AsConstant")


def clipped_sign():
    """Hubara et al., 2016, arXiv 1602.02830."""
    x = tf.placeholder(tf.float32, [4], name="x")
    with tf.get_default_graph().gradient_override_map({"Sign": "ClippedSign"}):
        y = tf.sign(x)
        z = tf.sign(x * 2.0) * x
    feed = {x: [-2.0, -0.5, 0.25, 1.0]}
    show("sign, clipped: value", y, feed)
    show("sign, clipped: gradient", tf.gradients(y, x)[0], feed)
    show("sign(2x) x, clipped: gradient", tf.gradients(z, x)[0], feed)


def products():
    """A rule that reads the attributes of a matrix product."""
    graph = tf.get_default_graph()
    a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b = tf.constant([[1.0, -1.0], [0.5, 2.0]])
    weights = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    with graph.gradient_override_map({"MatMul": "HalfMatMul"}):
        first = tf.matmul(a, b, transpose_a=True)
        second = tf.matmul(b, a, transpose_a=True, name="second")
        third = tf.matmul(b, weights, transpose_b=True)
    show("transpose_a: gradients", tf.gradients(first, [a, b], grad_ys=weights))
    show("transpose_a, ones: gradients", tf.gradients(second, [b, a]))
    show("transpose_b: gradients", tf.gradients(third, [b, weights]))
    show("an op's name and attribute", f"{second.op.name} {second.op.get_attr('transpose_a')}")


def sums():
    x = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    tf.get_default_session().run(tf.global_variables_initializer())
    with tf.get_default_graph().gradient_override_map({"Sum": "SumAsMean"}):
        columns = tf.reduce_sum(x * x, axis=0)
        rows = tf.reduce_sum(x * x, axis=1, keepdims=True)
        everything = tf.reduce_sum(x * x)
    for name, y in (("0", columns), ("1, kept", rows), ("all", everything)):
        show(f"sum over {name}: value", y)
        show(f"sum over {name}: gradient of a mean", tf.gradients(y, x)[0])


def scopes_of_overrides():
    """Inner scopes win. A type that is mapped to itself has its own rule again."""
    graph = tf.get_default_graph()
    x = tf.constant([0.5, 2.0])
    with graph.gradient_override_map({"Square": "ThroughOutput", "Sign": "Identity"}):
        outer = tf.square(x)
        with graph.gradient_override_map({"Square": "Square"}):
            restored = tf.square(x) + tf.sign(x)
        with graph.gradient_override_map({"Square": "AsConstant"}):
            constant = tf.square(x) + 3.0 * x
    show("override by output", tf.gradients(outer, x)[0])
    show("restored, plus sign passed through", tf.gradients(restored, x)[0])
    show("not differentiable, plus 3x", tf.gradients(constant, x)[0])
    show("second derivative by output", tf.gradients(tf.gradients(outer, x)[0], x)[0])


# -- rules by function -----------------------------------------------------------------------------


@tf.custom_gradient
def log1pexp(x):
    """The example of `tf.custom_gradient`'s documentation: the gradient does not overflow."""
    e = tf.exp(x)
    return tf.log(1.0 + e), lambda dy: dy * (1.0 - 1.0 / (1.0 + e))


@tf.custom_gradient
def scaled(x):
    """A variable that is made inside. Its gradient is separate, here negated."""
    v = tf.get_variable("scale", initializer=[2.0, 3.0], use_resource=True)

    def grad(dy, variables=None):
        return dy * variables[0], [-dy * x]

    return x * v, grad


@tf.custom_gradient
def add_and_multiply(a, b):
    def grad(d_sum, d_product):
        return d_sum + d_product * b, d_sum + 10.0 * d_product * a

    return (a + b, a * b), grad


def custom_gradients():
    x = tf.placeholder(tf.float32, [2])
    feed = {x: [0.0, 100.0]}
    dy = tf.gradients(log1pexp(x), x)[0]
    show("log1pexp: gradient", dy, feed)
    show("log1pexp: second derivative at 0", tf.gradients(dy, x)[0][0], feed)
    with tf.variable_scope("custom"):
        y = scaled(x)
    v = tf.trainable_variables()[0]
    tf.get_default_session().run(tf.global_variables_initializer())
    show("with a variable: gradients", tf.gradients(y, [x, v]), feed)
    show("its name", v.name)
    a, b = tf.constant(2.0), tf.constant(5.0)
    total, product = add_and_multiply(a, b)
    show("two outputs: gradients of the second", tf.gradients(product, [a, b]))
    show("two outputs: of both", tf.gradients([total, product], [a, b]))


@tf.RegisterGradient("NumpySinh")
def _numpy_sinh(op, grad):
    slope = tf.py_func(np.cosh, [op.inputs[0]], tf.float32)
    return grad * tf.reshape(slope, tf.shape(grad))


def python_function():
    """The recipe of tensorflow/tensorflow#1095."""
    x = tf.constant([0.0, 1.0, -1.0])
    with tf.get_default_graph().gradient_override_map({"PyFunc": "NumpySinh"}):
        y = tf.py_func(np.sinh, [x], tf.float32)
    y.set_shape(x.get_shape())
    show("py_func: value", y)
    show("py_func: gradient of its square", tf.gradients(y * y, x)[0])


# -- control flow ----------------------------------------------------------------------------------


def loops():
    """Newton's root with a fed number of steps, and a recurrence with a rule in its body."""
    x, steps = tf.placeholder(tf.float32, []), tf.placeholder(tf.int32, [])
    _, root = tf.while_loop(
        lambda i, r: i < steps, lambda i, r: (i + 1, 0.5 * (r + x / r)), (tf.constant(0), x)
    )
    slope = tf.gradients(root, x)[0]
    for n in (0, 1, 2, 20):
        show(f"root of 3 in {n} steps, its slope", [root, slope], {x: 3.0, steps: n})

    w = tf.constant([[0.9, -0.4], [0.3, 1.1]])
    start = tf.constant([[1.0, 0.5]])

    def body(i, h):
        with tf.get_default_graph().gradient_override_map({"Round": "Identity"}):
            return i + 1, tf.round(4.0 * tf.tanh(tf.matmul(h, w))) / 4.0

    _, last = tf.while_loop(lambda i, h: i < 3, body, [tf.constant(0), start])
    show("rounded recurrence: value", last)
    show("rounded recurrence: gradients", tf.gradients(last, [w, start]))


def branches():
    x, flag = tf.placeholder(tf.float32, [2]), tf.placeholder(tf.bool, [])
    with tf.get_default_graph().gradient_override_map({"Sign": "ClippedSign"}):
        y = tf.cond(flag, lambda: tf.sign(x) * 5.0, lambda: x * x)
    dx = tf.gradients(y, x)[0]
    for value in (True, False):
        show(f"cond, {value}: value and gradient", [y, dx], {x: [0.5, 3.0], flag: value})


# -- tf.gradients ----------------------------------------------------------------------------------


def surrogate():
    """Value of one function, gradient of another (Zenke and Ganguli, 2018, arXiv 1705.11146)."""
    x = tf.constant([-1.0, 0.0, 0.5])
    soft = x / (1.0 + tf.abs(x))
    spike = soft + tf.stop_gradient(tf.cast(x > 0.0, tf.float32) - soft)
    show("spike: value", spike)
    show("spike: gradient", tf.gradients(spike, x)[0])


def arguments_of_gradients():
    a = tf.constant(2.0, name="a")
    b = tf.multiply(a, 3.0, name="b")
    c = a * b + tf.sin(b)
    show("d/d[a, b]", tf.gradients(c, [a, b]))
    show("d/d[a, b], stop at b", tf.gradients(c, [a, b], stop_gradients=[b]))
    show("grad_ys", tf.gradients([b, c], a, grad_ys=[tf.constant(10.0), tf.constant(0.5)])[0])
    unrelated = tf.constant([1.0, 2.0])
    show("no path", str(tf.gradients(c, unrelated)))
    show("no path, zeros", tf.gradients(c, unrelated, unconnected_gradients="zero")[0])
    x = tf.constant([1.0, 2.0])
    show("hessian of x0^2 x1^3", tf.hessians(x[0] ** 2 * x[1] ** 3, x)[0])


def sparse():
    table = tf.get_variable("table", initializer=np.arange(8, dtype=np.float32).reshape(4, 2))
    tf.get_default_session().run(tf.global_variables_initializer())
    rows = tf.nn.embedding_lookup(table, [1, 3, 1])
    gradient = tf.gradients(tf.reduce_sum(rows * rows), table)[0]
    show("embedding: dense", tf.convert_to_tensor(gradient))


# -- variables, collections, order -----------------------------------------------------------------


def collections():
    """Weight decay through a collection, with the name of a scope and shared variables."""
    x = tf.constant([[1.0, -1.0]])

    def dense(h, reuse):
        with tf.variable_scope("dense", reuse=reuse):
            w = tf.get_variable("w", [2, 2], initializer=tf.constant_initializer([1, 2, 3, 4]))
            return tf.matmul(h, w)

    h = dense(dense(x, reuse=False), reuse=True)
    for v in tf.trainable_variables():
        tf.add_to_collection("losses", 0.1 * tf.nn.l2_loss(v))
    tf.add_to_collection("losses", tf.reduce_mean(h))
    with tf.name_scope("total"):
        loss = tf.add_n(tf.get_collection("losses"), name="loss")
    tf.get_default_session().run(tf.global_variables_initializer())
    show("variables", " ".join(v.name for v in tf.global_variables()))
    show("loss", f"{loss.name} of {len(tf.get_collection('losses'))}")
    show("value, gradient", [loss, tf.gradients(loss, tf.trainable_variables())[0]])


def updates():
    """Clipped descent with momentum and a counter, then an average, with control dependencies."""
    x = tf.Variable([3.0, -4.0], name="x")
    average = tf.Variable([0.0, 0.0], trainable=False, name="average")
    global_step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.5, global_step, 2, 0.5, staircase=True)
    optimizer = tf.train.MomentumOptimizer(rate, 0.5)
    gradients, variables = zip(*optimizer.compute_gradients(tf.reduce_sum(x * x)), strict=True)
    clipped, norm = tf.clip_by_global_norm(gradients, 5.0)
    step = optimizer.apply_gradients(zip(clipped, variables, strict=True), global_step=global_step)
    with tf.control_dependencies([step]):
        after = tf.identity(x.read_value(), name="after")
        with tf.control_dependencies([tf.assign(average, 0.5 * (average + after))]):
            done = tf.no_op(name="done")
    sess = tf.get_default_session()
    sess.run(tf.global_variables_initializer())
    show("norm before", norm)
    for _ in range(3):
        sess.run(done)
        show(f"x, average after step {int(sess.run(global_step))}", [x, average])
    show("fed for once", x * 1.0, {x: [7.0, 8.0]})


def errors():
    """The errors for an unknown name, a wrong number of gradients, and a missing feed."""
    graph = tf.get_default_graph()
    x = tf.placeholder(tf.float32, [2], name="x")
    with graph.gradient_override_map({"Sign": "NeverRegistered", "Maximum": "Identity"}):
        y, z = tf.sign(x), tf.maximum(x, 0.0)
    kinds = [tf.errors.InvalidArgumentError, KeyError, LookupError, ValueError]
    for name, call in (
        ("unregistered", lambda: tf.gradients(y, x)),
        ("one gradient for two inputs", lambda: tf.gradients(z, x)),
        ("registered twice", lambda: tf.RegisterGradient("ClippedSign")(_clipped_sign)),
        ("no feed", lambda: tf.get_default_session().run(y)),
        ("feed of another shape", lambda: tf.get_default_session().run(y, {x: [1.0, 2.0, 3.0]})),
        ("shapes that clash", lambda: x + tf.constant([1.0, 2.0, 3.0])),
    ):
        try:
            call()
        except tuple(kinds) as error:
            kind = next(kind for kind in kinds if isinstance(error, kind))
            show(f"error, {name}", kind.__name__)


PARTS = [clipped_sign, products, sums, scopes_of_overrides, custom_gradients, python_function]
PARTS += [loops, branches, surrogate, arguments_of_gradients, sparse, collections, updates, errors]


def main(quick=False):
    """Run every part in a separate graph and session. Quick and full runs are the same."""
    for part in PARTS:
        with tf.Graph().as_default(), tf.Session():
            part()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="changes nothing: it is quick")
    main(**vars(parser.parse_args()))

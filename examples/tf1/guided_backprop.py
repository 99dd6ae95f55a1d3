"""Guided backpropagation of a convolutional network, as a TensorFlow 1 program.

Guided backpropagation shows which pixels support a class: the gradient of the class's logit with
respect to the image, where a ReLU passes a gradient only if both its input and the gradient are
positive. The network is trained with the ordinary ReLU. It is built a second time, on the same
variables, inside `gradient_override_map({"Relu": "GuidedRelu"})`: the same logits with another
gradient.

Run:     python examples/tf1/guided_backprop.py [--quick] [--out out/guided_backprop_tf1.png]
Prints:  test accuracy, the largest difference between the logits of the two networks, and for
         the plain and the guided gradient of the test images: the share of negative values, and
         the shares of the absolute value that are negative and on ink. Draws a picture of both.
Source:  Springenberg et al., "Striving for Simplicity", 2014, arXiv 1412.6806.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import regrad.v1 as tf

INK = 0.25  # relative to the darkest possible pixel


@tf.RegisterGradient("GuidedRelu")
def _guided_relu_grad(op, grad):
    plain = grad * tf.cast(op.outputs[0] > 0, grad.dtype)
    return tf.where(grad > 0, plain, tf.zeros_like(grad))


# -- the network -----------------------------------------------------------------------------------


def layer(name, rng, shape):
    weights = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))
    with tf.variable_scope(name):
        w = tf.get_variable("w", initializer=weights.astype(np.float32))
        b = tf.get_variable("b", initializer=np.zeros(shape[-1], np.float32))
    return w, b


def conv_relu(x, name, rng, channels):
    w, b = layer(name, rng, [3, 3, x.get_shape().as_list()[-1], channels])
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME"), b))


def dense(x, name, rng, units):
    w, b = layer(name, rng, [x.get_shape().as_list()[-1], units])
    return tf.nn.bias_add(tf.matmul(x, w), b)


def network(images, reuse=False):
    rng = np.random.RandomState(0)
    with tf.variable_scope("network", reuse=reuse):
        h = conv_relu(images, "conv1", rng, 16)
        h = tf.nn.max_pool(h, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
        h = conv_relu(h, "conv2", rng, 32)
        h = tf.reshape(h, [-1, 4 * 4 * 32])
        h = tf.nn.relu(dense(h, "dense1", rng, 64))
        return dense(h, "dense2", rng, 10)


# -- the report ------------------------------------------------------------------------------------


def measures(saliency, images):
    size = np.abs(saliency)
    return {
        "values negative": np.mean(saliency < 0),
        "size negative": np.sum(size * (saliency < 0)) / np.sum(size),
        "on ink": np.sum(size * (images > INK)) / np.sum(size),
    }


def draw(columns, path):
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    figure, panels = plt.subplots(6, len(columns), figsize=(5, 9), layout="constrained")
    for column, (title, values) in zip(panels.T, columns.items(), strict=True):
        column[0].set_title(title)
        for axes, pixels in zip(column, values[:6, ..., 0], strict=True):
            limit = np.abs(pixels).max()
            style = ("gray_r", 0) if title == "image" else ("RdBu_r", -limit)
            axes.imshow(pixels, cmap=style[0], vmin=style[1], vmax=limit)
            axes.set(xticks=[], yticks=[])
    figure.supxlabel("red: more ink here raises the logit; blue: lowers it", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(quick=False, out="out/guided_backprop_tf1.png"):
    """Train, compare the two gradients, draw; return the printed numbers."""
    digits = load_digits()
    data = (digits.images[..., None] / 16).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        data, digits.target, random_state=0, stratify=digits.target
    )
    graph = tf.Graph()
    with graph.as_default(), tf.Session(graph=graph) as sess:
        images = tf.placeholder(tf.float32, [None, 8, 8, 1], name="images")
        labels = tf.placeholder(tf.int64, [None], name="labels")
        logits = network(images)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        train_op = tf.train.AdamOptimizer(2e-3).minimize(loss)
        correct = tf.equal(tf.argmax(logits, 1), labels)
        accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))

        with graph.gradient_override_map({"Relu": "GuidedRelu"}):
            guided_logits = network(images, reuse=True)
        plain = tf.gradients(tf.reduce_max(logits, axis=1), images)[0]
        guided = tf.gradients(tf.reduce_max(guided_logits, axis=1), images)[0]

        sess.run(tf.global_variables_initializer())
        rng = np.random.RandomState(0)
        for _ in range(2 if quick else 15):
            for rows in np.array_split(rng.permutation(len(x_train)), len(x_train) // 64):
                sess.run(train_op, feed_dict={images: x_train[rows], labels: y_train[rows]})

        test = {images: x_test, labels: y_test}
        results = {"accuracy": float(accuracy.eval(feed_dict=test))}
        values = sess.run([logits, guided_logits, plain, guided], feed_dict=test)
    results["difference"] = float(np.abs(values[0] - values[1]).max())
    print(f"test accuracy              {results['accuracy']:.1%}")
    print(f"largest logit difference   {results['difference']:g}")
    print(f"pixels with ink            {np.mean(x_test > INK):.1%}\n")
    print("           values     share of the absolute value")
    print("gradient   negative   negative     on ink")
    for name, saliency in (("plain", values[2]), ("guided", values[3])):
        results[name] = {key: float(v) for key, v in measures(saliency, x_test).items()}
        shares = [f"{share:.1%}" for share in results[name].values()]
        print("{:8} {:>10} {:>10} {:>10}".format(name, *shares))
    draw({"image": x_test[:6], "plain": values[2], "guided": values[3]}, Path(out))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train for a few seconds only")
    parser.add_argument("--out", default="out/guided_backprop_tf1.png", help="the picture's file")
    main(**vars(parser.parse_args()))

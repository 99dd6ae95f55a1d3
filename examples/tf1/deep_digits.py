"""The convolutional network of TensorFlow 1's best-known tutorial, on scikit-learn's digits.

"Deep MNIST for Experts" introduced many users to TensorFlow 1: helpers that make weights and
biases, two convolutions with pooling, a dense layer with dropout, Adam, and a training loop that
feeds batches. This program has the same structure, rewritten for images of 8 x 8 pixels (28 x 28 in
the tutorial), which come with scikit-learn. At the end it saves its variables, resets them to their
initial values, and restores them.

Run:     python examples/tf1/deep_digits.py [--quick]
Prints:  training accuracy now and then; test accuracy after training, after the reset of the
         variables, and after they are restored from the file.
Source:  The TensorFlow authors, "Deep MNIST for Experts", TensorFlow 1.x tutorials, 2015 to 2018.
         Dropout: Srivastava et al., JMLR 15, 2014. Adam: Kingma and Ba, 2014, arXiv 1412.6980.
"""

import argparse
import os
import tempfile

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import regrad.v1 as tf


def weight_variable(shape):
    """Return a variable of weights. A little noise breaks the symmetry between units."""
    return tf.Variable(tf.truncated_normal(shape, stddev=0.1))


def bias_variable(shape):
    """Return a variable of biases, slightly positive, so that no unit starts dead."""
    return tf.Variable(tf.constant(0.1, shape=shape))


def conv2d(x, w):
    return tf.nn.conv2d(x, w, strides=[1, 1, 1, 1], padding="SAME")


def max_pool_2x2(x):
    return tf.nn.max_pool(x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")


def deepnn(x):
    """Return logits of flat images, and the placeholder for the probability to keep a unit."""
    with tf.name_scope("reshape"):
        x_image = tf.reshape(x, [-1, 8, 8, 1])

    with tf.name_scope("conv1"):
        h_conv1 = tf.nn.relu(conv2d(x_image, weight_variable([3, 3, 1, 32])) + bias_variable([32]))
    with tf.name_scope("pool1"):
        h_pool1 = max_pool_2x2(h_conv1)

    with tf.name_scope("conv2"):
        h_conv2 = tf.nn.relu(conv2d(h_pool1, weight_variable([3, 3, 32, 64])) + bias_variable([64]))
    with tf.name_scope("pool2"):
        h_pool2 = max_pool_2x2(h_conv2)

    with tf.name_scope("fc1"):
        h_pool2_flat = tf.reshape(h_pool2, [-1, 2 * 2 * 64])
        w_fc1 = weight_variable([2 * 2 * 64, 128])
        h_fc1 = tf.nn.relu(tf.matmul(h_pool2_flat, w_fc1) + bias_variable([128]))

    with tf.name_scope("dropout"):
        keep_prob = tf.placeholder(tf.float32)
        h_fc1_drop = tf.nn.dropout(h_fc1, keep_prob)

    with tf.name_scope("fc2"):
        logits = tf.matmul(h_fc1_drop, weight_variable([128, 10])) + bias_variable([10])
    return logits, keep_prob


def batches(images, labels, size, seed=0):
    """Yield batches without end, in a new order for every epoch."""
    rng = np.random.RandomState(seed)
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield images[rows], labels[rows]


def main(quick=False):
    """Train, save and restore; return the three test accuracies."""
    digits = load_digits()
    x_train, x_test, labels_train, labels_test = train_test_split(
        (digits.data / 16).astype(np.float32),
        np.eye(10, dtype=np.float32)[digits.target],
        random_state=0,
        stratify=digits.target,
    )
    accuracies = {}
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as directory:
        tf.set_random_seed(0)
        x = tf.placeholder(tf.float32, [None, 64])
        y_ = tf.placeholder(tf.float32, [None, 10])
        y_conv, keep_prob = deepnn(x)

        with tf.name_scope("loss"):
            cross_entropy = tf.reduce_mean(
                tf.nn.softmax_cross_entropy_with_logits(labels=y_, logits=y_conv)
            )
        with tf.name_scope("adam_optimizer"):
            train_step = tf.train.AdamOptimizer(1e-3).minimize(cross_entropy)
        with tf.name_scope("accuracy"):
            correct_prediction = tf.equal(tf.argmax(y_conv, 1), tf.argmax(y_, 1))
            accuracy = tf.reduce_mean(tf.cast(correct_prediction, tf.float32))

        saver = tf.train.Saver()
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            test = {x: x_test, y_: labels_test, keep_prob: 1.0}
            steps, data = 100 if quick else 1000, batches(x_train, labels_train, 50)
            for step in range(steps):
                images, labels = next(data)
                if step % (steps // 5) == 0:
                    shown = accuracy.eval(feed_dict={x: images, y_: labels, keep_prob: 1.0})
                    print(f"step {step:4}, training accuracy {shown:6.1%}")
                train_step.run(feed_dict={x: images, y_: labels, keep_prob: 0.5})

            accuracies["trained"] = float(accuracy.eval(feed_dict=test))
            path = saver.save(sess, os.path.join(directory, "model.ckpt"))
            sess.run(tf.global_variables_initializer())
            accuracies["reset"] = float(accuracy.eval(feed_dict=test))
            saver.restore(sess, path)
            accuracies["restored"] = float(accuracy.eval(feed_dict=test))

    for name, value in accuracies.items():
        print(f"{name:9} test accuracy     {value:6.1%}")
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train for a few seconds only")
    main(**vars(parser.parse_args()))

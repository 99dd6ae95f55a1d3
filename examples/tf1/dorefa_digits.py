"""A DoReFa-Net of few bits, and the same network of floats, as a TensorFlow 1 program.

All three quantizers round, and rounding has no gradient, so each defines its gradient:

    weights      1 bit     sign(w), scaled; "Sign" has the gradient of "Identity"
    activations  2 bits    round(3x) / 3 in [0, 1]; "Round" has the gradient of "Identity"
    gradients    6 bits    an identity whose gradient rounds the incoming gradient, with noise:
                           an op of type "Identity" with the gradient "QuantiseGradient"

As in the paper, the first and the last layer keep their float weights, and the last layer's
gradient is not quantized.

Run:     python examples/tf1/dorefa_digits.py [--quick]
Prints:  the test accuracy on handwritten digits, of floats and quantized, and the number of
         different values of the third layer's weights, activations and gradients (the gradients as
         fractions of the example's largest, rounded to four decimals).
Source:  Zhou et al., "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low
         Bitwidth Gradients", 2016, arXiv 1606.06160.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import regrad.v1 as tf

BITS_A, BITS_G = 2, 6


# -- the quantizers --------------------------------------------------------------------------------


def quantise(x, bits):
    """Round numbers in [0, 1] to 2**bits levels. The gradient passes unchanged."""
    steps = float(2**bits - 1)
    with tf.get_default_graph().gradient_override_map({"Round": "Identity"}):
        return tf.round(x * steps) / steps


def quantise_weights(w):
    scale = tf.stop_gradient(tf.reduce_mean(tf.abs(w)))
    with tf.get_default_graph().gradient_override_map({"Sign": "Identity"}):
        return tf.sign(w / scale) * scale


def quantise_activations(x):
    return quantise(tf.clip_by_value(x, 0.0, 1.0), BITS_A)


@tf.RegisterGradient("QuantiseGradient")
def _quantise_gradient(op, grad):
    """Quantize each example by its own largest value. Noise makes the rounding unbiased."""
    axes = list(range(1, op.inputs[0].get_shape().ndims))
    largest = tf.reduce_max(tf.abs(grad), axes, keepdims=True) + 1e-20
    half_step = 0.5 / float(2**BITS_G - 1)
    noise = tf.random_uniform(tf.shape(grad), -half_step, half_step)
    unit = tf.clip_by_value(0.5 * grad / largest + 0.5 + noise, 0.0, 1.0)
    return (2.0 * quantise(unit, BITS_G) - 1.0) * largest


def quantise_gradients(x):
    with tf.get_default_graph().gradient_override_map({"Identity": "QuantiseGradient"}):
        return tf.identity(x)


# -- the network -----------------------------------------------------------------------------------


def batch_norm(x, training, decay=0.9):
    """Normalize by the batch in training, and by running means otherwise."""
    axes = list(range(x.get_shape().ndims - 1))
    channels = x.get_shape().as_list()[-1]
    running_mean = tf.get_variable("mean", initializer=tf.zeros([channels]), trainable=False)
    running_var = tf.get_variable("variance", initializer=tf.ones([channels]), trainable=False)
    beta = tf.get_variable("beta", initializer=tf.zeros([channels]))
    batch_mean, batch_var = tf.nn.moments(x, axes)
    for running, batch in ((running_mean, batch_mean), (running_var, batch_var)):
        update = tf.assign_sub(running, (1 - decay) * (running - batch))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    mean, var = tf.cond(
        training, lambda: (batch_mean, batch_var), lambda: (running_mean, running_var)
    )
    return tf.nn.batch_normalization(x, mean, var, beta, None, 1e-5)


def weights(rng, shape):
    values = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))
    return tf.get_variable("w", initializer=values.astype(np.float32))


def network(images, training, quantised):
    """Return logits, and the third layer's weights, activations and gradient target."""
    rng = np.random.RandomState(0)
    fw, fa, fg = [tf.identity, lambda x: tf.clip_by_value(x, 0.0, 1.0), tf.identity]
    if quantised:
        fw, fa, fg = quantise_weights, quantise_activations, quantise_gradients
    with tf.variable_scope("conv1"):
        h = tf.nn.conv2d(images, weights(rng, [3, 3, 1, 16]), [1, 1, 1, 1], "SAME")
        h = fa(batch_norm(h, training))
    with tf.variable_scope("conv2"):
        h = fg(tf.nn.conv2d(h, fw(weights(rng, [3, 3, 16, 16])), [1, 2, 2, 1], "SAME"))
        h = fa(batch_norm(h, training))
    with tf.variable_scope("dense1"):
        w = fw(weights(rng, [4 * 4 * 16, 64]))
        z = tf.matmul(tf.reshape(h, [-1, 4 * 4 * 16]), w)
        h = fa(batch_norm(fg(z), training))
    with tf.variable_scope("dense2"):
        b = tf.get_variable("b", initializer=tf.zeros([10]))
        return tf.matmul(h, weights(rng, [64, 10])) + b, (w, h, z)


# -- the experiment --------------------------------------------------------------------------------


def train(data, quantised, epochs):
    """Train one network in a separate graph; return its results."""
    x_train, x_test, y_train, y_test = data
    with tf.Graph().as_default(), tf.Session() as sess:
        tf.set_random_seed(0)
        images = tf.placeholder(tf.float32, [None, 8, 8, 1])
        labels = tf.placeholder(tf.int32, [None])
        training = tf.placeholder(tf.bool, [])
        logits, (w, h, z) = network(images, training, quantised)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        dz = tf.gradients(loss, z)[0]
        correct = tf.nn.in_top_k(logits, labels, 1)
        accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
        global_step = tf.train.get_or_create_global_step()
        steps = epochs * (len(x_train) // 64)
        rate = tf.train.polynomial_decay(0.01, global_step, steps, 0.0)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = tf.train.AdamOptimizer(rate).minimize(loss, global_step=global_step)

        sess.run(tf.global_variables_initializer())
        rng = np.random.RandomState(0)
        progress = tqdm(range(epochs), desc="quantised" if quantised else "float", unit="epoch")
        for _ in progress:
            for rows in np.array_split(rng.permutation(len(x_train)), len(x_train) // 64):
                batch = {images: x_train[rows], labels: y_train[rows], training: True}
                _, value = sess.run([train_op, loss], feed_dict=batch)
            progress.set_postfix(loss=f"{value:.4f}")
        test = {images: x_test, labels: y_test, training: False}
        weight, activation, gradient = sess.run([w, h, dz], feed_dict=test)
        gradient = gradient / (np.abs(gradient).max(axis=1, keepdims=True) + 1e-20)
        third = [weight, activation, np.round(gradient, 4)]
        return {
            "accuracy": float(accuracy.eval(feed_dict=test)),
            "steps": int(sess.run(global_step)),
            "values": [len(np.unique(values)) for values in third],
        }


def main(quick=False):
    """Train both networks and print their accuracies; return the printed numbers."""
    digits = load_digits()
    data = train_test_split(
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
        test_size=450,
        random_state=0,
        stratify=digits.target,
    )
    names = {False: "float", True: f"1-{BITS_A}-{BITS_G} bits"}
    rows = {name: train(data, quantised, 2 if quick else 20) for quantised, name in names.items()}
    print("                                     different values in the third layer")
    print("network      test accuracy   steps   weights   activations   gradients")
    for name, row in rows.items():
        w, a, g = row["values"]
        print(f"{name:12} {row['accuracy']:13.1%} {row['steps']:7} {w:9,} {a:13,} {g:11,}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train for a few seconds only")
    main(**vars(parser.parse_args()))

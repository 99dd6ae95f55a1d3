"""Domain-adversarial training by gradient reversal, as a TensorFlow 1 program.

Two moons, and the same moons turned by 35 degrees, for which no label is known. The hidden layer
keeps features that separate the labels. Through an identity that reverses the gradient, it loses
features that separate the domains. The identity is written in both forms of TensorFlow 1:

    custom         a function under `tf.custom_gradient`
    override       `tf.identity` under `gradient_override_map`, with a new rule for each call,
                   because the rule depends on λ and one name can be registered once

λ and the learning rate are fed: λ rises and the learning rate falls as in the paper.

Run:     python examples/tf1/gradient_reversal.py [--quick]
Prints:  the largest difference between the gradients of the two forms, then the accuracy on
         source and target without reversal and with it, for each form. The rate, the number of
         steps and the largest λ were chosen with the target's labels, so the gain is only an
         illustration. The agreement of both forms does not depend on it.
Source:  Ganin and Lempitsky, "Unsupervised Domain Adaptation by Backpropagation", 2015,
         arXiv 1409.7495. Ganin et al., 2015, arXiv 1505.07818 (the turned moons).
"""

import argparse
import itertools

import numpy as np
from sklearn.datasets import make_moons

import regrad.v1 as tf

HIDDEN, RATE, LARGEST = 15, 0.3, 6.0


# -- the reversal, in two forms --------------------------------------------------------------------


@tf.custom_gradient
def reverse_custom(x, strength):
    def grad(dy):
        return -strength * dy, None

    return tf.identity(x), grad


count = itertools.count()


def reverse_override(x, strength):
    name = f"ReverseGradient{next(count)}"

    @tf.RegisterGradient(name)
    def _reverse(op, grad):
        return [-strength * grad]

    with tf.get_default_graph().gradient_override_map({"Identity": name}):
        return tf.identity(x)


WAYS = {"custom": reverse_custom, "override": reverse_override}


# -- the network -----------------------------------------------------------------------------------


def dense(x, units, rng):
    values = rng.normal(size=(x.get_shape().as_list()[1], units))
    w = tf.Variable(values, name="w")
    b = tf.Variable(tf.zeros([units], tf.float64), name="b")
    return tf.nn.xw_plus_b(x, w, b)


class Model:
    """A model. The first half of a batch is from the source, with labels; the rest is not."""

    def __init__(self, reverse):
        rng = np.random.RandomState(0)
        self.points = tf.placeholder(tf.float64, [None, 2], name="points")
        self.labels = tf.placeholder(tf.float64, [None], name="labels")
        self.strength = tf.placeholder(tf.float64, [], name="strength")
        self.rate = tf.placeholder_with_default(tf.constant(0.0, tf.float64), [], name="rate")
        with tf.name_scope("features"):
            features = tf.nn.sigmoid(dense(self.points, HIDDEN, rng))
        with tf.name_scope("label"):
            self.logits = tf.squeeze(dense(features, 1, rng), axis=1)
        with tf.name_scope("domain"):
            domain_logits = tf.squeeze(dense(reverse(features, self.strength), 1, rng), axis=1)
        half = tf.shape(self.labels)[0]
        domains = tf.concat([tf.zeros_like(self.labels), tf.ones_like(self.labels)], axis=0)
        entropy = tf.nn.sigmoid_cross_entropy_with_logits
        label_loss = tf.reduce_mean(entropy(labels=self.labels, logits=self.logits[:half]))
        domain_loss = tf.reduce_mean(entropy(labels=domains, logits=domain_logits))
        self.loss = label_loss + domain_loss
        optimizer = tf.train.MomentumOptimizer(self.rate, momentum=0.9)
        pairs = optimizer.compute_gradients(self.loss)
        self.gradients = [gradient for gradient, _ in pairs]
        self.train = optimizer.apply_gradients(pairs)

    def feed(self, points, labels, strength):
        return {self.points: points, self.labels: labels, self.strength: strength}


# -- the experiment --------------------------------------------------------------------------------


def moons(degrees, seed):
    points, labels = make_moons(300, noise=0.05, random_state=seed)
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return (points - [0.5, 0.25]) @ turn, labels


def accuracy(sess, model, points, labels):
    logits = sess.run(model.logits, feed_dict={model.points: points})
    return float(np.mean((logits > 0) == labels))


def run(reverse, largest, steps):
    """Train in a separate graph; return the accuracies and the gradients at the start."""
    (source, labels), (target, target_labels) = moons(0, seed=0), moons(35, seed=1)
    rng = np.random.RandomState(0)
    with tf.Graph().as_default(), tf.Session() as sess:
        model = Model(reverse)
        sess.run(tf.global_variables_initializer())
        everything = model.feed(np.concatenate([source, target]), labels, 1.0)
        gradients = sess.run(model.gradients, feed_dict=everything)
        for step in range(steps):
            i, j = rng.randint(300, size=(2, 32))
            done = step / steps
            strength = largest * (2 / (1 + np.exp(-10 * done)) - 1)
            batch = model.feed(np.concatenate([source[i], target[j]]), labels[i], strength)
            sess.run(model.train, feed_dict={**batch, model.rate: RATE / (1 + 10 * done) ** 0.75})
        return {
            "source": accuracy(sess, model, source, labels),
            "target": accuracy(sess, model, target, target_labels),
            "gradients": gradients,
        }


def main(quick=False):
    """Train without reversal and with it, in both forms; return the printed numbers."""
    steps = 300 if quick else 6000
    rows = {"none": run(reverse_custom, 0.0, steps)}
    for way, reverse in WAYS.items():
        rows[way] = run(reverse, LARGEST, steps)
    pairs = zip(rows["custom"].pop("gradients"), rows["override"].pop("gradients"), strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    print(f"{steps} steps; largest difference of the gradients {difference:g}")
    print("reversal   largest λ   accuracy on source   on target")
    for name, row in rows.items():
        largest = 0.0 if name == "none" else LARGEST
        print(f"{name:10} {largest:9} {row['source']:20.1%} {row['target']:11.1%}")
    return {"difference": difference, **rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train for a few seconds only")
    main(**vars(parser.parse_args()))

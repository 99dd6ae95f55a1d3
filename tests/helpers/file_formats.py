"""The formats that files of Variables have: how each is saved and read."""

import numpy as np

import regrad as rg
import regrad.v1 as tf

SIZE = 20_000  # elements: more than one write to the disk


def save_safetensors(path, number):
    rg.train.save(path, [rg.Variable(rg.tensor(np.full(SIZE, number)), False, "w")])


def read_safetensors(path):
    w = rg.Variable(rg.tensor(np.zeros(SIZE)), False, "w")
    rg.train.restore(path, [w])
    return w.numpy()


def save_npz(path, number):
    with tf.Graph().as_default(), tf.Session() as session:
        w = tf.Variable(np.full(SIZE, number), name="w")
        session.run(w.initializer)
        tf.train.Saver().save(session, str(path).removesuffix(".npz"))


def read_npz(path):
    return tf.train.load_variable(str(path).removesuffix(".npz"), "w")


FORMATS = {"safetensors": (save_safetensors, read_safetensors), "npz": (save_npz, read_npz)}

"""`tf.train`: optimizers, learning rates, step counts, averages and checkpoints."""

from regrad.v1.training.optimizers import *
from regrad.v1.training.saver import *
from regrad.v1.training.schedules import *

"""Calls of ops that are refused: the class of the error, and words of its message."""

import numpy as np
import pytest

import regrad as rg
from regrad import linalg, losses, nn, random
from regrad.errors import ArgumentError, DTypeError, InvalidValueError, RegradError, ShapeError
from regrad.ops import array, image, joining, pooling, reduction
from regrad.ops import convolution as cv
from regrad.ops.matmul import einsum
from tests.helpers.rows import refused

X, SQUARE, WHOLE = rg.ones((2, 3)), rg.ones((2, 2)), rg.asarray(np.arange(3))
ROWS = rg.asarray(np.arange(12.0).reshape(3, 4))
IMAGE, W = np.ones((1, 4, 4, 2)), np.ones((3, 3, 2, 3))
KEYS = np.ones((2, 3, 4))
sparse = nn.sparse_softmax_cross_entropy_with_logits

ARRAYS = [  # a call, its error if it is no ShapeError, and words of the message
    (lambda: array.reshape(X, (4, 2)), "6 elements"),
    (lambda: array.reshape(X, (-1, -1)), "cannot have the shape"),
    (lambda: array.squeeze(X, 0), "size 1"), (lambda: array.squeeze(X, 2), "out of range"),
    (lambda: array.expand_dims(X, 4), "out of range"),
    (lambda: array.expand_dims(X, (0, 0)), ArgumentError, "twice"),
    (lambda: array.permute_dims(X, (0, 2)), "each axis"),
    (lambda: array.permute_dims(X, (0, 0)), "each axis"),
    (lambda: array.permute_dims(X, (0,)), "each axis"),
    (lambda: array.matrix_transpose(X[0]), "rank 2"),
    (lambda: array.moveaxis(X, (0, 1), (0,)), ArgumentError, "same number"),
    (lambda: array.moveaxis(X, (0, 0), (0, 1)), ArgumentError, "distinct"),
    (lambda: array.flip(X, axis=2), "out of range"),
    (lambda: joining.concat([X, X[:, :2]]), r"\(2, 3\), \(2, 2\)"),
    (lambda: joining.concat([X, X[0]]), "same rank"),
    (lambda: joining.concat([rg.scalar(1), rg.scalar(2)]), "use stack"),
    (lambda: joining.concat([]), ArgumentError, "at least one"),
    (lambda: joining.concat(X), ArgumentError, "a list"),
    (lambda: joining.stack([X, X[0]]), "one shape"),
    (lambda: joining.split(X, 2, axis=1), "2 equal parts"),
    (lambda: joining.split(X, [1, 3], axis=1), "add up"),
    (lambda: joining.split(X, [-1, -1], axis=1), "add up"),
    (lambda: joining.split(X, [5, -1], axis=1), "add up"),
    (lambda: joining.split(X, 0), "0 equal parts"),
    (lambda: array.broadcast_arrays(X, rg.zeros(2)), r"\(2, 3\) and \(2,\)"),
    (lambda: array.meshgrid(X), "vectors"),
    (lambda: array.meshgrid(X[0], indexing="yx"), ArgumentError, "'yx'"),
    (lambda: array.tril(X[0]), "tril takes matrices"),
    (lambda: array.diagonal(X[0]), "diagonal takes matrices"),
    (lambda: array.diag(rg.scalar(1)), "rank 0"),
    (lambda: array.diag(X, shape=(2, 2)), "has 2 elements, got 3"),
]  # fmt: skip

INDICES = [
    (lambda: rg.take(ROWS, [0]), ArgumentError, "pass an axis"),
    (lambda: rg.take(ROWS, [0.5], axis=0), DTypeError, "must be integers"),
    (lambda: rg.take(ROWS, [True], axis=0), DTypeError, "mask"),
    (lambda: rg.take(ROWS, [[0]], axis=0, batch_dims=1), ArgumentError, "batch_dims"),
    (lambda: rg.take(ROWS, [[0]], axis=1, batch_dims=1), "must agree"),
    (lambda: rg.take_along_axis(ROWS, [0]), "use take"),
    (lambda: rg.take_along_axis(ROWS, [[0], [0]], axis=1), "broadcast"),
    (lambda: rg.gather_nd(ROWS, [[0, 0, 0]]), "up to 2"),
    (lambda: rg.gather_nd(ROWS, 0), "last axis"),
    (lambda: rg.scatter_nd([[0]], ROWS, (3, 4)), r"\(1, 4\), got \(3, 4\)"),
    (lambda: rg.segment_sum(ROWS, [0, 1], 2), "leading axes"),
    (lambda: rg.slice(ROWS, (0, 0), (1,)), "one entry per axis"),
    (lambda: rg.slice(ROWS, (0, 3), (1, 2)), IndexError, "exceeds"),
    (lambda: rg.slice(ROWS, (-1, 0), (1, 1)), IndexError, "exceeds"),
    (lambda: rg.pad(ROWS, [(1, 1)]), ArgumentError, r"axis \(2\)"),
    (lambda: rg.pad(ROWS, [(1, 1), (-1, 0)]), ArgumentError, "0 or more"),
    (lambda: rg.pad(ROWS, [1, 1]), ArgumentError, "pair"),
    (lambda: rg.pad(ROWS, 1, "wrap"), ArgumentError, "'wrap'"),
    (lambda: rg.pad(ROWS[:0], 1, "edge"), "empty axis"),
    (lambda: rg.repeat(ROWS, [1, 2], axis=1), "4 elements"),
    (lambda: rg.repeat(ROWS, -1), ArgumentError, "0 or more"),
    (lambda: rg.at_set(ROWS, 0, [1.0, 2.0]), r"\(2,\), but x\[index\]"),
    (lambda: rg.at_add(ROWS, [0], ROWS), r"has \(1, 4\)"),
    (lambda: rg.at_set(ROWS, 0, 1j), DTypeError, "complex"),
    (lambda: rg.nonzero(ROWS[0, 0]), "rank 0"),
    (lambda: rg.at_set(WHOLE, 0, 1.5), DTypeError, "astype"),
    (lambda: rg.at_add(WHOLE, 0, rg.tensor(1.5)), DTypeError, "astype"),
    (lambda: rg.pad(WHOLE, 1, constant_value=0.5), DTypeError, "constant_value"),
]  # fmt: skip

IMAGES = [
    (lambda: cv.conv2d(IMAGE[0, 0], W, 1, "same"), "rank 4.*NHWC.*rank 3.*(4, 2)"),
    (lambda: cv.conv2d(IMAGE, W[0], 1, "same"), r"filter must have rank 4.*in, out.*\(3, 2, 3\)"),
    (lambda: cv.conv2d(IMAGE, W[:, :, :1], 1, "same"), "have 2 channels.*takes 1.*in, out"),
    (lambda: cv.conv2d(IMAGE, rg.ones((5, 3, 2, 1)), 1, "valid"), "spans 5 elements of the height"),
    (lambda: cv.conv2d(IMAGE, W, 1, "valid", 2), "spans 5.*pad='same'"),
    (lambda: cv.conv1d(IMAGE, W, 1, "same"), "conv1d: x must have rank 3"),
    (lambda: cv.conv1d(IMAGE[0], W, 1, "same"), "conv1d: the filter must have rank 3"),
    (lambda: cv.conv3d(IMAGE[0, 0], W, 1, "same"), "depth, height, width, channels"),
    (lambda: cv.depthwise_conv2d(IMAGE, W[:, :, :1], 1, 1), "channels, multiplier"),
    (lambda: cv.separable_conv2d(IMAGE, W, W, 1, "same"), r"\(1, 1, in \* multiplier, out\)"),
    (lambda: cv.conv2d_transpose(IMAGE, W, (1, 4, 4), 1, "same"), "shape must have 4"),
    (lambda: cv.conv2d_transpose(IMAGE, W, (1, 4, 4, 5), 1, "same"), "5 channels"),
    (lambda: cv.conv2d_transpose(IMAGE, W, (1, 4, 4, 2), 1, "same"),
     r"x has the shape \(1, 4, 4, 2\), expected \(1, 4, 4, 3\)"),
    (lambda: pooling.max_pool(IMAGE[0, 0], 2, 2, "same"), "max_pool: x must have rank"),
    (lambda: pooling.avg_pool(IMAGE, 5, 1, "valid"), "avg_pool: a window that spans 5"),
    (lambda: pooling.max_pool(IMAGE, 2, 1, 2), "entirely in the padding"),
    (lambda: pooling.local_response_normalization(IMAGE[0, 0]), "rank 4"),
    (lambda: pooling.local_response_normalization(IMAGE, -1), ArgumentError, "depth_radius"),
    (lambda: pooling.local_response_normalization(IMAGE, 1.5), ArgumentError, "depth_radius"),
    (lambda: image.dilation2d(IMAGE, W, 1, "same"), r"\(height, width, 2\)"),
    (lambda: image.resize_bilinear(IMAGE[0, 0], (2, 2)), "rank 4"),
    (lambda: image.resize_nearest(IMAGE[:, :0], (2, 2)), "no pixels"),
    (lambda: image.resize_bilinear(IMAGE, (2, 0)), ArgumentError, "size must be a positive int"),
    (lambda: image.resize_bilinear(IMAGE, (2, 2), True, True), ArgumentError, "not both"),
    (lambda: image.space_to_batch(IMAGE, [3, 2], [[0, 0]] * 2), "block 3 does not div"),
    (lambda: image.space_to_batch(IMAGE, [2, 2], [[0, 0]]), "2 pairs of paddings"),
    (lambda: image.space_to_batch(IMAGE, 2, [[0, 0]]), ArgumentError, "must be lists"),
    (lambda: image.batch_to_space(IMAGE, [2, 1], [[0, 0], [0, 0]]), "not a multiple of the 2"),
    (lambda: image.batch_to_space(IMAGE, [1, 1], [[3, 2], [0, 0]]), "larger than the image"),
    (lambda: image.batch_to_space(IMAGE, [2], 0), ArgumentError, "must be lists"),
]  # fmt: skip

MATRICES = [
    *[(lambda a=a, b=b, o=o: linalg.matmul(rg.ones(a), rg.ones(b), **o),
       "".join(f"(?s:(?=.*{n}))" for n in (*a, *b)) + "(?s:.*)inner sizes differ")
      for a, b, o in [((2, 3), (2, 3), {}), ((2, 3), (3, 2), {"transpose_a": True}),
                      ((5, 2, 3), (4, 2), {}), ((3,), (2,), {})]],
    (lambda: linalg.matmul(rg.ones((2, 2)), 2.0), "use multiply"),
    (lambda: linalg.matmul(rg.ones(2), rg.ones((2, 2)), transpose_a=True),
     "transposes only matrices"),
    (lambda: linalg.matmul(rg.ones((2, 3, 4)), rg.ones((3, 4, 3))),
     r"MatMul.*broadcast.*\(2, 3, 4\)"),
    (lambda: linalg.tensordot(X, X.T, axes=([0], [0])), "equal sizes"),
    (lambda: linalg.tensordot(X, X.T, axes=3), "out of range"),
    (lambda: linalg.tensordot(SQUARE, SQUARE, axes=([0, 0], [0, 1])), ArgumentError, "twice"),
    (lambda: linalg.vecdot(X, rg.ones((2, 1))), "same size in both"),
    (lambda: linalg.vecdot(rg.ones((2, 2, 2)), rg.ones(2), axis=0), "count from the end"),
    (lambda: linalg.cross(rg.ones(2), rg.ones(2)), "3 elements"),
    (lambda: linalg.outer(SQUARE, rg.ones(2)), "two vectors"),
    (lambda: einsum("ij,jk", X), ArgumentError, "2 operands, got 1"),
    (lambda: einsum("ij", rg.ones((2, 3, 4))), ArgumentError, "rank 3"),
    (lambda: einsum("ij...", rg.ones(2)), ArgumentError, "rank 1"),
    (lambda: einsum("i1", X), ArgumentError, "axes are letters"),
    (lambda: einsum("ij->ii", X), ArgumentError, "must occur once"),
    (lambda: einsum("ij->k", X), ArgumentError, "must occur once"),
    (lambda: einsum("ij,jk->ik", X, X), "'j' has the sizes 3 and 2"),
    (lambda: einsum("ii", X), "'i' has the sizes 2 and 3"),
    (lambda: einsum("ij,jk->ik", rg.ones((2, 1)), X.T), "'j' has the sizes 1 and 3"),
    (lambda: einsum("...i,...i", X, rg.ones((4, 3))), "axis of '...' has the sizes 2 and 4"),
    (lambda: einsum(rg.ones(2), "i"), ArgumentError, "string"),
    *[(lambda f=f: f(X), r"square matrices.*\(2, 3\)")
      for f in (linalg.inv, linalg.det, linalg.slogdet, linalg.cholesky, linalg.eigh,
                linalg.eigvalsh, lambda x: linalg.solve(x, x),
                lambda x: linalg.triangular_solve(x, x))],
    (lambda: linalg.solve(rg.ones((3, 3)), X), r"\(3, 3\) and \(2, 3\)"),
    (lambda: linalg.solve(SQUARE, rg.ones(2)), np.linalg.LinAlgError, "[Ss]ingular"),
    (lambda: linalg.triangular_solve(rg.ones((3, 3)), 1.0), "vector of rank 1"),
    (lambda: linalg.matrix_norm(SQUARE, ord=3), ArgumentError, "ord must be"),
    (lambda: linalg.matrix_norm(rg.ones(3)), "takes matrices"),
    (lambda: linalg.matrix_power(X, 2), "square"),
    (lambda: linalg.matrix_power(SQUARE, 0.5), ArgumentError, "must be an int"),
    (lambda: linalg.expm(X), r"got \(2, 3\)"),
    (lambda: linalg.lstsq(X.T, rg.zeros(2)),
     r"same number of rows in b .* got \(3, 2\) and \(2,\)"),
    (lambda: linalg.lstsq(rg.zeros(3), rg.zeros(3)), "expected matrices"),
]  # fmt: skip

LOSSES = [
    (lambda: losses.mean_squared_error(SQUARE, SQUARE, [1.0, 2.0, 3.0]),
     r"weights of the shape \(3,\) do not broadcast"),
    (lambda: losses.mean_squared_error(SQUARE, SQUARE, np.ones((3, 2, 2))),
     r"weights of the shape \(3, 2, 2\) do not broadcast"),
    (lambda: losses.softmax_cross_entropy(SQUARE, SQUARE, np.ones((2, 1))),
     r"\(2, 1\) do not broadcast to the losses' shape \(2,\)"),
    (lambda: losses.cosine_distance(SQUARE, SQUARE, 1), TypeError, "axis"),
    (lambda: losses.sparse_softmax_cross_entropy(X, X), DTypeError,
     "labels must be integers .* got float32"),
    (lambda: losses.sparse_softmax_cross_entropy([[1], [2]], X),
     r"logits without the last axis, \(2,\); got \(2, 1\)"),
    (lambda: sparse([1.0, 2.0], X), DTypeError,
     "integers .* got float32; for probabilities call losses.so"),
    (lambda: sparse(X, [1, 2]), DTypeError, "integers .* got float32"),  # the wrong way round
    (lambda: sparse([True, False], X), DTypeError, "integers, got bools"),
    (lambda: sparse([[1, 2]], X), r"without the last axis, \(2,\); got \(1, 2\)"),
    (lambda: sparse(1, 2.0), "got logits of rank 0"),
    (lambda: sparse([0, 3], X), IndexError, "index 3 is out of bounds"),
    (lambda: sparse([0, -4], X), IndexError, "index -4 is out of bounds"),
    (lambda: sparse([0, 0], X[:, :0]), IndexError, "index 0 is out of range for an axis of size 0"),
    (lambda: nn.softmax(1.0), "axis -1 is out of range for a Tensor of rank 0"),
    (lambda: nn.batch_norm(X, 0.0, 1.0, scale=rg.ones((2,))),
     r"scale must broadcast to .* x, \(2, 3\); got \(2,\)"),
    (lambda: nn.batch_norm(X, rg.ones((4, 2, 3)), 1.0), r"mean must broadcast .* got \(4, 2, 3\)"),
    (lambda: nn.scaled_dot_product_attention(KEYS, KEYS[..., :3], KEYS),
     r"got \(2, 3, 4\), \(2, 3, 3\) and \(2, 3, 4\)"),
    (lambda: nn.scaled_dot_product_attention(KEYS, KEYS, KEYS, np.ones((3, 3), dtype=np.int64)),
     DTypeError, r"mask must be bools .* got int64"),
]  # fmt: skip

NUMBERS = [
    (lambda: rg.max(rg.asarray(np.array([1j, 2.0]))), DTypeError, "no order"),
    (lambda: reduction.vector_norm(rg.ones(2), ord="fro"), ArgumentError, "ord is a number.*'fro'"),
    *[row for f in (rg.cumulative_sum, rg.cumulative_prod, rg.cumulative_max, rg.cumulative_min)
      for row in [(lambda f=f: f(SQUARE), ArgumentError, r"\(2, 2\).*pass an axis"),
                  (lambda f=f: f(rg.scalar(1.0)), "rank 0"),
                  (lambda f=f: f(SQUARE, axis=2), "axis 2 is out of range")]],
    (lambda: rg.cumulative_sum(rg.ones(2), include_initial=True, exclusive=True), ArgumentError,
     r"include_initial.*exclusive"),
    *[(lambda f=f: f(rg.scalar(1.0)), "rank 0")
      for f in (rg.sort, rg.argsort, lambda x: rg.top_k(x, 1), rg.diff)],
    (lambda: rg.top_k(rg.ones(3), 4), r"k must be from 0 to 3.*3 elements along axis 0.*got 4"),
    (lambda: rg.top_k(rg.ones(3), -1), "got -1"),
    (lambda: rg.searchsorted(SQUARE, rg.ones(2)), "vector"),
    (lambda: rg.searchsorted(rg.ones(2), rg.ones(2), side="middle"), ArgumentError,
     "'left' or 'right', got 'middle'"),
    (lambda: rg.quantile([1.0], 0.5, method="cubic"), ArgumentError,
     "expected one of 'linear', .* for 'method', got 'cubic'"),
    (lambda: rg.quantile([1.0], [0.5, 1.5]), InvalidValueError,
     r"quantile: expected numbers in \[0, 1\] for 'q', got \[0.5, 1.5\]"),
    (lambda: rg.quantile([1.0], np.nan), InvalidValueError, "got nan"),
    (lambda: rg.arange(0, 5, 0), InvalidValueError, "arange: step is 0"),
    (lambda: rg.median(rg.asarray([1j])), DTypeError, "median: complex numbers have no order"),
    (lambda: rg.median(rg.zeros((0, 2)), axis=0),
     r"median: expected one element or more, got \(0, 2\) and axis=0"),
    (lambda: rg.multigammaln(3.0, 0), ArgumentError, "expected an int from 1 to 1000"),
    (lambda: rg.multigammaln(3.0, 10**18), ArgumentError, "got int: 1000000000000000000"),
    (lambda: rg.multigammaln(3.0, 1.5), ArgumentError, "got float: 1.5"),
    *[(lambda key=key: random.normal(key, (2,)), ArgumentError, "the key must be a NumPy Generator")
      for key in (None, True, 1.5, "seed", np.zeros(2), rg.zeros((2,)))],
    (lambda: random.normal(0, (2,), dtype=np.int32), DTypeError,
     "normal: the dtype must be a float dtype, got int32"),
    (lambda: random.normal(0, (3,), rg.zeros((2,))),
     r"shapes \(2,\) do not broadcast to the shape \(3,\)"),
    (lambda: random.uniform(0, (3,), rg.zeros((4, 3))),
     r"\(4, 3\) do not broadcast to the shape \(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize("row", [*ARRAYS, *INDICES, *IMAGES, *MATRICES, *LOSSES, *NUMBERS])
def test_a_call_is_refused(row):
    call, *error, words = row
    caught = refused(call, *(error or [ShapeError]), words)
    assert error == [TypeError] or isinstance(caught, RegradError)

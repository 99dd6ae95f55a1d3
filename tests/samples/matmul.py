"""Samples of matrix products and einsum."""

from __future__ import annotations

import numpy as np

from regrad.ops import matmul as products
from tests.samples import sample, spread

A, B = spread(2, 3), spread(3, 2, seed=1)
STACK = spread(2, 3, 2, seed=2)
SQUARE = spread(3, 3, seed=3)
VECTOR = spread(3, seed=4)
COMPLEX = spread(2, 2, seed=5) + 1j * spread(2, 2, seed=6)


def matmul_row(name, a, b, transpose_a=False, transpose_b=False):
    def reference(a, b):
        a = np.swapaxes(a, -1, -2) if transpose_a else a
        return a @ (np.swapaxes(b, -1, -2) if transpose_b else b)

    return sample(
        f"MatMul: {name}",
        lambda a, b: products.matmul(a, b, transpose_a, transpose_b),
        (a, b),
        covers="MatMul",
        reference=reference,
    )


def einsum_row(subscripts, *xs):
    return sample(
        f"Einsum: {subscripts} of {[x.shape for x in xs]}",
        lambda *xs: products.einsum(subscripts, *xs),
        xs,
        covers="Einsum",
        reference=lambda *xs: np.einsum(subscripts, *xs),
    )


SAMPLES = [
    matmul_row("two matrices", A, B),
    matmul_row("the first transposed", A.T.copy(), B, transpose_a=True),
    matmul_row("the second transposed", A, B.T.copy(), transpose_b=True),
    matmul_row("both transposed", A.T.copy(), B.T.copy(), True, True),
    matmul_row("vector and vector", VECTOR, spread(3, seed=7)),
    matmul_row("vector and matrix", VECTOR, B),
    matmul_row("vector and transposed matrix", VECTOR, A, transpose_b=True),
    matmul_row("matrix and vector", A, VECTOR),
    matmul_row("vector and stack", VECTOR, STACK),
    matmul_row("stack and vector", STACK, spread(2, seed=8)),
    matmul_row("stack and matrix", STACK, A),
    matmul_row("stack and transposed matrix", STACK, B, transpose_b=True),
    matmul_row("transposed stack and matrix", STACK, B, transpose_a=True),
    matmul_row("transposed stack and transposed matrix", STACK, A, True, True),
    matmul_row("matrix and stack", A, STACK),
    matmul_row("transposed matrix and stack", B, STACK, transpose_a=True),
    matmul_row("matrix and transposed stack", B.T.copy(), spread(2, 2, 3), transpose_b=True),
    matmul_row("transposed matrix and transposed stack", B, spread(2, 2, 3), True, True),
    matmul_row("stacks that broadcast", spread(2, 1, 2, 2), spread(3, 2, 1, seed=1)),
    matmul_row("stacks that broadcast, transposed", spread(2, 1, 2, 1), STACK, True, True),
    matmul_row("complex", COMPLEX, COMPLEX.T.copy() + 1),
    matmul_row("nothing to sum", np.zeros((2, 0)), np.zeros((0, 3))),
    matmul_row("an empty stack", np.zeros((0, 2, 3)), B),
    sample("MatMul: a product with itself", lambda x: products.matmul(x, x), SQUARE,
           covers="MatMul", reference=lambda x: x @ x),
    sample("tensordot over two axes", lambda a, b: products.tensordot(a, b, axes=2),
           (STACK, spread(3, 2, 2)), covers="MatMul", reference=lambda a, b: np.tensordot(a, b, 2)),
    sample("tensordot over named axes",
           lambda a, b: products.tensordot(a, b, axes=([-1, 0], [1, 2])),
           (STACK, spread(3, 2, 2)), covers="MatMul",
           reference=lambda a, b: np.tensordot(a, b, ([-1, 0], [1, 2]))),
    sample("tensordot over no axis", lambda a, b: products.tensordot(a, b, axes=0),
           (VECTOR, A), covers="MatMul", reference=lambda a, b: np.tensordot(a, b, 0)),
    sample("vecdot with broadcasting", products.vecdot, (A, VECTOR), reference=np.vecdot),
    sample("vecdot along another axis", lambda a, b: products.vecdot(a, b, axis=-2),
           (STACK, spread(3, 1, seed=1)),
           reference=lambda a, b: np.linalg.vecdot(a, b + 0 * a[0], axis=-2)),
    sample("vecdot of complex vectors", products.vecdot, (COMPLEX, COMPLEX.T.copy() - 1),
           reference=np.vecdot),
    sample("outer", products.outer, (VECTOR, spread(2)), reference=np.outer),
    sample("kron of matrices", products.kron, (A, spread(2, 1)), reference=np.kron),
    sample("kron of different ranks", products.kron, (VECTOR, spread(2, 2)), reference=np.kron),
    sample("Cross", products.cross, (A, A[::-1] ** 2 + 1), covers="Cross", reference=np.cross),
    sample("Cross along another axis, broadcast", lambda a, b: products.cross(a, b, axis=-2),
           (SQUARE, spread(3, 1)), covers="Cross",
           reference=lambda a, b: np.cross(a, b, axis=-2)),
    einsum_row("ij,jk->ik", A, B),
    einsum_row("ij,jk", A, B),
    einsum_row("ba", A),
    einsum_row("ij->", A),
    einsum_row("ij->j", A),
    einsum_row("ii", SQUARE),
    einsum_row("ii->i", SQUARE),
    einsum_row("iii->i", spread(2, 2, 2)),
    einsum_row("iij->j", spread(2, 2, 3)),
    einsum_row("ii,i->i", SQUARE, VECTOR),
    einsum_row("ii,jj->ij", spread(2, 2), SQUARE),
    einsum_row("ij,kl->i", A, B),
    einsum_row("i,j,k->kji", spread(2), VECTOR, spread(2, seed=9)),
    einsum_row("ij,jk,kl->il", A, B, spread(2, 2)),
    einsum_row("bij,bjk->bik", STACK, spread(2, 2, 1)),
    einsum_row("...ij,...jk->...ik", spread(2, 1, 1, 2), spread(3, 2, 1)),
    einsum_row("...,...", VECTOR, spread(2, 1)),
    einsum_row("...i->...", STACK),
    einsum_row("i...->...i", STACK),
    einsum_row("->", np.asarray(1.5)),
    einsum_row(",i->i", np.asarray(1.5), VECTOR),
    einsum_row("ij,jk->ik", np.zeros((2, 0)), np.zeros((0, 2))),
    einsum_row("ij,jk->ki", COMPLEX, COMPLEX + 1),
    sample("Einsum: one tensor twice", lambda x: products.einsum("ij,ik->jk", x, x), A,
           covers="Einsum", reference=lambda x: x.T @ x),
]  # fmt: skip

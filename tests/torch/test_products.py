"""Sums of products are taken apart as torch itself does it, axes of no and of one element included.

autograd's record of a plain call says which products there are. Hooks on their nodes scale the
gradients as the rules below do, so both must give the same.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import regrad.torch as rt
from regrad.errors import PassedOverError, UnknownOpError

pytestmark = pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")

# Nodes that are products, and where the first factor stands among their inputs.
PRODUCTS = {
    "Bmm": 0, "Mm": 0, "Mv": 0, "Dot": 0, "Vdot": 0, "Linear": 0, "Addmm": 1, "Baddbmm": 1,
    "Addmv": 1, "Addbmm": 1,
}  # fmt: skip


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]
    shapes: Sequence[Sequence[int]]

    def inputs(self) -> list[Any]:
        torch.manual_seed(0)
        return [(torch.rand(tuple(s)).double() + 0.5).requires_grad_() for s in self.shapes]


def rule(function: Callable[..., Any], factors: tuple[int, int]) -> Any:
    """The native gradient, times a number for each factor."""

    def scaled(dy: Any, a: Any, b: Any) -> Any:
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            dxs = torch.autograd.grad(function(a, b), (a, b), dy)
        return tuple(k * dx for k, dx in zip(factors, dxs, strict=True))

    return scaled


def rules(factors: tuple[int, int]) -> dict[str, Any]:
    return {"MatMul": rule(torch.matmul, factors), "Mul": rule(torch.mul, factors)}


def recorded(y: Any) -> Iterator[tuple[str, int, Any]]:
    """The products in autograd's record: op type, where the first factor stands, and node."""
    seen, stack = set(), [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [behind for behind, _ in node.next_functions]
        name = node.name().removesuffix("0").removesuffix("Backward")
        if name in PRODUCTS or name == "Mul":
            yield "MatMul" if name in PRODUCTS else name, PRODUCTS.get(name, 0), node


def gradients(y: Any, xs: Sequence[Any]) -> list[Any]:
    weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    dxs = torch.autograd.grad((y * weights).sum(), xs, allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx for dx, x in zip(dxs, xs, strict=True)]


def expected(case: Case, op_type: str, factors: tuple[int, int]) -> tuple[Any, list[Any], int]:
    """Value, gradients and number of products, as autograd's record has them."""
    xs = case.inputs()
    y = case.function(*xs)
    found = [(first, node) for t, first, node in recorded(y) if t == op_type]
    for first, node in found:

        def hook(dxs: Any, dys: Any, first: int = first) -> Any:
            scales = [1] * first + [*factors]
            return tuple(dx if dx is None else k * dx for k, dx in zip(scales, dxs, strict=False))

        node.register_hook(hook)
    return y.detach(), gradients(y, xs), len(found)


def differs(case: Case) -> str:
    """How a case differs from the record, in a scope; nothing if it does not, or is refused."""
    # (torch.matmul, which is one op here, swaps its operands inside where it folds a batch)
    factors = (3, 3) if case.name.startswith("matmul") else (3, 2)
    for op_type, scaled in rules(factors).items():
        try:
            value, due, count = expected(case, op_type, factors)
        except (RuntimeError, ArithmeticError):  # (opt_einsum 3.3 divides by sizes of 0)
            return ""  # the call is none
        xs = case.inputs()
        try:
            with rt.gradient_override_map({op_type: scaled}) as used:
                y = case.function(*xs)
        except PassedOverError:
            REFUSED[case.name.split()[0]] += 1
            continue
        hits = sum(hit.count for hit in used.hits)
        if hits != count:
            return f"{op_type}: {hits} hits, and the record has {count}"
        if not torch.equal(y, value):
            return f"{op_type}: another value"
        if not all(map(torch.allclose, gradients(y, xs), due)):
            return f"{op_type}: another gradient"
    return ""


REFUSED: Counter[str] = Counter()


def differing(cases: Iterator[Case]) -> dict[str, str]:
    REFUSED.clear()
    return {f"{c.name} {c.shapes}": said for c in cases if (said := differs(c))}


# -- einsum ----------------------------------------------------------------------------------------

EQUATIONS = """
ij,jk->ik ij,jk->ki ij,ij-> ij,ij->ij ij,ji-> i,i-> i,j->ij i,j->ji ij,kj->ik bij,bjk->bik
bij,bjk->ikb zuv,zu,zv->z zuv,zu,zv-> ij,jk,kl->il ij,jk,kl,lm->im ij,jk,ki-> i,i,i->i i,i,i->
aij,bjk->abik iij,jk->ik iij,jjk->ik ij,ik->jk bi,bj,bk->bijk ij,j->i i,ij->j ,i->i ij,kl-> ij,jk
abc,bcd->ad abc,cd->abd bhid,bhjd->bhij zi,zj,zijk->zk
"""


def einsum(equation: str, shapes: Sequence[Sequence[int]]) -> Case:
    return Case(f"einsum {equation}", lambda *xs: torch.einsum(equation, *xs), shapes)


def equations() -> Iterator[Case]:
    """Every equation over sizes of 0, 1 and 3, and with one operand that is broadcast."""
    for equation in EQUATIONS.split():
        words = equation.partition("->")[0].split(",")
        letters = sorted({c for word in words for c in word})
        choices = (0, 1, 3) if len(letters) < 4 else (1, 3)
        for sizes in itertools.product(choices, repeat=len(letters)):
            size = dict(zip(letters, sizes, strict=True))
            yield einsum(equation, [[size[c] for c in word] for word in words])
        for i, word in enumerate(words):
            for letter in sorted(set(word)):
                small = [
                    [1 if k == i and c == letter else 3 for c in w] for k, w in enumerate(words)
                ]
                yield einsum(equation, small)


def drawn(count: int) -> Iterator[Case]:
    """Equations drawn at random: ellipses, repeated letters, any order, no arrow."""
    draw = random.Random(0)
    for _ in range(count):
        letters = draw.sample("abcdefABz", draw.randint(1, 5))
        size = {c: draw.choice([0, 1, 1, 2, 3, 3]) for c in letters}
        words, shapes, has_dots = [], [], draw.random() < 0.3
        for _ in range(draw.randint(2, 4)):
            word = [draw.choice(letters) for _ in range(draw.randint(0, 4))]
            own = {c: 1 if draw.random() < 0.1 else size[c] for c in word}
            parts = [(c, [own[c]]) for c in word]
            if has_dots and draw.random() < 0.7:
                dots = ("...", draw.choice([[], [2], [1, 2], [1]]))
                parts.insert(draw.randint(0, len(parts)), dots)
            words.append("".join(c for c, _ in parts))
            shapes.append([n for _, sizes in parts for n in sizes])
        equation, used = ",".join(words), sorted({c for w in words for c in w if c != "."})
        if draw.random() < 0.8:
            out = draw.sample(used, draw.randint(0, len(used)))
            if has_dots and draw.random() < 0.8:
                out.insert(draw.randint(0, len(out)), "...")
            equation += "->" + "".join(out)
        yield einsum(equation, shapes)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("planned", [True, False])
def test_einsum(planned, monkeypatch):
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", planned)
    assert differing(equations()) == {}
    assert differing(drawn(400)) == {}
    assert not REFUSED


# -- the others ------------------------------------------------------------------------------------


def chain(*xs: Any) -> Any:
    return torch.linalg.multi_dot(xs)


# Functions, and shapes of their arguments: letters of sizes, and sizes.
FORMS: dict[Any, str] = {
    torch.matmul: "ab,bc ab,b b,bc 2ab,bc 1ab,2bc 21ab,3bc", torch.mm: "ab,bc", torch.outer: "a,b",
    torch.bmm: "abc,ac2 abc,ac1", torch.mv: "ab,b", torch.dot: "a,a", torch.vdot: "a,a",
    torch.addmm: "ac,ab,bc c,ab,bc", torch.addmv: "a,ab,b", torch.addbmm: "ac,2ab,2bc",
    torch.baddbmm: "2ac,2ab,2bc 1ac,1ab,1bc", F.linear: "ab,cb,c 2ab,cb b,cb,c",
    torch.inner: "ab,cb b,b ,ab", torch.kron: "ab,c2", torch.linalg.vecdot: "ab,1b",
    chain: "ab,bc,c2 a,ab,bc a,ab,b 2a,ab,bc,c3 2a,ab,bc,c1,13",
}  # fmt: skip
DIMS: dict[Any, str] = {
    0: "ab,c", 1: "ab,bc", 2: "abc,bc2", 3: "abc,abc", ((1, 0), (0, 1)): "abc,ba",
    ((1,), (0,)): "ab,1c", ((0, 1), (1, 0)): "1b,ba",
}  # fmt: skip


def others() -> Iterator[Case]:
    for sizes in itertools.product("013", repeat=3):
        named = str.maketrans(dict(zip("abc", sizes, strict=True)))

        def shapes(words: str, named: Any = named) -> list[list[int]]:
            return [[*map(int, word)] for word in words.translate(named).split(",")]

        for dims, words in DIMS.items():
            yield Case(f"tensordot {dims}", partial(torch.tensordot, dims=dims), shapes(words))
        transposed = lambda x, y: torch.tensordot(x.T, y, 2)  # noqa: E731
        yield Case("tensordot of a transpose", transposed, shapes("ab,ba"))
        for function, words in FORMS.items():
            name = function.__name__.removeprefix("linalg_")
            yield from (Case(name, function, shapes(each)) for each in words.split())


@pytest.mark.slow
@pytest.mark.versions
def test_other_products():
    assert differing(others()) == {}
    assert set(REFUSED) == {"kron", "vecdot"}  # by name, where Mul is overridden


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)])
def test_bilinear_is_two_products(size, batch):
    """Which is how its documentation has it: torch computes it in one op."""
    shapes = [(*batch, size), (*batch, 2), (4, size, 2), (4,)]
    case = Case("bilinear", F.bilinear, shapes)
    xs = case.inputs()
    own = gradients(F.bilinear(*xs), xs)
    with rt.gradient_override_map({"MatMul": rule(torch.matmul, (3, 3))}) as used:
        y = F.bilinear(*xs)
    assert sum(hit.count for hit in used.hits) == 2
    for got, plain, factor in zip(gradients(y, xs), own, (9, 3, 9, 1), strict=True):
        torch.testing.assert_close(got, factor * plain)


def test_untouched_of_one_type_shows_all_that_compute_it():
    x = torch.randn(2, 1, 3, 4, requires_grad=True)
    with rt.gradient_override_map({"Tanh": lambda dy: dy}) as used:
        y = torch.tanh(F.scaled_dot_product_attention(x, x, x))
        F.mse_loss(torch.einsum("bhij,bhkj->bhik", y, y), x @ x.mT).backward()
    names = [row[0].partition(" ")[0] for row in used.untouched(only="MatMul").rows]
    assert names == [
        "MatMul", "torch.einsum", "torch.nn.functional.scaled_dot_product_attention"
    ]  # fmt: skip
    others = used.untouched(only=(F.mse_loss, "Tanh", "Softmax"))
    assert [row[0].rpartition(".")[2].partition(" ")[0] for row in others.rows] == [
        "mse_loss", "scaled_dot_product_attention"
    ]  # fmt: skip
    with pytest.raises(UnknownOpError, match="Did you mean 'MatMul'"):
        used.untouched(only="Matmull")


def test_a_difference_is_seen():
    assert differs(Case("wrong", lambda x: x.sin(), [(3,)])) == ""

    def hides(*xs: Any) -> Any:  # a product that the record has, and the rule does not meet
        with torch._C.DisableTorchFunction():
            return torch.einsum("ij,jk->ik", *xs)

    assert differs(Case("hides", hides, [(3, 3), (3, 3)])) == "MatMul: 0 hits, and the record has 1"

"""The methods of Tensor and Variable: Python's operators, and methods named as in TensorFlow.js."""

# isort: skip_file
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from regrad.core import dispatch
from regrad.core.backends import is_array
from regrad.core.hints import hint_at
from regrad.core.names import ATTRIBUTES, CHANGES
from regrad.core.shapes import Axis
from regrad.core.tensor import Readable, Tensor, TensorLike
from regrad.errors import ArgumentError, NoTransposeError, camel_case
from regrad.ops import (
    array,
    binary,
    creation,
    elementwise,
    getitem,
    indexing,
    joining,
    printing,
    reduction,
    scan,
    sorting,
    torch_and_jax,
)
from regrad.ops import matmul as products


def _reducing(reduce: Callable[..., Tensor]) -> Any:
    """Return the method of a reduction. It also accepts its options by position."""
    name = reduce.__name__

    def method(self: Tensor, axis: Axis = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        if unknown:  # the op raises an error that lists its options
            return reduce(self, axis=axis, keepdims=keepdims, **unknown)
        return reduce(self, axis=axis, keepdims=keepdims)

    method.__name__, method.__qualname__ = name, f"Tensor.{name}"
    method.__doc__ = f"Reduce over `axis` (all axes by default); see `regrad.{name}`."
    return method


def _reflected(function: Callable[..., Tensor]) -> Any:
    """Return the method of an operator whose left operand is not a Tensor."""

    def method(self, other: TensorLike) -> Tensor:
        return function(other, self)

    return method


def _comparing(function: Callable[..., Tensor]) -> Any:
    def method(self, other: object) -> Tensor:
        try:
            return function(self, other)
        except ArgumentError:
            if _can_be_tensor(other):
                raise
            return NotImplemented  # then Python returns False, as for `x == None`

    return method


def _can_be_tensor(value: object) -> bool:
    """Return whether an op accepts values of this kind, so that a comparison is meaningful."""
    if isinstance(value, Tensor | Readable | bool | int | float | complex | list | tuple):
        return True
    return is_array(value) or hasattr(value, "__array__")


class At:
    """`x.at`: indexed updates of a Tensor, in JAX's notation.

    >>> import regrad as rg
    >>> rg.tensor([1.0, 2.0, 3.0]).at[1:].set(0.0).print()
    Tensor
        [1, 0, 0]
    """

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __getitem__(self, index: Any) -> IndexedElements:
        return IndexedElements(self.x, index)


class IndexedElements:
    """`x.at[index]`: elements of a Tensor, to read, replace or add to."""

    __slots__ = ("index", "x")

    def __init__(self, x: Any, index: Any) -> None:
        self.x = x
        self.index = index

    def get(self) -> Tensor:
        """Return the elements, `x[index]`."""
        return getitem.getitem(self.x, self.index)

    def set(self, y: TensorLike) -> Tensor:
        """Return x with these elements replaced by y; see `regrad.at_set`."""
        return getitem.at_set(self.x, self.index, y)

    def add(self, y: TensorLike) -> Tensor:
        """Return x with y added to these elements. Repeated indices add up; see `at_add`."""
        return getitem.at_add(self.x, self.index, y)


class Methods:
    """Operators and methods that call the ops. They compute nothing themselves."""

    __slots__ = ()

    # -- Python's operators ----------------------------------------------------------------

    __add__ = binary.add
    __sub__ = binary.subtract
    __mul__ = binary.multiply
    __truediv__ = binary.divide
    __floordiv__ = binary.floor_divide
    __mod__ = binary.remainder
    __pow__ = binary.pow
    __and__ = binary.bitwise_and
    __or__ = binary.bitwise_or
    __xor__ = binary.bitwise_xor
    __lshift__ = binary.bitwise_left_shift
    __rshift__ = binary.bitwise_right_shift
    __lt__ = binary.less
    __le__ = binary.less_equal
    __gt__ = binary.greater
    __ge__ = binary.greater_equal
    __neg__ = elementwise.negative
    __abs__ = elementwise.abs
    __invert__ = elementwise.bitwise_invert
    __matmul__ = products.matmul
    __getitem__ = getitem.getitem

    __eq__ = _comparing(binary.equal)
    __ne__ = _comparing(binary.not_equal)

    def __pos__(self: Any) -> Tensor:
        return self

    def __round__(self, digits: int | None = None) -> Tensor:
        if not digits:
            return elementwise.round(self)
        scale = 10.0**digits
        return binary.divide(elementwise.round(binary.multiply(self, scale)), scale)

    def __divmod__(self, other: TensorLike) -> tuple[Tensor, Tensor]:
        return binary.floor_divide(self, other), binary.remainder(self, other)

    def __rdivmod__(self, other: TensorLike) -> tuple[Tensor, Tensor]:
        return binary.floor_divide(other, self), binary.remainder(other, self)

    __radd__ = _reflected(binary.add)
    __rsub__ = _reflected(binary.subtract)
    __rmul__ = _reflected(binary.multiply)
    __rtruediv__ = _reflected(binary.divide)
    __rfloordiv__ = _reflected(binary.floor_divide)
    __rmod__ = _reflected(binary.remainder)
    __rpow__ = _reflected(binary.pow)
    __rmatmul__ = _reflected(products.matmul)
    __rand__ = _reflected(binary.bitwise_and)
    __ror__ = _reflected(binary.bitwise_or)
    __rxor__ = _reflected(binary.bitwise_xor)
    __rlshift__ = _reflected(binary.bitwise_left_shift)
    __rrshift__ = _reflected(binary.bitwise_right_shift)

    def __iter__(self: Any) -> Iterator[Tensor]:
        if not self.ndim:
            raise ArgumentError("a Tensor of rank 0 cannot be iterated over; x.item() is its value")
        return iter(joining.unstack(self))

    @property
    def T(self) -> Tensor:  # the standard's name
        """The transpose of a matrix."""
        x = dispatch.lift(self)
        if x.ndim != 2:
            raise NoTransposeError(
                f"T is for matrices, got the shape {x.shape}; use matrix_transpose or permute_dims"
            )
        return array.permute_dims(x)

    @property
    def itemsize(self: Any) -> int:
        """The size of one element in bytes."""
        return self.dtype.itemsize

    @property
    def nbytes(self: Any) -> int:
        """The size of all elements in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def mT(self: Any) -> Tensor:
        """The Tensor with its last two axes swapped."""
        if self.ndim < 2:
            raise NoTransposeError(f"mT needs rank 2 or more, got the shape {self.shape}")
        return array.matrix_transpose(self)

    def to_device(self, device: Any, /, *, stream: Any = None) -> Tensor:
        """Return this tensor on a device; the same Tensor if it lies there.

        Args:
            device: "cpu" (which means NumPy data), a `jax.Device` or sharding, or a
                `torch.device`.
            stream: Must be None, because libraries choose their own streams.

        Raises DeviceError for any other device. The gradient is moved back to the device of x.

        Source: the Array API standard.
        """
        if stream is not None:
            raise ArgumentError(f"to_device: expected None for 'stream', got {stream!r}")
        return creation.on_device(dispatch.lift(self), device)

    # -- functions of PyTorch and JAX, see regrad.ops.torch_and_jax --------------------------------

    __torch_function__ = classmethod(torch_and_jax.torch_function)
    __jax_array__ = property(torch_and_jax.jax_array)

    # -- as text ---------------------------------------------------------------------------

    def to_string(self, verbose: bool = False) -> str:
        """Return the values as TensorFlow.js prints them; `verbose` adds dtype, rank and shape."""
        return printing.to_string(self, verbose)

    def print(self, verbose: bool = False) -> None:
        """Print the values as TensorFlow.js does."""
        print(printing.to_string(self, verbose))

    def __str__(self) -> str:
        return printing.text_of(self)

    def __repr__(self) -> str:
        return printing.repr_of(self)

    def _repr_html_(self) -> str:
        return printing.to_html(self)

    # -- TensorFlow.js's methods that are ops unchanged --------------------------------------

    from regrad.ops.array import expand_dims, squeeze, swapaxes, broadcast_to, tile
    from regrad.ops.binary import (
        isclose, clip, clip as clip_by_value, add, subtract as sub, multiply as mul, divide as div,
        floor_divide as floor_div, remainder as mod, pow, maximum, minimum, squared_difference,
        atan2, equal, not_equal, less, less_equal, greater, greater_equal, logical_and, logical_or,
        logical_xor,
    )  # fmt: skip
    from regrad.ops.creation_like import zeros_like, ones_like
    from regrad.ops.casting import (
        identity as clone, identity as copy, stop_gradient as detach, astype, astype as cast,
    )  # fmt: skip
    from regrad.ops.elementwise import (
        abs, negative as neg, sign, square, sqrt, rsqrt, reciprocal, exp, expm1, log, log1p, sin,
        cos, tan, asin, acos, atan, sinh, cosh, tanh, asinh, acosh, atanh, erf, ceil, floor, round,
        step, isnan, isinf, isfinite, logical_not,
    )  # fmt: skip
    from regrad.ops.indexing import segment_sum as unsorted_segment_sum
    from regrad.ops.joining import split
    from regrad.ops.matmul import matmul, matmul as dot
    from regrad.ops.reduction import allclose
    from regrad.ops.slicing import slice, pad
    from regrad.ops.sorting import quantile

    # -- elementwise, with the tensor as another argument ------------------------------------

    def where(self, condition: TensorLike, b: TensorLike) -> Tensor:
        """Return this tensor where `condition` is true, `b` elsewhere; see `regrad.where`."""
        return binary.where(condition, self, b)

    # -- reductions and scans: axis and keepdims by position, as in TensorFlow.js --------------

    sum = _reducing(reduction._sum)
    mean = _reducing(reduction.mean)
    prod = _reducing(reduction._prod)
    max = _reducing(reduction.max)
    min = _reducing(reduction.min)
    all = _reducing(reduction.all)
    any = _reducing(reduction.any)
    logsumexp = _reducing(reduction.logsumexp)
    std = _reducing(reduction.std)
    var = _reducing(reduction.var)
    median = _reducing(sorting.median)

    def norm(self, ord: float | str = 2, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the vector norm over `axis`; see `regrad.linalg.vector_norm`."""
        names: dict[Any, Any] = {"euclidean": 2, "fro": 2, "inf": float("inf")}  # TensorFlow.js's
        return reduction.vector_norm(self, axis=axis, keepdims=keepdims, ord=names.get(ord, ord))

    def argmax(self, axis: int | None = None) -> Tensor:
        """Return the index of the maximum; see `regrad.argmax`."""
        return reduction.argmax(self, axis=axis)

    def argmin(self, axis: int | None = None) -> Tensor:
        """Return the index of the minimum; see `regrad.argmin`."""
        return reduction.argmin(self, axis=axis)

    def cumsum(self, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """Return the cumulative sum; see `regrad.cumulative_sum`."""
        return scan.cumulative_sum(self, axis=axis, exclusive=exclusive, reverse=reverse)

    def cumprod(self, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """Return the cumulative product; see `regrad.cumulative_prod`."""
        return scan.cumulative_prod(self, axis=axis, exclusive=exclusive, reverse=reverse)

    def topk(self, k: int = 1) -> tuple[Tensor, Tensor]:
        """Return the k largest elements of the last axis and their indices; see `regrad.top_k`."""
        return sorting.top_k(self, k)

    # -- shape and indexing ----------------------------------------------------------------------

    def reshape(self, *shape: Any) -> Tensor:
        """Return the elements in another shape, passed as one argument or as one per size."""
        return array.reshape(self, shape[0] if len(shape) == 1 else shape)

    def transpose(self, *axes: Any) -> Tensor:
        """Return the axes in another order (default: reversed), passed as one argument or more."""
        return array.permute_dims(self, *(axes if len(axes) < 2 else (axes,)))

    def flatten(self) -> Tensor:
        """Return the elements in one axis."""
        return array.reshape(self, (-1,))

    ravel = flatten

    @property
    def at(self) -> At:
        """`x.at[index].set(y)` and `.add(y)`: `at_set` and `at_add` in JAX's notation."""
        return At(self)

    def concat(self, others: TensorLike | Sequence[TensorLike], axis: int = 0) -> Tensor:
        """Return this tensor joined with others along an axis; see `regrad.concat`."""
        others = others if isinstance(others, list | tuple) else [others]
        return joining.concat([self, *others], axis=axis)

    def stack(self, others: TensorLike | Sequence[TensorLike], axis: int = 0) -> Tensor:
        """Return this tensor and others joined along a new axis; see `regrad.stack`."""
        others = others if isinstance(others, list | tuple) else [others]
        return joining.stack([self, *others], axis=axis)

    def unstack(self, axis: int = 0) -> tuple[Tensor, ...]:
        """Return the slices along an axis; see `regrad.unstack`."""
        return joining.unstack(self, axis=axis)

    def reverse(self, axis: Axis = None) -> Tensor:
        """Return the elements in reverse order along axes; see `regrad.flip`."""
        return array.flip(self, axis=axis)

    def gather(self, indices: TensorLike, axis: int = 0, batch_dims: int = 0) -> Tensor:
        """Return the slices with the given indices; see `regrad.take`."""
        return indexing.take(self, indices, axis=axis, batch_dims=batch_dims)

    def take(self: Any, indices: TensorLike, axis: int | None = None) -> Tensor:
        """Return slices by index; without `axis`, of the flattened elements; see `regrad.take`."""
        x = self if axis is not None or self.ndim == 1 else array.reshape(self, (-1,))
        return indexing.take(x, indices, axis=axis)

    def repeat(self, repeats: Any, axis: int | None = None) -> Tensor:
        """Repeat each element, like NumPy; see `regrad.repeat`. (PyTorch's repeat is `tile`.)"""
        return indexing.repeat(self, repeats, axis=axis)

    def sort(self, axis: int = -1, descending: bool = False) -> Tensor:
        """Return the elements sorted along `axis`; see `regrad.sort`."""
        return sorting.sort(self, axis=axis, descending=descending)

    def argsort(self, axis: int = -1, descending: bool = False) -> Tensor:
        """Return the indices that sort along `axis`; see `regrad.argsort`."""
        return sorting.argsort(self, axis=axis, descending=descending)

    # -- linear algebra and networks ---------------------------------------------------------------


class Late:
    """A method that is a function of a module. The first use of the method imports the module."""

    def __init__(self, module: str, name: str, method: str) -> None:
        self.module, self.name, self.method = module, name, method

    def __get__(self, instance: object, owner: type) -> Any:
        function = getattr(import_module(f"regrad.ops.{self.module}"), self.name)
        for each in (Methods, Tensor):
            if vars(each).get(self.method) is self:
                setattr(each, self.method, function)
        return function.__get__(instance, owner)


LATE = {  # by module: `function` or `method=function`
    "activation": "relu relu6 leaky_relu prelu elu selu sigmoid log_sigmoid softplus softmax "
    "log_softmax",
    "convolution": "conv1d conv2d conv2d_transpose depthwise_conv2d separable_conv2d",
    "image": "resize_bilinear resize_nearest_neighbor=resize_nearest "
    "space_to_batch_nd=space_to_batch batch_to_space_nd=batch_to_space",
    "indices": "one_hot",
    "normalization": "batch_norm",
    "numpy_protocol": "__array_ufunc__=array_ufunc __array_function__=array_function",
    "pooling": "max_pool avg_pool local_response_normalization",
    "special": "nan_to_num sinc xlogy",
}
for _module, _names in LATE.items():
    for _name in _names.split():
        _called, _, _function = _name.partition("=")
        setattr(Methods, _called, Late(_module, _function or _called, _called))

# Names from other libraries raise an error that names the regrad method, also for TensorFlow.js's
# spelling of regrad's names. A __getattr__ would slow down every attribute.
for _name in list(vars(Methods)):
    if not _name.startswith("_"):
        ATTRIBUTES.setdefault(f"{_name}_", CHANGES)
    if not _name.startswith("_") and (_camel := camel_case(_name)) != _name:
        ATTRIBUTES[_camel] = f"It is called {_name} here."
hint_at(Methods, ATTRIBUTES)

# Tensor is defined before any op exists, so it gets its methods here.
for _name, _method in list(vars(Methods).items()):
    if _name not in ("__module__", "__doc__", "__slots__", "__dict__", "__weakref__"):
        setattr(Tensor, _name, _method)

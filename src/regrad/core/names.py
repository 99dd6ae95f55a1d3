"""Names of other libraries, with their replacement in regrad: the tables behind `hints`."""


def _use(instead: dict[str, str]) -> dict[str, str]:
    return {name: f"Use {ours}." for name, ours in instead.items()}


FUNCTIONS = "regrad differentiates functions: grad(f)(x), or variable_grads(f) for Variables."
CHANGES = "A Tensor never changes: make a new one, by x + y or by regrad.at_set."
ATTRIBUTES: dict[str, str] = {  # attributes of a Tensor
    **dict.fromkeys(["backward", "grad", "grad_fn"], FUNCTIONS),
    **dict.fromkeys(["is_leaf", "requires_grad", "requires_grad_", "retain_grad"], FUNCTIONS),
    **dict.fromkeys(["copy_", "fill_", "put"], CHANGES),
    "contiguous": "Leave it out.", "cpu": "Use x.numpy() for NumPy's data; device_put moves JAX's.",
    "fill": "A Tensor never changes; use full_like(x, value).",
    "register_hook": 
    "To read or change a gradient in the backward pass, use custom_grad or gradient_override_map.",
    "zero_": "A Tensor never changes; use zeros_like(x).",
    "bufferSync": "A Tensor never changes; x.numpy() is a view of its values.",
    "dispose": "Leave it out: Python frees unused objects.",
    "isDisposed": "Leave it out: Python frees unused objects.",
    "matMul": "It is called matmul here, or @.", "set_shape": "A Tensor's shape is always known.",
    **_use({
        "clamp": "regrad.clip(x, low, high)", "cuda": "device_put(x, device), with data of JAX",
        "detach_": "stop_gradient(x)", "dim": "x.ndim", "double": "x.cast(regrad.float64)",
        "float": "x.cast(regrad.float32)", "half": "x.cast(regrad.float16)",
        "index_select": "x.gather(indices, axis)", "int": "x.cast(regrad.int32)",
        "long": "x.cast(regrad.int64)", "nelement": "x.size", "numel": "x.size",
        "permute": "x.transpose(axes)", "scatter_add": "at_add(x, index, value)", "t": "x.T",
        "to": "x.cast(dtype), or device_put(x, device) with data of JAX",
        "type": "x.cast(dtype), or x.dtype", "unsqueeze": "x.expand_dims(axis)",
        "view": "x.reshape(shape)", "arraySync": "x.tolist()", "array_sync": "x.tolist()",
        "asScalar": "x.item() for the number", "as1D": "x.flatten()",
        "as2D": "x.reshape(rows, columns)", "bool": "x.cast(regrad.bool)",
        "byte": "x.cast(regrad.uint8)", "chunk": "x.split(number, axis)", "compress": "x[mask]",
        "conj": "regrad.conj(x)", "cummax": "regrad.cumulative_max(x)", "dataSync": "x.numpy()",
        "data_sync": "x.numpy()", "diagonal": "regrad.linalg.diagonal(x)",
        "expand": "x.broadcast_to(shape)", "get_shape": "x.shape", "imag": "regrad.imag(x)",
        "masked_fill": "regrad.where(mask, value, x)", "mm": "x @ y", "narrow": "x[start:stop]",
        "nonzero": "regrad.nonzero(x)", "outer": "regrad.linalg.outer(x, y)",
        "ptp": "x.max() - x.min()", "real": "regrad.real(x)", "resize": "x.reshape(shape)",
        "searchsorted": "regrad.searchsorted(x, values)", "trace": "regrad.linalg.trace(x)",
        "tril": "regrad.tril(x)", "triu": "regrad.triu(x)",
    }),
}  # fmt: skip
_LAYERS = "Layers are functions here: x @ w + b, of Variables in a regrad.Module."
_SEED = "There is no global seed: regrad.random.normal(0, (2,)) takes a seed, a Generator or a key."
_CLOSURE = "Use custom_grad(f), where f returns the value and its gradient function."
NAMES: dict[str, str] = {  # names in the package
    **dict.fromkeys(["Dense", "layers", "Linear"], _LAYERS),
    **dict.fromkeys(["Function", "custom_jvp", "custom_vjp"], _CLOSURE),
    **dict.fromkeys(["GradientTape", "autograd", "backward", "enable_grad"], FUNCTIONS),
    **dict.fromkeys(["PRNGKey", "manual_seed", "seed", "set_random_seed"], _SEED),
    "DataLoader": "regrad.train.fit takes any iterable of batches.",
    "F": "Its functions are in regrad.nn: regrad.nn.relu.",
    "Session": "It is in regrad.v1, with the rest of TensorFlow 1.",
    "arccos": "It is called acos, as in the Array API standard.",
    "arcsin": "It is called asin, as in the Array API standard.",
    "arctan": "It is called atan, as in the Array API standard.",
    "cumprod": "It is called cumulative_prod, as in the Array API standard.",
    "cumsum": "It is called cumulative_sum, as in the Array API standard.",
    "functional": "Its functions are in regrad.nn: regrad.nn.relu.",
    "inference_mode": "regrad differentiates nothing outside grad and similar functions.",
    "is_tensor": "The type of every tensor is regrad.Tensor.",
    "lax": "scan, cond, while_loop, fori_loop and map are regrad's own: regrad.scan.",
    "no_grad": "Outside grad and similar functions it has no use; inside, call stop_gradient(x).",
    "numpy": "NumPy's functions are regrad's own: regrad.sum. x.numpy() returns NumPy data.",
    "optim": "Optimizers are optax's: regrad.train.Optimizer(optax.adam(0.001)).",
    "optimizers": "Optimizers are optax's: regrad.train.Optimizer(optax.adam(0.001)).",
    "override": "Use gradient_override_map({'Sign': rule}); for JAX programs rg.jax.override.",
    "Sequential": "Layers are functions here: call one after the other.",
    "power": "It is called pow, as in the Array API standard.",
    **_use({
        "array": "regrad.asarray, or regrad.tensor, whose numbers are float32",
        "cat": "regrad.concat",
        "concatenate": "regrad.concat", "constant": "regrad.tensor, or regrad.v1.constant",
        "custom_gradient": "custom_grad, which has the same form", "detach": "regrad.stop_gradient",
        "dot": "regrad.matmul, vecdot or tensordot", "from_numpy": "regrad.asarray",
        "function": "regrad.jit", "pmap": "regrad.jit with sharded data, see device_put",
        "Parameter": "regrad.Variable", "reduce_mean": "regrad.mean, or regrad.v1.reduce_mean",
        "reduce_sum": "regrad.sum, or regrad.v1.reduce_sum", "remat": "regrad.checkpoint",
        "transpose": "regrad.permute_dims or matrix_transpose",
        "tree_util": "regrad.tree_map, or optree, which supports regrad's containers",
    }),
}  # fmt: skip
OPTIMIZERS = ("adam", "adamw", "adagrad", "adadelta", "lamb", "lion", "rmsprop", "sgd")
SEARCHED = ("nn", "losses", "linalg", "random", "rules", "fft")  # for names of other libraries
SAME = {  # names of other libraries (and of regrad's lazy modules) to names of regrad
    "absolute": "abs", "amax": "max", "amin": "min", "as_tensor": "asarray",
    "avg_pool2d": "nn.avg_pool", "batch_normalization": "nn.batch_norm",
    "bce": "losses.sigmoid_cross_entropy", "bce_with_logits": "losses.sigmoid_cross_entropy",
    "binary_cross_entropy": "losses.sigmoid_cross_entropy", "bmm": "matmul", "cast": "astype",
    "check_gradients": "testing.check_gradients", "check_grads": "testing.check_gradients",
    "clamp": "clip", "clip_by_value": "clip", "convert_to_tensor": "asarray",
    "cross_entropy": "losses.softmax_cross_entropy", "div": "divide", "fft2": "fft.fftn",
    "fit": "train.fit", "flatten": "reshape", "float_tensor": "tensor", "gather": "take",
    "attribution": "rules.attribution", "integrated_gradients": "rules.attribution.integrated",
    "grad_reverse": "rules.reverse_gradient", "gradcheck": "testing.check_gradients",
    "gradient_report": "testing.gradient_report", "gradient_reversal": "rules.reverse_gradient",
    "inverse": "linalg.inv", "l1": "losses.absolute_difference", "load": "train.restore",
    "long_tensor": "asarray", "max_pool2d": "nn.max_pool", "mm": "matmul", "mod": "remainder",
    "mse": "losses.mean_squared_error", "mul": "multiply", "neg": "negative",
    "nll": "losses.sparse_softmax_cross_entropy", "norm": "linalg.vector_norm",
    "optimizer": "train.Optimizer", "permute": "permute_dims", "rand": "random.uniform",
    "randn": "random.normal", "range": "arange", "save": "train.save",
    "softmax_cross_entropy_with_logits": "losses.softmax_cross_entropy",
    "ste": "rules.straight_through", "stop_grad": "stop_gradient", "sub": "subtract",
    "swish": "nn.silu", "trainer": "train.fit", "true_divide": "divide", "unsqueeze": "expand_dims",
    "vectorize": "vmap", "view": "reshape",
}  # fmt: skip
_CALLED = "Define __call__, which corresponds to PyTorch's forward; module(x) calls it."
_MODE = "Pass it to __call__ as an argument: module(x, training=True)."
_DEVICE = "Variables take data of any library: v.assign(device_put(v.value, device))."
_NO_GRADS = "Gradients are returned, not accumulated: leave it out."
MODULE: dict[str, str] = {  # attributes of PyTorch's and Keras's modules
    **dict.fromkeys(["__call__", "forward"], _CALLED),
    **dict.fromkeys(["cuda", "to"], _DEVICE),
    **dict.fromkeys(["eval", "train"], _MODE),
    "zero_grad": _NO_GRADS,
    **_use({
        "load_state_dict": "regrad.train.restore(path, module.variables)",
        "load_weights": "regrad.train.restore(path, module.variables)",
        "named_parameters": "module.variables, whose Variables have names",
        "parameters": "module.trainable_variables",
        "save": "regrad.train.save(path, module.variables)",
        "save_weights": "regrad.train.save(path, module.variables)",
        "state_dict": "module.variables, and regrad.train.save for a file",
        "weights": "module.variables",
    }),
}  # fmt: skip
_RATE = "Make it a variable by optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)."
OPTIMIZER = {  # attributes of other libraries' optimizers
    "learning_rate": _RATE,
    "lr": _RATE,
    "param_groups": "See optimizer.variables; optax.inject_hyperparams makes a rate one of them.",
    "state_dict": "Use optimizer.variables, which train.save and train.restore take.",
    "step": "Use optimizer.minimize(lambda: loss(x)), or apply_gradients(grads).",
    "update": "Use optimizer.apply_gradients(grads).",
    "zero_grad": _NO_GRADS,
}

_REPORT = "See hits or table(); assert_fired() raises unless each rule ran."
_OFTEN = ("fired", "report", "result", "summary", "count", "stats")
REPORT: dict[str, str] = dict.fromkeys(_OFTEN, _REPORT)
_CTX = "This is TensorFlow's op: see op.inputs, op.outputs and op.get_attr(name)."
OP_VIEW = {"needs_input_grad": _CTX, "saved_tensors": _CTX, "saved_values": _CTX}

# Op types, in lower case, whose gradient is infinite or NaN at some inputs: `rules.safe` is for
# these. The last line has primitives of JAX with other names.
SINGULAR = frozenset({
    "sqrt", "rsqrt", "reciprocal", "log", "log1p", "log2", "log10", "realdiv", "pow", "asin",
    "acos", "acosh", "atanh", "atan2", "erfinv", "lgamma", "digamma", "xlogy", "xdivy",
    "integer_pow", "erf_inv", "cbrt",
})  # fmt: skip
NORMS = frozenset({"norm", "vector_norm"})  # functions of PyTorch

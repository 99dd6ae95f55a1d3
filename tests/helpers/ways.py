# ruff: noqa: E501 (a table)
"""Ways to change Python state between two calls of a compiled function, as a table.

A way is a setup, a function of x (an expression, unless the setup defines f), and a change. What is
due after the change is what the function gives without `jit`. The code of a way is run as a
module of its own.
"""

from typing import NamedTuple


class Way(NamedTuple):
    """One way; `call` is what is compared before and after, where J is f, compiled or not.

    `expected` is "right"; the kind of changes that are not seen; or the error of the first call,
    which could not be right after the change.
    """

    name: str
    setup: str
    f: str
    change: str
    call: str = "J(x)"
    options: str = ""
    expected: str = "right"


# What is stale, by the words of docs/compiled.md for its kind.
UNSEEN = (
    "state inside a library or the operating system",
    "memory that other code writes", "computed names",
    "containers of more than 256 entries",
    "monkeypatching: new code for a function, a new class for an object, another object for a "
    "builtin, a call of `__setstate__`",
    "a NumPy array that is both an operand and read in another way",
    "static arguments and keys of dicts with an `==` that ignores a difference",
)  # fmt: skip
LIBRARY, MEMORY, COMPUTED, LARGE, SURGERY, BOTH, EQUAL = UNSEEN


O = "class O: pass\no = O(); o.k = 2.0\n"  # noqa: E741
C = "class C: k = 2.0\nc = C()\n"

PLAIN = [
    # names
    Way("global int", "k = 2", "x * k", "k = 3"),
    Way("1 and True", "k = 1", "x if k is True else -x", "k = True"),
    Way("0.0 and -0.0", "import math\nk = 0.0", "x * math.copysign(1, k)", "k = -0.0"),
    Way("1 and 1.0", "k = 1", "x * len(str(k))", "k = 1.0"),
    Way("global string", "k = 'a'", "x if k == 'a' else -x", "k = 'b'"),
    Way("global bytes", "k = b'a'", "x * k[0]", "k = b'b'"),
    Way("global None", "k = None", "x if k is None else -x", "k = 0"),
    Way("global complex", "k = 2j", "x * k.imag", "k = 3j"),
    Way("numpy scalar", "k = np.float32(2)", "x * k", "k = np.float32(3)"),
    Way("global tuple", "k = (2.0, 1)", "x * k[0]", "k = (3.0, 1)"),
    Way("nested tuple, (1, True)", "k = (1, (1,))", "x if k[1][0] is True else -x", "k = (1, (True,))"),
    Way("global deleted", "import builtins\nlen = lambda v: 7", "x * len((1, 2))", "del len"),
    Way("global shadows a builtin", "", "x * len((1, 2))", "len = lambda v: 7", expected=SURGERY),
    Way("cell", "def make():\n k = 2.0\n def f(x): return x * k\n def to(v):\n  nonlocal k\n  k = v\n return f, to\nf, to = make()", "", "to(3.0)"),
    Way("default", "def f(x, k=2.0): return x * k", "", "f.__defaults__ = (3.0,)"),
    Way("keyword default", "def f(x, *, k=2.0): return x * k", "", "f.__kwdefaults__ = {'k': 3.0}"),
    Way("keyword default in place", "def f(x, *, k=2.0): return x * k", "", "f.__kwdefaults__['k'] = 3.0"),
    Way("mutable default", "def f(x, k=[2.0]): return x * k[0]", "", "f.__defaults__[0][0] = 3.0"),
    Way("helper replaced", "def g(x): return x * 2", "g(x)", "g = lambda x: x * 3"),
    Way("helper of a helper", "k = 2.0\ndef h(x): return x * k\ndef g(x): return h(x)", "g(x)", "k = 3.0"),
    Way("inner function", "k = 2.0\ndef f(x):\n def g(): return k\n return x * g()", "", "k = 3.0"),
    Way("recursive function", "k = 2.0\ndef g(x, n): return x * k if n == 0 else g(x, n - 1)", "g(x, 2)", "k = 3.0"),
    Way("partial over a list", "k = [2.0]\ng = functools.partial(lambda k, x: x * k[0], k)", "g(x)", "k[0] = 3.0"),
    Way("partial keywords", "g = functools.partial(lambda x, k: x * k, k=2.0)", "g(x)", "g.keywords['k'] = 3.0"),
    Way("decorated function", "k = 2.0\ndef deco(g):\n @functools.wraps(g)\n def w(x): return g(x)\n return w\n@deco\ndef g(x): return x * k", "g(x)", "k = 3.0"),
    Way("lru_cache over a global", "k = 2.0\n@functools.lru_cache\ndef g(): return k", "x * g()", "k = 3.0; g.cache_clear()"),
    Way("function attribute", "def g(x): return x * g.k\ng.k = 2.0", "g(x)", "g.k = 3.0"),
    Way("code replaced", "def g(x): return x * 2\ndef h(x): return x * 3", "g(x)", "g.__code__ = h.__code__", expected=SURGERY),
    # containers
    Way("list item", "k = [2.0, 1.0]", "x * k[0]", "k[0] = 3.0"),
    Way("list appended", "k = [2.0]", "x * len(k)", "k.append(1.0)"),
    Way("list item 1, True", "k = [1]", "x if k[0] is True else -x", "k[0] = True"),
    Way("long list", "k = [2.0] * 1000", "x * k[0]", "k[0] = 3.0", expected=LARGE),
    Way("dict item", "k = {'a': 2.0}", "x * k['a']", "k['a'] = 3.0"),
    Way("dict key added", "k = {'a': 2.0}", "x * len(k)", "k['b'] = 3.0"),
    Way("dict reordered", "k = {'a': 2.0, 'b': 3.0}", "x * next(iter(k.values()))", "k['a'] = k.pop('a')"),
    Way("dict key replaced", "k = {'a': 2.0}", "x if 'a' in k else -x", "k['b'] = k.pop('a')"),
    Way("long dict", "k = {i: 2.0 for i in range(1000)}", "x * k[0]", "k[0] = 3.0", expected=LARGE),
    Way("set, same size", "k = {1, 2}", "x * max(k)", "k.remove(2); k.add(5)"),
    Way("frozenset", "k = frozenset({1})", "x * max(k)", "k = frozenset({2})"),
    Way("objects in a set", O + "s = {o}", "x * sum(v.k for v in s)", "o.k = 3.0"),
    Way("deque", "k = collections.deque([2.0])", "x * k[0]", "k[0] = 3.0"),
    Way("OrderedDict moved", "k = collections.OrderedDict(a=2.0, b=3.0)", "x * list(k.values())[0]", "k.move_to_end('a')"),
    Way("defaultdict", "k = collections.defaultdict(lambda: 2.0)", "x * k.get('a', 1.0)", "k['a']"),
    Way("UserDict", "k = collections.UserDict(a=2.0)", "x * k['a']", "k['a'] = 3.0"),
    Way("UserList", "k = collections.UserList([2.0])", "x * k[0]", "k[0] = 3.0"),
    Way("ChainMap", "a = {'k': 2.0}\nk = collections.ChainMap({}, a)", "x * k['k']", "a['k'] = 3.0"),
    Way("MappingProxyType", "a = {'k': 2.0}\nk = types.MappingProxyType(a)", "x * k['k']", "a['k'] = 3.0"),
    Way("bytearray", "k = bytearray([2])", "x * k[0]", "k[0] = 3"),
    Way("array.array", "import array\nk = array.array('d', [2.0])", "x * k[0]", "k[0] = 3.0"),
    Way("dict view", "a = {'k': 2.0}\nk = a.values()", "x * sum(k)", "a['k'] = 3.0"),
    Way("range", "k = range(2)", "x * len(k)", "k = range(3)"),
    Way("list in a named tuple", "P = collections.namedtuple('P', 'a')\np = P([2.0])", "x * p.a[0]", "p.a[0] = 3.0"),
    Way("attribute of a dict subclass", "class D(dict): pass\nd = D(); d.k = 2.0", "x * d.k", "d.k = 3.0"),
    Way("item of a dict subclass", "class D(dict): pass\nd = D(k=2.0)", "x * d['k']", "d['k'] = 3.0"),
    Way("item of a list subclass", "class L(list): pass\nk = L([2.0])", "x * k[0]", "k[0] = 3.0"),
    Way("object in a named tuple in a partial", O + "P = collections.namedtuple('P', 'o')\ng = functools.partial(lambda p, x: x * p.o.k, P(o))", "g(x)", "o.k = 3.0"),
    # objects
    Way("attribute", O, "x * o.k", "o.k = 3.0"),
    Way("slot", "class S: __slots__ = ('k',)\no = S(); o.k = 2.0", "x * o.k", "o.k = 3.0"),
    Way("property", "class P:\n _k = 2.0\n @property\n def k(self): return self._k\no = P()", "x * o.k", "o._k = 3.0"),
    Way("cached_property", "class P:\n h = 2.0\n @functools.cached_property\n def k(self): return self.h\no = P()", "x * o.k", "o.h = 3.0; del o.k"),
    Way("descriptor", "class D:\n def __get__(self, o, t): return o.h\nclass P: k = D()\no = P(); o.h = 2.0", "x * o.k", "o.h = 3.0"),
    Way("__getattr__", "class P:\n def __init__(self): self.s = {'k': 2.0}\n def __getattr__(self, n): return self.s[n]\no = P()", "x * o.k", "o.s['k'] = 3.0"),
    Way("__getitem__", "class P:\n def __init__(self): self.s = [2.0]\n def __getitem__(self, i): return self.s[i]\no = P()", "x * o[0]", "o.s[0] = 3.0"),
    Way("__call__", "class P:\n def __call__(self, x): return x * self.k\no = P(); o.k = 2.0", "o(x)", "o.k = 3.0"),
    Way("__float__", "class P:\n def __float__(self): return self.k\no = P(); o.k = 2.0", "x * float(o)", "o.k = 3.0"),
    Way("__enter__", "class P:\n def __enter__(self): return self.k\n def __exit__(self, *a): pass\no = P(); o.k = 2.0\ndef f(x):\n with o as k: return x * k", "", "o.k = 3.0"),
    Way("method", O + "class M(O):\n def g(self, x): return x * self.k\no = M(); o.k = 2.0", "o.g(x)", "o.k = 3.0"),
    Way("bound method", "class M:\n def g(self, x): return x * self.k\no = M(); o.k = 2.0\ng = o.g", "g(x)", "o.k = 3.0"),
    Way("super() method replaced", "class A:\n def g(self): return 2.0\nclass B(A):\n def g(self): return super().g()\no = B()", "x * o.g()", "A.g = lambda self: 3.0"),
    Way("class default", C, "x * c.k", "C.k = 3.0"),
    Way("hides the class default", C, "x * c.k", "c.k = 3.0"),
    Way("base class default", C + "class D(C): pass\nd = D()", "x * d.k", "C.k = 3.0"),
    Way("class attribute", C, "x * C.k", "C.k = 3.0"),
    Way("classmethod", "class C:\n k = 2.0\n @classmethod\n def g(cls): return cls.k", "x * C.g()", "C.k = 3.0"),
    Way("staticmethod", "k = 2.0\nclass C:\n @staticmethod\n def g(): return k", "x * C.g()", "k = 3.0"),
    Way("method replaced", "class C:\n def g(self): return 2.0\nc = C()", "x * c.g()", "C.g = lambda self: 3.0"),
    Way("method added to the object", "class C:\n def g(self): return 2.0\nc = C()", "x * c.g()", "c.g = lambda: 3.0"),
    Way("class of the object", C + "class D: k = 3.0", "x * c.k", "c.__class__ = D", expected=SURGERY),
    Way("bases of the class", C + "class A: k = 2.0\nclass B: k = 3.0\nclass D(A): pass\nd = D()", "x * d.k", "D.__bases__ = (B,)", expected=SURGERY),
    Way("made inside", "class C:\n def __init__(self): self.k = S\nS = 2.0", "x * C().k", "S = 3.0"),
    Way("metaclass attribute", "class M(type): k = 2.0\nclass C(metaclass=M): pass", "x * C.k", "M.k = 3.0"),
    Way("frozen dataclass", "@dataclasses.dataclass(frozen=True)\nclass C:\n k: float\nc = C(2.0)", "x * c.k", "object.__setattr__(c, 'k', 3.0)"),
    Way("dataclass ==", "@dataclasses.dataclass\nclass C:\n k: float\na, b = C(2.0), C(2.0)", "x if a == b else -x", "a.k = 3.0", expected=LIBRARY),
    Way("SimpleNamespace", "o = types.SimpleNamespace(k=2.0)", "x * o.k", "o.k = 3.0"),
    Way("ContextVar", "v = contextvars.ContextVar('v', default=2.0)", "x * v.get()", "v.set(3.0)"),
    Way("threading.local", "o = threading.local(); o.k = 2.0", "x * o.k", "o.k = 3.0"),
    Way("weak reference", O + "p = O(); p.k = 3.0\nr = weakref.ref(o)", "x * r().k", "o.k = 3.0", expected=LIBRARY),
    Way("getattr, a constant name", O, "x * getattr(o, 'k')", "o.k = 3.0"),
    Way("getattr with a default", O, "x * getattr(o, 'j', 2.0)", "o.j = 3.0"),
    Way("hasattr", O, "x if hasattr(o, 'j') else -x", "o.j = 3.0"),
    Way("vars()", O, "x * vars(o)['k']", "o.k = 3.0"),
    Way("except AttributeError", O + "def f(x):\n try: return x * o.j\n except AttributeError: return -x", "", "o.j = 3.0"),
    Way("getattr, a computed name", O, "x * getattr(o, 'K'.lower())", "o.k = 3.0", expected=COMPUTED),
    Way("operator.attrgetter", O + "g = operator.attrgetter('k')", "x * g(o)", "o.k = 3.0"),
    Way("globals()", "k = 2.0", "x * globals()['k']", "k = 3.0"),
    Way("module attribute", "m = types.ModuleType('m'); m.k = 2.0", "x * m.k", "m.k = 3.0"),
    Way("module imported inside", "import sys\nm = types.ModuleType('way_module'); m.k = 2.0\nsys.modules['way_module'] = m\ndef f(x):\n import way_module\n return x * way_module.k", "", "m.k = 3.0"),
    Way("attribute of a library's module", "math.k = 2.0", "x * math.k", "math.k = 3.0", expected=LIBRARY),
    Way("environment", "os.environ['WAY'] = '2'", "x * float(os.environ['WAY'])", "os.environ['WAY'] = '3'", expected=LIBRARY),
    Way("an iterator", "k = iter([2.0, 3.0, 4.0])\nh = [next(k)]", "x * h[0]", "h[0] = next(k)"),
    Way("the state of an iterator", "k = [2.0]\ni = itertools.count(2)\ndef g(): return int(repr(i)[6:-1])", "x * g()", "next(i)", expected=LIBRARY),
    Way("a file", "p = pathlib.Path(tempfile.mkdtemp()) / 'k'; p.write_text('2')", "x * float(p.read_text())", "p.write_text('3')", expected=LIBRARY),
    Way("the state of random", "random.seed(0)", "x * (random.getstate()[1][1] % 1009)", "random.seed(1)", expected=LIBRARY),
    Way("string buffer", "s = io.StringIO('2')", "x * float(s.getvalue())", "s.seek(0); s.write('3')", expected=LIBRARY),
    Way("queue", "q = queue.Queue(); q.put(2.0)", "x * q.queue[0]", "q.queue[0] = 3.0"),
    Way("a library's object", "import decimal\nd = decimal.getcontext(); d.prec = 2", "x * d.prec", "d.prec = 3", expected=LIBRARY),
    Way("the clock", "import time\nclock = [2.0]\ntime.way = lambda: clock[0]", "x * time.way()", "clock[0] = 3.0"),
]  # fmt: skip

SIGN = "def rule(dy): return dy * {}\nover = {{'Sign': rule}}\ndef run(J, x):\n with rg.gradient_override_map(over): return J(x)\n"
G = "rg.grad(lambda x: rg.sign(x).sum())(x)"
RUN = "run(J, x)"
A = "a = np.array([2.0, 1.0], 'float32')\n"
CG = "@rg.custom_grad\ndef cg(x): return {{'value': x * 1.0, 'grad_func': lambda dy: dy * {}}}\n"
CGRAD = "rg.grad(lambda x: cg(x).sum())(x)"
NAMED = (
    "n = f'Way{next(count)}'\n@rg.RegisterGradient(n)\ndef rule(op, dy): return dy * k\nk = 2.0\n"
)
OP = "n = f'Way{next(count)}'\n@rg.op(n)\ndef way(xp, x: rg.Tensor, /) -> rg.Tensor:\n 'A way.'\n return x * scale\n@rg.gradient(n)\ndef _(dy): return dy * slope\nscale, slope = 2.0, 2.0\n"
M = "class M:\n def __init__(self): self.k = 2.0\n @jit\n def g(self, x): return x * self.k\nm = M()\n"
AT = "m.g(x)"  # a method is compiled where it is defined
MODEL = "class M: pass\nm = M(); m.w = rg.tensor([1.0, 2.0]); m.k = 2.0\n"

P = "@dataclasses.dataclass\nclass P:\n k: float\n n: int = 0\np = P(2.0)\n"
CASE = "def f(x):\n match p:\n  case {}: return x * v\n"
B = "b = np.array([2.0, 2.0], 'float32')\n"

OTHERS = [
    # what names no attribute
    Way("match: by keyword", P + CASE.format("P(k=v)"), "", "p.k = 3.0"),
    Way("match: by position", P + CASE.format("P(v)"), "", "p.k = 3.0"),
    Way("match: any class", O + "p = o\n" + CASE.format("object(k=v)"), "", "o.k = 3.0"),
    Way("match: __match_args__", P + "p.m = 3.0\n" + CASE.format("P(v)"), "", "P.__match_args__ = ('m',)"),
    Way("a dict's get", "d = {'k': 2.0}\ng = d.get", "x * g('k')", "d['k'] = 3.0"),
    Way("a list's __getitem__", "l = [2.0]\ng = l.__getitem__", "x * g(0)", "l[0] = 3.0"),
    Way("an array's item", "a = np.array(2.0)\ng = a.item", "x * g()", "a[()] = 3.0"),
    Way("attrgetter of two names", O + "class Q: pass\nq = Q(); q.o = o\ng = operator.attrgetter('o.k')", "x * g(q)", "o.k = 3.0"),
    Way("methodcaller", C + "C.m = lambda self, n: self.k * n\ng = operator.methodcaller('m', 1)", "x * g(c)", "c.k = 3.0"),
    Way("methodcaller with a keyword", C + "C.m = lambda self, n: self.k * n\ng = operator.methodcaller('m', n=1)", "x * g(c)", "c.k = 3.0"),
    Way("methodcaller's argument", C + "C.m = lambda self, n: n[0]\nn = [2.0]\ng = operator.methodcaller('m', n)", "x * g(c)", "n[0] = 3.0"),
    Way("__getattribute__", "class G:\n def __getattribute__(self, n):\n  held = object.__getattribute__(self, '_d')\n  return held[n] if n in held else object.__getattribute__(self, n)\nd = {'k': 2.0}\no = G.__new__(G); object.__setattr__(o, '_d', d)", "x * o.k", "d['k'] = 3.0"),
    Way("__getattr__ of a library's class", "import torch\nm = torch.nn.Linear(1, 1)\nm.weight.data.fill_(2.0)", "x * float(m.weight.detach())", "m.weight.data.fill_(3.0)"),
    Way("module in sys.modules", "import sys\nsys.modules['wayless'] = types.SimpleNamespace(k=2.0)\ndef f(x):\n import wayless\n return x * wayless.k", "", "sys.modules['wayless'] = types.SimpleNamespace(k=3.0)"),
    Way("mask", "m = np.ma.masked_array([1.0, 2.0], [False, False])", "x * float(m.sum())", "m[1] = np.ma.masked"),
    Way("mask that comes", "m = np.ma.masked_array([1.0, 2.0])", "x * float(m.sum())", "m[1] = np.ma.masked"),
    Way("names of two Variables", "p, q = rg.Variable(2.0, name='p'), rg.Variable(3.0, name='q')\ndef f(x): return rg.variable_grads(lambda: rg.sum(x * p * q * q)).grads['p']", "", "p.name, q.name = 'q', 'p'"),
    Way("rule registered after jit", "n = f'Way{next(count)}'\ndef f(x):\n with rg.gradient_override_map({'Sign': n}): return rg.grad(lambda x: rg.sign(x).sum())(x)\nearly = jit(f)\nk = 2.0\n@rg.RegisterGradient(n)\ndef rule(op, dy): return dy * k", "", "k = 3.0", "early(x)"),
    # memory that others write, and threads
    Way("Tensor that shares an array", B + "t = rg.asarray(b, copy=False)", "x * t", "b[0] = 3.0", expected=MEMORY),
    Way("Tensor from DLPack", B + "t = rg.from_dlpack(b)", "x * t", "b[0] = 3.0", expected=MEMORY),
    Way("ctypes", "import ctypes\nc = ctypes.c_double(2.0)", "x * c.value", "c.value = 3.0", expected=MEMORY),
    Way("multiprocessing.Value", "import multiprocessing\nc = multiprocessing.Value('d', 2.0)", "x * c.value", "c.value = 3.0", expected=MEMORY),
    Way("memoryview", B + "m = memoryview(b)", "x * m[0]", "b[0] = 3.0", expected=MEMORY),
    Way("threading.local, another thread", "t = threading.local(); t.k = 2.0\ndef run(J, x):\n from concurrent.futures import ThreadPoolExecutor\n with ThreadPoolExecutor(1) as pool:\n  pool.submit(setattr, t, 'k', 3.0).result()\n  return pool.submit(J, x).result()\nhere = lambda J, x: J(x)", "x * t.k", "here = run", "here(J, x)"),
    Way("partial.__setstate__", "g = functools.partial(lambda x, k: x * k, k=2.0)", "g(x)", "g.__setstate__((g.func, (), {'k': 3.0}, {}))", expected=SURGERY),
    # Tensors and Variables
    Way("Tensor rebound", "t = rg.scalar(2.0)", "x * t", "t = rg.scalar(3.0)"),
    Way("Tensor of another shape", "t = rg.scalar(2.0)", "x * t", "t = rg.tensor([3.0, 4.0])"),
    Way("Tensor as an attribute", O + "o.k = rg.scalar(2.0)", "x * o.k", "o.k = rg.scalar(3.0)"),
    Way("Tensor becomes a number", "t = rg.scalar(2.0)", "x * t", "t = 3.0"),
    Way("Tensor in a ContextVar", "v = contextvars.ContextVar('v', default=None); v.set(rg.scalar(2.0))", "x * v.get()", "v.set(rg.scalar(3.0))"),
    Way("two names of one Tensor", "t = u = rg.scalar(2.0)", "x * t + u", "u = rg.scalar(3.0)"),
    Way("two Tensors become one", "t, u = rg.scalar(2.0), rg.scalar(5.0)", "x * t + u", "t = u"),
    Way("number becomes a Tensor", "t = 2.0", "x * t", "t = rg.scalar(3.0)"),
    Way("Tensor becomes a Variable", "t = rg.scalar(2.0)", "x * t", "t = rg.Variable(3.0)"),
    Way("Tensor, by the gradient", "t = rg.scalar(2.0)", "x * t", "t = rg.scalar(3.0)", "rg.grad(lambda x: J(x).sum())(x)"),
    Way("if Tensor", "t = rg.scalar(2.0)", "x if t > 2.5 else -x", "t = rg.scalar(3.0)", expected="TraceError"),
    Way("Tensor as an index", "t = rg.tensor(0, dtype='int32')", "x * [2.0, 3.0][t]", "t = rg.tensor(1, dtype='int32')", expected="TraceError"),
    Way("Tensor.shape", "t = rg.ones((2,))", "x * t.shape[0]", "t = rg.ones((3,))"),
    Way("JAX array rebound", "a = jnp.asarray(2.0)", "x * a", "a = jnp.asarray(3.0)"),
    Way("float(JAX array)", "a = jnp.asarray(2.0)", "x * float(a)", "a = jnp.asarray(3.0)"),
    Way("JAX array computed with", "a = jnp.asarray([2.0, 2.0])", "x * (a + 1)", "a = jnp.asarray([3.0, 3.0])"),
    Way("Variable assigned", "v = rg.Variable(2.0)", "x * v", "v.assign(3.0)"),
    Way("Variable rebound", "v = rg.Variable(2.0)", "x * v", "v = rg.Variable(3.0)"),
    Way("Variable's item()", "v = rg.Variable(2.0)", "x * v.value.item()", "v.assign(3.0)", expected="TraceError"),
    Way("Variable's name", "v = rg.Variable(2.0, name='a')", "x * len(v.name)", "v.name = 'abc'"),
    Way("Variable's trainable", "v = rg.Variable(2.0)", "x if v.trainable else -x", "v.trainable = False"),
    # arrays
    Way("array written to", A, "x * a", "a[0] = 5.0"),
    Way("array rebound", A, "x * a", "a = a + 1"),
    Way("array item", A, "x * a[0]", "a[0] = 5.0"),
    Way("array computed with", A, "x * (a * 2)", "a[0] = 5.0"),
    Way("array of objects", "a = np.array([2.0, 'b'], object)", "x * a[0]", "a[0] = 3.0"),
    Way("view of an array", A + "b = a[:1]", "x * b[0]", "a[0] = 5.0"),
    Way("array.shape", A, "x * a.shape[0]", "a = np.zeros(3, 'float32')"),
    Way("array used both ways", A, "x * a * float(a[0])", "a[0] = 5.0", expected=BOTH),
    Way("array both ways, a branch", A, "x * a if a[0] > 2 else -x", "a[0] = 5.0"),
    # rules
    Way("override: array item", A + SIGN.format("a[0]"), G, "a[0] = 5.0", RUN),
    Way("override: float(Tensor)", SIGN.format("float(t)") + "t = rg.scalar(2.0)", G, "t = rg.scalar(3.0)", RUN, expected="TraceError"),
    Way("override: a method", "class R:\n k = 2.0\n def rule(self, dy): return dy * self.k\nr = R()\nover = {'Sign': r.rule}\ndef run(J, x):\n with rg.gradient_override_map(over): return J(x)", G, "r.k = 3.0", RUN),
    Way("override inside: global", "k = 2.0\ndef f(x):\n with rg.gradient_override_map({'Sign': lambda dy: dy * k}): return rg.grad(lambda x: rg.sign(x).sum())(x)", "", "k = 3.0"),
    Way("named rule inside", NAMED + "def f(x):\n with rg.gradient_override_map({'Sign': n}): return rg.grad(lambda x: rg.sign(x).sum())(x)", "", "k = 3.0"),
    Way("named rule outside", NAMED + "def run(J, x):\n with rg.gradient_override_map({'Sign': n}): return J(x)", G, "k = 3.0", RUN),
    Way("named rule, another name", NAMED + NAMED.replace("k", "j").replace("n =", "n2 =").replace("(n)", "(n2)").replace("2.0", "3.0") + "def f(x):\n with rg.gradient_override_map({'Sign': n}): return rg.grad(lambda x: rg.sign(x).sum())(x)", "", "n = n2"),
    Way("rule of an op", OP, "rg.grad(lambda x: way(x).sum())(x)", "slope = 3.0"),
    Way("kernel of an op", OP, "way(x)", "scale = 3.0"),
    Way("rule of an op replaced", OP, "rg.grad(lambda x: way(x).sum())(x)", "rg.gradient(n, overwrite=True)(lambda dy: dy * 3.0)"),
    Way("custom_grad: global", CG.format("k") + "k = 2.0", CGRAD, "k = 3.0"),
    Way("custom_grad: Tensor", CG.format("t") + "t = rg.scalar(2.0)", CGRAD, "t = rg.scalar(3.0)"),
    Way("custom_grad: array", A + CG.format("a"), CGRAD, "a[0] = 5.0"),
    Way("custom_grad: Variable", CG.format("v") + "v = rg.Variable(2.0)", CGRAD, "v.assign(3.0)"),
    Way("custom_grad from outside", CG.format("k") + "k = 2.0", "cg(x)", "k = 3.0", "rg.grad(lambda x: J(x).sum())(x)"),
    Way("rules.reverse_gradient", O, "rg.grad(lambda x: rg.rules.reverse_gradient(x, o.k).sum())(x)", "o.k = 3.0"),
    # arguments
    Way("argument: int, then bool", "k = 1\ndef f(x, k): return x * k", "", "k = False", "J(x, k)"),
    Way("argument: object", MODEL + "def f(m, x): return x * m.w", "", "m.w = rg.tensor([3.0, 4.0])", "J(m, x)", expected="ArgumentError"),
    Way("argument: flag of an object", MODEL + "def f(m, x): return x * m.k", "", "m.k = 3.0", "J(m, x)", expected="ArgumentError"),
    Way("argument: function", "k = 2.0\ndef g(x): return x * k\ndef f(g, x): return g(x)", "", "k = 3.0", "J(g, x)"),
    Way("argument: function, its Tensor", "k = rg.scalar(2.0)\ndef g(x): return x * k\ndef f(g, x): return g(x)", "", "k = rg.scalar(3.0)", "J(g, x)"),
    Way("argument: another function", "g = lambda x: x * 2\ndef f(g, x): return g(x)", "", "g = lambda x: x * 3", "J(g, x)"),
    Way("argument: method", MODEL + "M.g = lambda self, x: x * self.k\ndef f(g, x): return g(x)", "", "m.k = 3.0", "J(m.g, x)"),
    Way("argument: partial", "g = functools.partial(lambda x, k: x * k, k=2.0)\ndef f(g, x): return g(x)", "", "g.keywords['k'] = 3.0", "J(g, x)"),
    Way("argument: class", C + "def f(c, x): return x * c.k", "", "C.k = 3.0", "J(C, x)"),
    Way("argument: dtype", "d = np.dtype('float32')\ndef f(x, d): return rg.astype(x, d)", "", "d = np.dtype('int32')", "J(x, d)"),
    Way("argument: structure", "d = [rg.scalar(2.0)]\ndef f(x, d): return x * len(d)", "", "d.append(rg.scalar(1.0))", "J(x, d)"),
    Way("argument: key of a dict", "d = {1: rg.scalar(2.0)}\ndef f(x, d): return x if True in map(lambda k: k is True, d) else -x", "", "d = {True: rg.scalar(2.0)}", "J(x, d)", expected=EQUAL),
    Way("static: (1, True), (1, 1)", "k = (1, True)\ndef f(x, k): return x if k[1] is True else -x", "", "k = (1, 1)", "J(x, k)", "static_argnames='k'"),
    Way("static: (0.0,), (-0.0,)", "k = (0.0,)\ndef f(x, k): return x * math.copysign(1, k[0])", "", "k = (-0.0,)", "J(x, k)", "static_argnums=1"),
    Way("static: frozenset", "k = frozenset({1})\ndef f(x, k): return x if True in [v is True for v in k] else -x", "", "k = frozenset({True})", "J(x, k)", "static_argnums=1"),
    Way("static: object", MODEL + "def f(m, x): return x * m.w", "", "m.w = rg.tensor([3.0, 4.0])", "J(m, x)", "static_argnums=0"),
    Way("static: object with ==", "class P:\n def __init__(self, k): self.k = k\n def __eq__(self, o): return True\n def __hash__(self): return 1\np = P(2.0)\ndef f(p, x): return x * p.k", "", "p = P(3.0)", "J(p, x)", "static_argnums=0", expected=EQUAL),
    Way("static: frozen dataclass", "@dataclasses.dataclass(frozen=True)\nclass P: k: float\np = P(2.0)\ndef f(p, x): return x * p.k", "", "p = P(3.0)", "J(p, x)", "static_argnums=0"),
    Way("static: dataclass field 1, True", "@dataclasses.dataclass(frozen=True)\nclass P: k: int\np = P(1)\ndef f(p, x): return x if p.k is True else -x", "", "p = P(True)", "J(p, x)", "static_argnums=0", expected=EQUAL),
    Way("registered dataclass: child", "@jax.tree_util.register_dataclass\n@dataclasses.dataclass\nclass P: w: object\np = P(rg.scalar(2.0))\ndef f(p, x): return x * p.w", "", "p.w = rg.scalar(3.0)", "J(p, x)"),
    Way("registered dataclass: static field", "@jax.tree_util.register_dataclass\n@dataclasses.dataclass\nclass P:\n w: object\n k: int = dataclasses.field(metadata={'static': True})\np = P(rg.scalar(2.0), 1)\ndef f(p, x): return x if p.k is True else x * p.w", "", "p.k = True", "J(p, x)"),
    # methods
    Way("method: attribute", M, "x", "m.k = 3.0", AT),
    Way("method: another object", M, "x", "m = M(); m.k = 3.0", AT),
    Way("method: Tensor", M + "m.k = rg.scalar(2.0)", "x", "m.k = rg.scalar(3.0)", AT),
    Way("method: replaced on the class", M, "x", "M.g = lambda self, x: x * 7", AT),
    Way("method: replaced on the object", M, "x", "m.g = lambda x: x * 7", AT),
    Way("method: class attribute", M.replace("def __init__(self): self.k = 2.0", "k = 2.0"), "x", "M.k = 3.0", AT),
    Way("method: of the base class", M + "class N(M):\n @jit\n def g(self, x): return super().g(x) * 10\nn = N()", "x", "n.k = 3.0", "n.g(x)"),
    Way("method: classmethod of jit", "class M:\n k = 2.0\n @classmethod\n @jit\n def g(cls, x): return x * cls.k\nm = M()", "x", "M.k = 3.0", AT),
    Way("method: jit of classmethod", "class M:\n k = 2.0\n @jit\n @classmethod\n def g(cls, x): return x * cls.k\nm = M()", "x", "M.k = 3.0", AT),
    Way("method: jit of staticmethod", "k = 2.0\nclass M:\n @jit\n @staticmethod\n def g(x): return x * k\nm = M()", "x", "k = 3.0", AT),
    Way("method: slots", "class M:\n __slots__ = ('k',)\n @jit\n def g(self, x): return x * self.k\nm = M(); m.k = 2.0", "x", "m.k = 3.0", AT),
    Way("method: __eq__ without a hash", M + "M.__eq__ = lambda a, b: True; M.__hash__ = None", "x", "m = M(); m.k = 3.0", AT),
]  # fmt: skip
WAYS = [*PLAIN, *OTHERS]

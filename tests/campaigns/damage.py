"""F11: a damaged file is restored rightly or refused, whatever happened to it.

Small files of every format that the library reads are cut at every place, have every bit flipped,
and are damaged at random in the ways of disks, networks and programs. What comes is *delivered*
where all that was saved came back, *refused* by a CheckpointError that names the file, with all
variables as they were, *silent* where anything else came back or a variable changed, and *broken*
for any other error. Files of other programs, which have no checksums of ours, may also be refused
as not fitting: *refused, unnamed*.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.errors import CheckpointError, RegradError
from tests.campaigns.outcomes import BROKEN, DELIVERED, REFUSED, SILENT, UNNAMED
from tests.campaigns.verdicts import Verdict, shown

TITLE = "damaged files"

RANDOM = 10_000  # cases of random damage per format
CHUNK = 1000

# -- formats ---------------------------------------------------------------------------------------
#
# Each has a file, a function that reads it, and one that tells what the variables hold.


class Format(NamedTuple):
    """A file, and how it is read."""

    path: Path
    read: Callable[[], Any]  # what was saved, as it came back
    held: Callable[[], Sequence[bytes]] = (
        tuple  # the variables, which a refused file leaves at zero
    )
    own: bool = True  # whether the library wrote it


VALUES = {
    "w": np.float32([0.5, -1.5, 2.0]), "n": np.int32([[1, 2], [3, 4]]),
    "flag": np.bool_([True, False, True]), "z": np.complex64([1 + 2j]),
}  # fmt: skip


def safetensors_file(folder: Path, stack: ExitStack) -> Format:
    path = folder / "a.safetensors"
    values = {**VALUES, "long": np.complex128([3 - 4j])}  # (the last is stored as a view)
    variables = [rg.Variable(rg.asarray(x), False, name) for name, x in values.items()]
    rg.train.save(path, variables, {"epoch": "3", "über": "ü\n"})

    def read() -> Any:
        for v in variables:
            v.assign(rg.zeros_like(v.value))
        return rg.train.restore(path, variables), held()

    def held() -> Any:
        return [v.numpy().tobytes() for v in variables]

    return Format(path, read, held)


def archive(folder: Path, stack: ExitStack, write: Any = None) -> Format:
    graph = stack.enter_context(tf.Graph().as_default())
    session = stack.enter_context(tf.Session(graph=graph))
    strings = {} if write else {"s/words": ["a", "bcd"]}
    variables = [tf.Variable(x, name=name) for name, x in {**VALUES, **strings}.items()]
    session.run(tf.global_variables_initializer())
    saver = tf.train.Saver()
    path = folder / "model.npz"
    if write is None:
        saver.save(session, folder / "model")
    else:
        write(path, **VALUES)
    start = [np.full_like(x, b"" if x.dtype == object else 0) for x in session.run(variables)]

    def read() -> Any:
        for v, zeros in zip(variables, start, strict=True):
            v.load(zeros, session)
        saver.restore(session, folder / "model")
        listed = None if write else tf.train.list_variables(folder / "model")
        return held(), listed

    def held() -> Any:
        return [x.tobytes() if x.dtype != object else b"".join(x) for x in session.run(variables)]

    return Format(path, read, held, write is None)


def state_file(folder: Path, stack: ExitStack) -> Format:
    paths = [str(folder / f"model-{n}") for n in (8, 9, 10)]
    tf.train.update_checkpoint_state(folder, paths[-1], paths)
    return Format(folder / "checkpoint", lambda: tf.train.get_checkpoint_state(folder))


FORMATS: dict[str, Callable[[Path, ExitStack], Format]] = {
    "safetensors": safetensors_file, "npz": archive, "state file": state_file,
    "npz of numpy.savez": lambda folder, stack: archive(folder, stack, np.savez),
    "npz, compressed": lambda folder, stack: archive(folder, stack, np.savez_compressed),
}  # fmt: skip

# -- damage ----------------------------------------------------------------------------------------


def cut(data: bytes) -> Iterator[bytes]:
    """Every beginning of a file."""
    return (data[:i] for i in range(len(data)))


def flipped(data: bytes) -> Iterator[bytes]:
    """Every single bit."""
    for place in range(8 * len(data)):
        yield flip(data, place)


def flip(data: bytes, place: int) -> bytes:
    i, bit = divmod(place, 8)
    return data[:i] + bytes([data[i] ^ (1 << bit)]) + data[i + 1 :]


def some_bits(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(2, 8)):
        data = flip(data, rng.randrange(8 * len(data)))
    return data


def overwritten(filler: Callable[[int, random.Random], bytes]) -> Any:
    def damage(data: bytes, rng: random.Random) -> bytes:
        i, j = stretch(data, rng)
        return data[:i] + filler(j - i, rng) + data[j:]

    return damage


def stretch(data: bytes, rng: random.Random) -> tuple[int, int]:
    i = rng.randrange(len(data))
    return i, min(len(data), i + rng.choice([1, 2, 4, 8, 64, 512]))


def moved(data: bytes, rng: random.Random) -> bytes:
    """One stretch of the file in the place of another."""
    i, j = stretch(data, rng)
    at = rng.randrange(len(data))
    return data[:at] + data[i:j] + data[at + j - i :]


RANDOMLY: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits": some_bits, "zeros": overwritten(lambda n, rng: bytes(n)),
    "ones": overwritten(lambda n, rng: b"\xff" * n),
    "noise": overwritten(lambda n, rng: rng.randbytes(n)), "lost": overwritten(lambda n, rng: b""),
    "doubled": overwritten(lambda n, rng: rng.randbytes(2 * n)), "moved": moved,
    "longer": lambda data, rng: data + rng.randbytes(rng.randint(1, 64)),
    "digits": overwritten(lambda n, rng: "".join(rng.choices("0123456789", k=n)).encode()),
    "brackets": overwritten(lambda n, rng: rng.choice([b"[", b"{", b"(", b'"', b"-"]) * n),
}  # fmt: skip


def at_random(data: bytes, seed: str, count: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        yield RANDOMLY[rng.choice(list(RANDOMLY))](data, rng)


# -- what comes of it ------------------------------------------------------------------------------


def verdicts(file: Format, cases: Iterator[bytes], name: str, step: int = 1) -> Iterator[Verdict]:
    """What comes of a file in some states of damage."""
    whole = file.path.read_bytes()
    expected = file.read()
    for i, damaged in enumerate(cases):
        if i % step == 0:
            file.path.write_bytes(damaged)
            yield Verdict(f"{name} {i}", *outcome(file, expected))
    file.path.write_bytes(whole)
    if file.read() != expected:
        yield Verdict(name, BROKEN, "the whole file is not read any more")


def outcome(file: Format, expected: Any) -> tuple[str, str]:
    try:
        got = file.read()
    except RegradError as error:
        if isinstance(error, CheckpointError) and str(file.path) in str(error):
            return unchanged(file), shown(error)
        return BROKEN if file.own else UNNAMED, shown(error)
    except Exception as error:
        return BROKEN, shown(error)
    return (DELIVERED, "") if got == expected else (SILENT, f"{got} instead of {expected}"[:300])


def unchanged(file: Format) -> str:
    """Refused, if the variables are all zero, as they were before."""
    return SILENT if any(map(any, file.held())) else REFUSED


def jobs(quick: bool = False) -> list[str]:
    """`npz/cut`, `npz/flipped`, `npz/1000`: random damage, by the thousand."""
    kinds = ["cut", "flipped", *map(str, range(0, CHUNK if quick else RANDOM, CHUNK))]
    return [f"{name}/{kind}" for name in FORMATS for kind in kinds]


def run(job: str, quick: bool = False) -> list[Verdict]:
    """What comes of one kind of damage to one kind of file."""
    name, _, kind = job.partition("/")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = FORMATS[name](folder.resolve(), stack)
        data = file.path.read_bytes()
        cases = {"cut": cut, "flipped": flipped}.get(kind, lambda d: at_random(d, job, CHUNK))
        return list(verdicts(file, cases(data), job, step=20 if quick else 1))


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    job, _, number = case.rpartition(" ")
    return job, number

"""The findings of a check of gradients, as values."""

from __future__ import annotations

from dataclasses import dataclass

KINK = "differences do not converge, a kink or too large a function value"
UNSEEN = "too small for differences, next to the rounding of the function"
UNDEFINED = "the function has no finite value here"
FLAT = "the function is flat here"
SINGULAR = "the gradient is not finite here, as at a kink"
EMPTY = "there are no elements"


@dataclass(frozen=True)
class Finding:
    """A gradient that differs from differences, or that differences cannot judge.

    `kind` is "wrong value", "wrong sign", "scaled by …", "zero", "missing", "not finite", or, among
    what is inconclusive, the reason. `error` is the differences' own. `count` is the number of
    elements of which this is the worst.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sin": lambda dy, x: -dy * rg.cos(x)}):
    ...     report = rg.testing.gradient_report(rg.sin, [0.5])
    >>> report.findings[0].kind
    'wrong sign'
    """

    kind: str
    order: int
    input: str
    element: tuple[int, ...] | None
    analytic: float
    numerical: float
    error: float
    count: int = 1
    at: str = ""  # where else the arguments were, if not where they were given
    mode: str = "reverse"
    op_type: str | None = None
    rule: str | None = None
    line: str = ""  # of the user's code that ran the op, where that is known
    path: str = ""  # the module that it ran in

    @property
    def relative(self) -> float:
        """The size of the error, relative to the larger of the two numbers."""
        largest = max(abs(self.analytic), abs(self.numerical))
        return abs(self.analytic - self.numerical) / largest if largest else 0.0

    @property
    def place(self) -> str:
        """The input with the element: `args[0](1, 2)`."""
        return self.input + (str(self.element) if self.element else "")

    @property
    def kind_if_telling(self) -> str:
        """The kind in a message, where it says more than the two numbers."""
        return "" if self.kind == "wrong value" else f", {self.kind}"

    @property
    def where(self) -> str:
        """`gradient of order 1 by args[0](2,)`."""
        mode = f" ({self.mode} mode)" if self.mode != "reverse" else ""
        return f"gradient of order {self.order}{mode} by {self.place}{self.at}"

    def __str__(self) -> str:
        return (
            f"{self.where}: the rules give {self.analytic:.10g}, differences give "
            f"{self.numerical:.10g}{self.kind_if_telling}."
        )

    @property
    def as_cause(self) -> str:
        """The rule that is wrong, with its numbers."""
        order = f", order {self.order}" if self.order > 1 else ""
        inside = f" in {self.path}" if self.path else ""
        where = f"{inside} at {self.line}" if self.line else inside
        return (
            f"{self.rule}{where}, input {self.input!r}{order} "
            f"({self.analytic:.6g} against {self.numerical:.6g}{self.kind_if_telling})"
        )

    @property
    def as_doubt(self) -> str:
        """An outcome that decides nothing, as a sentence."""
        return f"inconclusive: {self.where}: {self.kind}"


@dataclass(frozen=True)
class GradientReport:
    """The result of a check: `findings` are wrong, `inconclusive` could not be decided.

    `causes` are the rules that are wrong by themselves, which explain the findings.

    >>> import regrad as rg
    >>> report = rg.testing.gradient_report(rg.sin, [0.5])
    >>> report.ok, report.findings
    (True, ())
    """

    order: int
    comparisons: int
    findings: tuple[Finding, ...] = ()
    inconclusive: tuple[Finding, ...] = ()
    causes: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing wrong was found."""
        return not self.findings

    @property
    def error(self) -> str:
        """Return the message that says what is wrong, and why."""
        text = "\n".join(map(str, self.findings))
        if self.causes:
            text += f" Wrong: {'; '.join(c.as_cause for c in self.causes)}."
        return text

    def __str__(self) -> str:
        fine = f"gradients to order {self.order}, {self.comparisons} comparisons: no error found"
        return "\n".join([self.error or fine, *[d.as_doubt for d in self.inconclusive]])

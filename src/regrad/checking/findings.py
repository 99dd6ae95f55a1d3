"""The findings of a gradient check, as values."""

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
    """A gradient that differs from finite differences, or for which they are inconclusive.

    `kind` is "wrong value", "wrong sign", "scaled by …", "zero", "missing", "not finite", or, for
    inconclusive findings, the reason. `error` is the error of the differences. `count` is the
    number of elements of which this is the worst.

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
    at: str = ""  # the place of the arguments, if it is not the caller's
    mode: str = "reverse"
    op_type: str | None = None
    rule: str | None = None
    line: str = ""  # the line of the user's code that ran the op, if known
    path: str = ""  # the module in which it ran

    @property
    def relative(self) -> float:
        """The size of the error, relative to the larger of the two numbers."""
        largest = max(abs(self.analytic), abs(self.numerical))
        return abs(self.analytic - self.numerical) / largest if largest else 0.0

    @property
    def place(self) -> str:
        """Return the input with the element: `args[0](1, 2)`."""
        return self.input + (str(self.element) if self.element else "")

    @property
    def kind_if_telling(self) -> str:
        """Return the kind for a message, if it adds to the two numbers."""
        return "" if self.kind == "wrong value" else f", {self.kind}"

    @property
    def where(self) -> str:
        """Return `gradient of order 1 by args[0](2,)`."""
        mode = f" ({self.mode} mode)" if self.mode != "reverse" else ""
        return f"gradient of order {self.order}{mode} by {self.place}{self.at}"

    def __str__(self) -> str:
        return (
            f"{self.where}: the rules give {self.analytic:.10g}, differences give "
            f"{self.numerical:.10g}{self.kind_if_telling}."
        )

    @property
    def as_cause(self) -> str:
        """Return the wrong rule, with its numbers."""
        order = f", order {self.order}" if self.order > 1 else ""
        inside = f" in {self.path}" if self.path else ""
        where = f"{inside} at {self.line}" if self.line else inside
        return (
            f"{self.rule}{where}, input {self.input!r}{order} "
            f"({self.analytic:.6g} against {self.numerical:.6g}{self.kind_if_telling})"
        )

    @property
    def as_doubt(self) -> str:
        """Return an inconclusive outcome, as a sentence."""
        return f"inconclusive: {self.where}: {self.kind}"


@dataclass(frozen=True)
class GradientReport:
    """The result of a check: `findings` are wrong, `inconclusive` could not be decided.

    `causes` are the rules that are wrong by themselves; they explain the findings.

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
        """True if the check found no error."""
        return not self.findings

    @property
    def error(self) -> str:
        """Return the message with the errors and their causes."""
        text = "\n".join(map(str, self.findings))
        if self.causes:
            text += f" Wrong: {'; '.join(c.as_cause for c in self.causes)}."
        return text

    def __str__(self) -> str:
        fine = f"gradients to order {self.order}, {self.comparisons} comparisons: no error found"
        return "\n".join([self.error or fine, *[d.as_doubt for d in self.inconclusive]])

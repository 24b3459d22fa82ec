"""The table that a check prints."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        parameter: path of the parameter, or ``loss`` for the draws of Monte-Carlo fields.
        field: name of the field.
        absolute: largest difference of an entry; in standard errors for draws.
        relative: in units of the largest entry of the expected field.
        verdict: ``"ok"``, ``"WRONG"`` or ``"not checked"``.
        note: on the comparison, or why there was none.
    """

    parameter: str
    field: str
    absolute: float | None
    relative: float | None
    verdict: str
    note: str = ""


@dataclass
class CheckResult:
    """The result of `check`; ``str()`` is the table.

    Attributes:
        title: model, sizes and precision.
        rows: a row for each parameter and field.
    """

    title: str
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """Rows that disagree."""
        return [row for row in self.rows if row.verdict == "WRONG"]

    @property
    def unchecked(self) -> list[Row]:
        """Rows for which there is no independent definition."""
        return [row for row in self.rows if row.verdict == "not checked"]

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing disagrees."""
        return not self.wrong and len(self.unchecked) < len(self.rows)

    def __str__(self) -> str:
        cells = [("parameter", "field", "max abs", "max rel", "verdict")]
        for row in self.rows:
            numbers = ["" if number is None else f"{number:.1e}" for number in (row.absolute, row.relative)]
            verdict = f"{row.verdict}: {row.note}" if row.note else row.verdict
            cells.append((row.parameter, row.field, numbers[0], numbers[1], verdict))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if i in (2, 3) else text.ljust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        agree = len(self.rows) - len(self.wrong) - len(self.unchecked)
        counts = f"{agree} agree, {len(self.wrong)} WRONG, {len(self.unchecked)} not checked"
        return "\n".join([self.title, "", lines[0], "-" * sum(widths, 8), *lines[1:], "", counts])

"""A table as LaTeX: booktabs, best values in bold, reported rows and footnotes; no numbers."""

from __future__ import annotations

from fedstill.report.layout import NOTHING, REPORTED, Layout

PREAMBLE = "% needs \\usepackage{booktabs}\n"
_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "·": r"$\cdot$", "α": r"$\alpha$", "μ": r"$\mu$", "λ": r"$\lambda$",
    "ρ": r"$\rho$", "β": r"$\beta$", "τ": r"$\tau$", "≤": r"$\leq$", "≥": r"$\geq$",
    "×": r"$\times$", "→": r"$\rightarrow$", "↳": "", "…": r"\dots{}", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def latex(title: str, layout: Layout) -> str:
    """A table with a caption; what stands below it is part of the caption."""
    sides = "".join("r" if layout.is_number(place) else "l" for place in range(len(layout.head)))
    head = " & ".join(map(escaped, layout.head))
    body = [
        " & ".join(_cell(layout, row, column) for column in range(len(layout.head))) + r" \\"
        for row in range(len(layout.body))
    ]
    caption = ". ".join([title, *layout.footnotes])
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{escaped(caption)}.}}",
        f"  \\begin{{tabular}}{{{sides}}}",
        r"    \toprule",
        f"    {head} \\\\",
        r"    \midrule",
        *(f"    {line}" for line in body),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """A text that LaTeX shows as it is."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _cell(layout: Layout, row: int, column: int) -> str:
    text = layout.body[row][column]
    shown = "--" if text == NOTHING else escaped(text)
    if layout.body[row][0].startswith(REPORTED):
        return rf"\textit{{{shown.strip()}}}" if shown else ""
    return rf"\textbf{{{shown}}}" if (row, column) in layout.best else shown

"""Docstrings of methods as Markdown: their equations with Greek letters, subscripts and superscripts."""

import html
import re
import textwrap

GREEK = {
    **dict(alpha="α", beta="β", gamma="γ", delta="δ", epsilon="ε", eps="ε", zeta="ζ", eta="η", theta="θ"),
    **dict(kappa="κ", lam="λ", lambda_="λ", mu="μ", nu="ν", xi="ξ", pi="π", rho="ρ", sigma="σ", tau="τ"),
    **dict(phi="φ", psi="ψ", omega="ω", Delta="Δ", Theta="Θ", Lambda="Λ", Sigma="Σ", Phi="Φ", Psi="Ψ"),
    **dict(Omega="Ω"),
}
GREEK["lambda"] = GREEK.pop("lambda_")
SIGNS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "!=": "≠", "||": "‖", "+-": "±"}
OPERATORS = ("sum", "mean", "max", "min", "prod", "argmax", "argmin", "median")
NAMES = ("cos", "grad", "mask", "dw", "[A-Z][0-9]", "[a-z]~")
SYMBOL = "|".join(["[A-Za-z]", *NAMES, *GREEK, *(f"{letter}bar" for letter in ("[a-z]", *GREEK))])
WORD = re.compile(
    rf"(?<![\w`])({SYMBOL})('?)(?:_(\w+|\{{[^}}]*\}}))?(?:\^(\w+|[-+*]|\{{[^}}]*\}}))?(\^(?![\w{{(*+-]))?(?![\w`])"
)
POWER = re.compile(r"(?<=[)\]‖|])\^(\w+|[-+*]|\{[^}]*\})")
OPERATOR = re.compile(rf"(?<![\w`])({'|'.join(OPERATORS)})_(\{{[^}}]*\}}|\w+)")
SIGN = re.compile("|".join(map(re.escape, SIGNS)))


def as_markdown(docstring: str) -> str:
    """A docstring whose blocks of equations are set apart; code between backticks stays as it is."""
    blocks = re.split(r"\n\s*\n", textwrap.dedent(docstring).strip("\n"))
    return "\n\n".join(_equations(block) if _is_equations(block) else _prose(block) for block in blocks)


def _is_equations(block: str) -> bool:
    """Whether its lines are aligned by hand: it stands inwards, or has columns."""
    lines = block.splitlines()
    return all(line.startswith("    ") for line in lines) or any(
        re.search(r"\S {3,}\S", line) for line in lines
    )


def _equations(block: str) -> str:
    return f'<pre class="equations">{_typeset(textwrap.dedent(block), operators=True)}</pre>'


def _prose(block: str) -> str:
    parts = re.split(r"(``[^`]*``|`[^`]*`)", block)
    return "".join(part if part.startswith("`") else _typeset(part, operators=False) for part in parts)


def _typeset(text: str, operators: bool) -> str:
    def script(tag: str, content: str | None) -> str:
        inner = (content or "").strip("{}")
        inner = re.sub(r"[A-Za-z]+", lambda word: GREEK.get(word[0], word[0]), inner)
        return f"<{tag}>{inner}</{tag}>" if content else ""

    def symbol(found: re.Match) -> str:
        base, prime, below, above, hat = found.groups()
        if base.endswith("bar") and len(base) > 3:
            base = GREEK.get(base[:-3], base[:-3]) + "\N{COMBINING MACRON}"
        if base.endswith("~"):
            base = base[:-1] + "\N{COMBINING TILDE}"
        base = GREEK.get(base, base) + ("\N{COMBINING CIRCUMFLEX ACCENT}" if hat else "")
        return base + prime.replace("'", "′") + script("sub", below) + script("sup", above)

    text = SIGN.sub(lambda sign: SIGNS[sign[0]], text)
    text = html.escape(text, quote=False)
    if operators:
        text = OPERATOR.sub(lambda found: found[1].replace("sum", "Σ") + script("sub", found[2]), text)
    return POWER.sub(lambda found: script("sup", found[1]), WORD.sub(symbol, text))

"""The part of a Python file on which some names depend, so that the rest may change.

Comments, blank lines, and functions and classes that nothing needed mentions are left out. What Python
executes when it loads the file is always needed: all other statements, and decorated definitions.
"""

import ast
import io
import tokenize
from collections.abc import Collection, Iterable

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def needed(source: str, names: Collection[str]) -> str:
    """Return the lines of a source that some names depend on; without names, all that are not comments.

    Args:
      source: the content of a Python file; anything else is returned as it is.
      names: what is used of it.
    """
    try:
        tree = ast.parse(source)
        comments = [token for token in _tokens(source) if token.type == tokenize.COMMENT]
    except (SyntaxError, ValueError, tokenize.TokenError):
        return source
    lines = source.split("\n")  # as `ast` and `tokenize` count them; splitlines also ends one at a form feed
    for token in comments:
        row, column = token.start
        lines[row - 1] = lines[row - 1][:column].rstrip()
    left_out = set()
    for node in _unused(tree, names) if names else ():
        left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    within = {  # blank lines of texts count
        row
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
        for row in range(node.lineno, node.end_lineno or 0)
    }
    kept = [line for row, line in enumerate(lines, 1) if row not in left_out and (line or row in within)]
    return "\n".join(kept)


def _tokens(source: str) -> Iterable[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def _unused(tree: ast.Module, names: Collection[str]) -> list[ast.stmt]:
    """Return the definitions of a module that neither some names nor its other statements depend on."""
    definitions = {}
    for node in tree.body:
        if isinstance(node, DEFINITIONS) and not node.decorator_list:
            definitions.setdefault(node.name, []).append(node)
    apart = [node for nodes in definitions.values() for node in nodes]
    others = [node for node in tree.body if node not in apart]
    used, new = set(), {*names} | _mentioned(others)
    while new:
        used |= new
        new = _mentioned(node for name in new for node in definitions.get(name, ())) - used
    return [node for name, nodes in definitions.items() if name not in used for node in nodes]


def _mentioned(nodes: Iterable[ast.AST]) -> set[str]:
    """Return all names in some statements: of variables, attributes and texts, which getattr may read."""
    found = set()
    for node in nodes:
        for part in ast.walk(node):
            match part:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                    found.add(name)
    return found

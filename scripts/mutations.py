"""`mutants_of`: a module's small changes, which tests should notice; `patch` puts one into live functions."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

COMPARED: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
COMPARED |= {other: one for one, other in COMPARED.items()}
COMPUTED: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
COMPUTED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr}
NAMES = {"mean": "sum", "min": "max", "any": "all", "argmax": "argmin", "clamp_min": "clamp_max", "ceil": "floor"}
NAMES |= {other: one for one, other in NAMES.items()}


@dataclass(frozen=True)
class Mutant:
    """A changed module: where, what was changed, and its tree."""

    path: Path
    line: int
    change: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """File, line and change, as a list names them."""
        text = self.path.read_text(encoding="utf-8").splitlines()[self.line - 1].strip()
        return f"{self.path.name}:{self.line} {self.change}: {text}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield a module's mutants, one change in a function each; annotations and messages of errors stay."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for holder, index, node in [*_places(tree, inside=False)]:
        for change, new in _changes(node):
            line = node.target.lineno if isinstance(node, ast.comprehension) else node.lineno
            if hasattr(node, "lineno"):
                ast.copy_location(new, node)
            holder[index] = new
            mutated = ast.fix_missing_locations(deepcopy(tree))
            holder[index] = node
            yield Mutant(path, line, change, mutated)


def _places(node: ast.AST, inside: bool) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (list or attributes, index or name, node) of all nodes within functions."""
    if isinstance(node, (ast.Raise, ast.Assert)):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        inner = inside or (isinstance(node, (ast.FunctionDef, ast.Lambda)) and field == "body")
        holder, entries = (value, enumerate(value)) if isinstance(value, list) else (vars(node), [(field, value)])
        for index, child in entries:
            if isinstance(child, ast.AST):
                if inner and (hasattr(child, "lineno") or isinstance(child, ast.comprehension)):
                    yield holder, index, child
                yield from _places(child, inner)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _with(node: Any, **fields: Any) -> Any:
    new = deepcopy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _changes(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (description, replacement)."""
    match node:
        case ast.Compare(ops=ops):
            for n, op in enumerate(ops):
                other = COMPARED[type(op)]
                changed = [other() if n == m else old for m, old in enumerate(ops)]
                yield f"{type(op).__name__} → {other.__name__}", _with(node, ops=changed)
        case ast.BinOp(op=ast.BitOr()):
            yield "left of |", deepcopy(node.left)
        case ast.BinOp(op=op) if type(op) in COMPUTED and not _is_text(node):
            yield f"{type(op).__name__} → {COMPUTED[type(op)].__name__}", _with(node, op=COMPUTED[type(op)]())
        case ast.BoolOp(op=op):
            other = ast.Or if isinstance(op, ast.And) else ast.And
            yield f"{type(op).__name__} → {other.__name__}", _with(node, op=other())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield f"without {type(node.op).__name__}", deepcopy(node.operand)
        case ast.Constant(value=bool(value)):
            yield f"{value} → {not value}", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield f"{value} → {value + 1}", ast.Constant(value + 1)
            if isinstance(value, float) and value:
                yield f"{value} → {value / 2}", ast.Constant(value / 2)
        case ast.IfExp(test=test) | ast.If(test=test) | ast.While(test=test):
            yield "condition negated", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Attribute(attr=name) if name in NAMES:
            yield f".{name} → .{NAMES[name]}", _with(node, attr=NAMES[name])
        case ast.Name(id=("min" | "max" | "any" | "all") as name):
            yield f"{name} → {NAMES[name]}", ast.Name(NAMES[name], node.ctx)
        case ast.comprehension(ifs=[_, *_]):
            yield "no filter", _with(node, ifs=[])
        case ast.Expr(value=ast.Call() | ast.Yield()) | ast.AugAssign():
            yield "left out", ast.Pass()
        case ast.Subscript(slice=ast.Slice(), ctx=ast.Load()):
            yield "no slice", deepcopy(node.value)
        case ast.Continue() | ast.Break():
            yield "left out", ast.Pass()


def functions_of(path: Path) -> list[FunctionType]:
    """Return the live functions of a module that has been imported."""
    gc.unfreeze()
    functions = [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]
    gc.freeze()
    return [function for function in functions if function.__code__.co_filename == str(path)]


def patch(mutant: Mutant, functions: list[FunctionType]) -> bool:
    """Give the functions of a module the mutant's code; False where none could be given it."""
    old, new = (dict(_codes(compile(source, str(mutant.path), "exec", dont_inherit=True))) for source in (
        mutant.path.read_text(encoding="utf-8"), mutant.tree,
    ))  # fmt: skip
    changed = {_place(code): new[key] for key, code in old.items() if key in new and code != new[key]}
    patched = False
    for function in functions:
        code = changed.get(_place(function.__code__))
        if code is not None and len(code.co_freevars) == len(function.__code__.co_freevars):
            function.__code__, patched = code, True
    return patched


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType, above: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], CodeType]]:
    """Yield (place among its siblings, code) of all functions of a module, nested ones too."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for number, inner in enumerate(nested):
        place = (*above, number, inner.co_name)
        yield place, inner
        yield from _codes(inner, place)

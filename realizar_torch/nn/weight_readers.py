"""Weights of linears and embeddings that a model's own code reads, where others only call the module."""

import ast
import inspect
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from types import CodeType, FunctionType

from torch import nn

from realizar_torch.nn.layout import PackedModule

# what starts weights, before any is packed
_STARTERS = ("__init__", "init_weights", "_init_weights", "reset_parameters", "_reset_parameters")
# what bytes and floats have in common
_HARMLESS = ("device", "is_meta", "requires_grad")
# they read weights in their fast path only
_ADAPTED = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


def weight_readers(model: nn.Module) -> dict[str, str]:
    """Module name -> who reads its weight, as "Block reads self.wo.weight", found in the source of classes.

    ``self.wo`` is a child of each instance of the class. Other variables may hold any module: ``block.wo``
    stands for all whose names end in ``wo``, and so does ``wo``. Not seen are weights that start or tie
    others, calls (``self.get().weight``), modules under another name than their own (``layer = self.wo``,
    ``for layer in self.layers``), and code without a source that parses, as a console's.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    instances: dict[type, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for kind in type(module).__mro__:
            instances[kind].append(name)
    found: dict[str, str] = {}
    for kind, owners in instances.items():
        for expression, (root, *path) in _reads(kind):
            for owner in owners if root == "self" else ["*"]:
                for name in _matching(modules, f"{owner}.{'.'.join(path or [root])}".lstrip(".")):
                    found.setdefault(name, f"{kind.__name__} reads {expression}")
    return found


def leave_fast_paths(model: nn.Module) -> None:
    """Makes torch's encoder layers call the packed modules in them, as they do while they train.

    Their fast path takes ``linear1.weight`` for floats. It is for ReLU and GELU, by a note that each layer
    keeps beside its activation; encoders make nested tensors, which nothing else takes, for the fast path.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _holds_packed(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and _holds_packed(module):
            module.use_nested_tensor = False


def _matching(names: Collection[str], pattern: str) -> list[str]:
    """Names that ``pattern`` stands for, whose leading ``*.`` may also stand for nothing."""
    if "*" not in pattern:
        return [pattern] if pattern in names else []
    return [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)]


def _holds_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedModule) for module in model.modules())


def _reads(kind: type) -> Iterator[tuple[str, list[str]]]:
    """Expressions that end in ``.weight`` in methods of a class itself, and the names they are made of."""
    if kind is nn.Module or kind in _ADAPTED:
        return
    for name, value in vars(kind).items():
        function = _function(value)
        if name not in _STARTERS and function is not None and _mentions_weight(function.__code__):
            yield from _reads_of(function)


def _function(value: object) -> FunctionType | None:
    """What a method or property runs, without its decorators; None for all else that a class may hold."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    try:
        # others may have a __getattr__ that answers, or fails, whatever it is asked
        value = inspect.unwrap(value) if inspect.isroutine(value) else None
    except ValueError:
        return None
    return value if inspect.isfunction(value) else None


def _mentions_weight(code: CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return "weight" in code.co_names or any(map(_mentions_weight, inner))


def _reads_of(function: FunctionType) -> Iterator[tuple[str, list[str]]]:
    try:
        source = inspect.getsource(function)
        tree = ast.parse("if True:\n" + source if source[0].isspace() else source)
    except (OSError, SyntaxError, tokenize.TokenError):
        return
    harmless: set[ast.AST] = set()
    for node in ast.walk(tree):
        # parents come before their children
        if isinstance(node, ast.Attribute) and node.attr in _HARMLESS:
            harmless.add(node.value)
        elif isinstance(node, ast.Assign) and all(map(_is_weight, node.targets)):
            harmless.update((node.value, *node.targets))
        elif isinstance(node, ast.Attribute) and _is_weight(node) and node not in harmless:
            chain = _chain(node.value)
            if chain and chain != ["self"]:
                yield ast.unparse(node), chain


def _is_weight(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "weight"


def _chain(node: ast.expr) -> list[str] | None:
    """``a.b[0].c[i]`` as a, b, 0, c, *; None for what is made of more than names and indices."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute | ast.Subscript) and (chain := _chain(node.value)):
        if isinstance(node, ast.Attribute):
            return [*chain, node.attr]
        return [*chain, str(node.slice.value) if isinstance(node.slice, ast.Constant) else "*"]
    return None

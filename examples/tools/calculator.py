"""A calculator as a tool: --tools examples/tools/calculator.py:calculator."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from trueline.rewards.base import PolicyError

Number = int | float
LONGEST_EXPRESSION = 500  # characters
MOST_BITS = 4096  # of a whole number, which is about 1,200 digits
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos},
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"abs": abs, "round": lambda *values: round_number(*values), "min": min, "max": max},
    **{"sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil},
    **{"exp": math.exp, "log": math.log, "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan},
}
NAMES = {"pi": math.pi, "e": math.e}
KNOWS = f"it knows numbers, + - * / // % **, parentheses, {', '.join([*NAMES, *FUNCTIONS])}"


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: The expression, such as (3 + 4) * 2**10 or sqrt(2) / 3.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise PolicyError(f"the expression has {len(expression)} characters; give at most {LONGEST_EXPRESSION}")
    try:
        value = value_of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise PolicyError(f"{expression!r} is no arithmetic expression: {KNOWS}") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise PolicyError(f"{expression!r} cannot be computed: {error}") from None
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def value_of(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return check_size(value)
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
            return check_size(OPERATORS[type(sign)](value_of(operand)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return compute(OPERATORS[type(sign)], value_of(left), value_of(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return check_size(FUNCTIONS[name](*map(value_of, arguments)))
    raise PolicyError(f"the calculator does not know {ast.unparse(node)!r}: {KNOWS}")


def compute(operation: Callable[..., Any], left: Number, right: Number) -> Number:
    whole = isinstance(left, int) and isinstance(right, int)
    if operation is operator.pow and whole and int(left).bit_length() * right > MOST_BITS:
        raise OverflowError("the result is too large")  # before it takes all memory
    return check_size(operation(left, right))


def round_number(value: Number, digits: Number = 0) -> Number:
    """Round without the power of ten that many digits before the point would take."""
    return round(value, max(int(digits), -MOST_BITS)) if digits else round(value)


def check_size(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if int(value).bit_length() > MOST_BITS:  # int raises for infinity, and for what is no number
        raise OverflowError("the result is too large")
    return value

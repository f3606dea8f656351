"""Models that return only the last token's logits: changes the trace to compute for all tokens what they compute for that one.

Before: logits = head(norm(x)[:, -1])
After:  logits = head(norm(x))
Refuses: logits that are computed in another way from more than the last token's row. The self-check compares the result with the model's
own logits for each prefix of its prompts.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.fx.graph_tools import call, symbol, value_of

_LAST: tuple[Any, ...] = (-1, [-1], (-1,), slice(-1, None), slice(-1, None, None))
_WHOLE = slice(None)


def for_all_tokens(gm: fx.GraphModule) -> None:
    """Rewrite the trace of a call of token ids [1, T], whose one output is the logits, in place.

    Raises:
        UnsupportedError: the row of the last token is not taken in one place, or what is made of it cannot be made of all rows.
    """
    logits: Any = gm.graph.output_node().args[0]
    (logits,) = logits
    behind, picks = _made_of_one_row(logits)
    if len(picks) != 1 or not _takes_last(picks[0]):
        raise _refusal(", ".join(pick.name for pick in picks) or logits.name)
    pick: Any = picks[0]
    rows = pick.args[0]
    pick.replace_all_uses_with(rows)
    gm.graph.erase_node(pick)
    for node in gm.graph.nodes:
        if node in behind and node is not pick:
            _evaluate(node)
    shape = value_of(rows if logits is pick else logits).shape
    if len(shape) != 3 or shape[0] != 1 or symbol(shape[1]) != symbol(value_of(rows).shape[1]):
        raise _refusal(f"of all rows they would be {list(shape)}")
    gm.recompile()


def _made_of_one_row(logits: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
    """The nodes behind the logits without a dim of tokens that are made of tokens, and which of them are made of something with one."""
    found: dict[fx.Node, bool] = {}

    def visit(node: fx.Node) -> bool:
        """Whether the node is made of tokens."""
        if node not in found:
            found[node] = False
            made = [_has_rows(source) or visit(source) for source in node.all_input_nodes]
            found[node] = any(made)
        return found[node]

    visit(logits)
    behind = {node for node, made in found.items() if made}
    return behind, sorted(node for node in behind if any(map(_has_rows, node.all_input_nodes)))


def _has_rows(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and any(not isinstance(symbol(size), int) for size in value.shape)


def _takes_last(node: fx.Node) -> bool:
    """Whether it is x[:, -1], x[:, [-1]] or x[:, -1:] of x [1, T, ..]."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node) or not isinstance(node.args[1], tuple):
        return False
    key: Any = node.args[1]
    shape, (first, *key) = value_of(node.args[0]).shape, key
    rows = [axis for axis, size in enumerate(shape) if not isinstance(symbol(size), int)]
    return rows == [1] and shape[0] == 1 and first == _WHOLE and key[:1] != [] and key[0] in _LAST and all(k == _WHOLE for k in key[1:])


def _evaluate(node: Any) -> None:
    """Its example value, of those that its inputs have now."""
    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    try:
        with enable_python_dispatcher():
            value = call(node, args, kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise _refusal(f"{node.name} cannot be made of all rows ({type(error).__name__}: {error})") from error
    node.meta["example_value"] = value


def _refusal(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the model gives the logits of the last token alone, and they are not made of the last row of something, as head(x[:, -1]) is: "
        f"{why}. A batch of several requests needs the last token of each. Return the logits of all tokens; the engine computes only those "
        "that it wants"
    )

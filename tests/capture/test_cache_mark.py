"""Marks for Inductor's own cache: they add up, and a pass of the user's runs as before."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.codecache import FxGraphHashDetails
from torch._inductor.custom_graph_pass import CustomGraphPass

from paged_attn.capture.inductor.cache_mark import marked
from paged_attn.capture.inductor.launch_sizes import ROWS, blocks_for_many_rows
from paged_attn.capture.inductor.pdl import pdl, waiting_first
from paged_attn.capture.inductor.reductions import rows_in_any_order
from paged_attn.capture.inductor.reshapes import rows_set_aside


class Users(CustomGraphPass):
    def __init__(self) -> None:
        self.seen: list[fx.Graph] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(graph)

    def uuid(self) -> Any:
        return "the user's"


def key() -> Any:
    """Of a graph in Inductor's cache, as far as passes decide it."""
    details = FxGraphHashDetails(fx.GraphModule({}, fx.Graph()), [], {}, [])
    return details.post_grad_custom_post_pass


def test_every_change_has_a_key_of_its_own() -> None:
    keys = [key()]
    with pdl(True), waiting_first(), blocks_for_many_rows():
        keys.append(key())
        assert "wait first" in repr(keys[-1]) and f"{ROWS} rows" in repr(keys[-1])
    with blocks_for_many_rows():
        keys.append(key())
    for change in (rows_in_any_order(), rows_set_aside()):
        with change:
            keys.append(key())
    with config.patch({"post_grad_custom_post_pass": Users()}):
        keys.append(key())
        with blocks_for_many_rows():
            keys.append(key())
    assert len({repr(each) for each in keys}) == len(keys)
    assert config.post_grad_custom_post_pass is None


def test_a_pass_of_the_users_runs() -> None:
    users, graph = Users(), fx.Graph()
    with config.patch({"post_grad_custom_post_pass": users}), marked("one"), marked("two"):
        config.post_grad_custom_post_pass(graph)
    assert users.seen == [graph]
    with marked("one"):
        config.post_grad_custom_post_pass(graph)
    assert users.seen == [graph]


def test_nothing_is_cached_with_a_pass_without_a_name() -> None:
    """Inductor keeps nothing on disk with such a pass, which is a plain function or one whose name is None."""

    def plain(graph: fx.Graph) -> None:
        pass

    class Nameless(Users):
        def uuid(self) -> Any:
            return None

    with config.patch({"post_grad_custom_post_pass": plain}), marked("one"):
        assert config.post_grad_custom_post_pass is plain
    with config.patch({"post_grad_custom_post_pass": Nameless()}), marked("one"), marked("two"):
        assert not config.post_grad_custom_post_pass.uuid()

"""The forward context: thread-local, nested, restored however it is left."""

import contextlib
import threading
from unittest import mock

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext, current_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.torch_native import TorchNativeBackend

SPEC = AttentionSpec(2, 1, 4, 4, 0.5)


class PlanFails(TorchNativeBackend):
    def plan(self, batch, pool):
        raise RuntimeError("no plan")


def context(new: int = 3, backend=None, page_size: int = 4) -> ForwardContext:
    batch = Batch.build([BatchRequest(list(range(new)), [1, 2, 3])], page_size)
    return ForwardContext(batch, KVPool([SPEC], 4, page_size, torch.float32), backend or TorchNativeBackend())


@pytest.fixture(autouse=True)
def nothing_leaks():
    assert current_context() is None
    yield
    assert current_context() is None


def in_thread(work):
    """What `work` returned or raised in another thread."""
    got = []

    def call():
        try:
            got.append(work())
        except (ContextError, RuntimeError) as error:
            got.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=30)
    assert got, "the thread hangs"
    return got[0]


def test_outside_there_is_none():
    assert current_context() is None
    assert in_thread(current_context) is None


def test_inside_it_is_current_and_planned():
    made = context()
    assert made.plan is None
    with made as entered:
        assert entered is made is current_context()
        assert made.plan is not None
        assert made.layers == (SPEC,)
    assert made.plan is None


class Counted(TorchNativeBackend):
    """Counts its plans, and what is launched for them."""

    def __init__(self):
        super().__init__()
        self.done = []

    def plan(self, batch, pool):
        self.done.append("plan")
        return super().plan(batch, pool)

    def plan_in_graph(self, plan):
        self.done.append("launches")


@pytest.mark.parametrize("late", [False, True])
def test_late_plans_are_made_once_when_they_are_read(late):
    plain = context(backend=(backend := Counted()))
    made = ForwardContext(plain.batch, plain.pool, backend, recurrent := mock.Mock(), plans_late=late)
    with made:
        assert bool(backend.done) is bool(recurrent.plan.called) is not late
        assert made.plan is made.plan is not None and made.recurrent_plan is made.recurrent_plan is recurrent.plan.return_value
        assert backend.done == ["plan", "launches"]
        recurrent.plan.assert_called_once_with(plain.batch)
    assert made.plan is made.recurrent_plan is None and backend.done == ["plan", "launches"]


def test_a_late_plan_that_nothing_reads_is_never_made():
    plain = context(backend=(backend := Counted()))
    with ForwardContext(plain.batch, plain.pool, backend, plans_late=True):
        pass
    assert not backend.done


def test_contexts_nest():
    outer, inner = context(), context()
    with outer:
        with inner:
            assert current_context() is inner
        assert current_context() is outer


def test_restored_after_an_exception():
    outer = context()
    with outer:
        with pytest.raises(KeyError), context():
            raise KeyError("in the model")
        assert current_context() is outer
    with pytest.raises(KeyError), context(), context():
        raise KeyError("twice nested")


def test_another_thread_does_not_see_it():
    with context():
        assert in_thread(current_context) is None


def test_two_threads_at_once_have_their_own_batches():
    """Both are inside before either calls the op, and both call it before either leaves."""
    threads, barrier, outputs = [], threading.Barrier(2, timeout=30), {}

    def step(rows: int):
        made = context(rows)
        value = torch.full((rows, 1, 4), float(rows))
        output = torch.full((rows, 2, 4), float("nan"))
        with made:
            for _ in range(20):
                barrier.wait()
                assert current_context() is made
                UNIFIED_ATTENTION(torch.ones(rows, 2, 4), torch.ones(rows, 1, 4), value, output, 0, True)
                barrier.wait()
        outputs[rows] = (output, made.pool.value(0), current_context())

    for rows in (3, 7):
        threads.append(threading.Thread(target=step, args=(rows,)))
        threads[-1].start()
    for thread in threads:
        thread.join(timeout=60)
    assert set(outputs) == {3, 7}
    for rows, (output, stored, after) in outputs.items():
        torch.testing.assert_close(output, torch.full((rows, 2, 4), float(rows)))
        assert stored.count_nonzero() == rows * 4 and stored.max() == rows
        assert after is None


def test_entered_twice():
    made = context()
    with made, pytest.raises(ContextError, match=r"was entered before.*make a new one for each step"):
        made.__enter__()
    with pytest.raises(ContextError, match="was entered before"):
        made.__enter__()


def test_entered_from_two_threads():
    made = context()
    with made:
        assert isinstance(in_thread(made.__enter__), ContextError)
        assert current_context() is made


def test_of_many_threads_one_enters():
    made, barrier, results = context(), threading.Barrier(8, timeout=30), []

    def race():
        barrier.wait()
        try:
            made.__enter__()
            results.append("entered")
        except ContextError:
            results.append("refused")

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(results) == ["entered"] + ["refused"] * 7


def test_left_out_of_order():
    outer, inner = context(), context()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ContextError, match="reverse order"):
        outer.__exit__(None, None, None)
    assert current_context() is None  # neither stays active: their blocks overlap, and the outer one is over
    with pytest.raises(ContextError, match="reverse order"):
        inner.__exit__(None, None, None)


def test_an_inner_context_that_is_never_left_does_not_outlive_the_outer():
    first = context()
    with first:
        with pytest.raises(ContextError), context():
            context().__enter__()
        assert current_context() is first


def test_left_in_another_thread():
    made = context()
    with made:
        error = in_thread(lambda: made.__exit__(None, None, None))
        assert isinstance(error, ContextError) and "in the thread in which they were entered" in str(error)
        assert current_context() is made


def test_left_without_entering():
    with pytest.raises(ContextError):
        context().__exit__(None, None, None)


def test_batch_and_pool_agree_on_the_page_size():
    batch = Batch.build([BatchRequest([1, 2], [1])], 4)
    with pytest.raises(ContextError, match="batch has pages of 4 tokens, the pool of 16; build the batch with page_size=16"):
        ForwardContext(batch, KVPool([SPEC], 4, 16, torch.float32), TorchNativeBackend())


def test_a_plan_that_fails_leaves_nothing():
    with pytest.raises(RuntimeError, match="no plan"), context(backend=PlanFails()):
        raise AssertionError("the block must not run")
    assert current_context() is None
    outer = context()
    with outer:
        with pytest.raises(RuntimeError, match="no plan"):
            context(backend=PlanFails()).__enter__()
        assert current_context() is outer


def test_an_exit_stack_leaves_in_order():
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(context()) for _ in range(3)]
        assert current_context() is made[-1]

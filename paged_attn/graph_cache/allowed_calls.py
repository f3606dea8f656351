"""What a graph from disk may call, as data: computations on tensors and numbers, and nothing that gives access to anything else.

A name that is missing here is not an error: a graph that calls it is not kept, and its model is traced in each process. Before you add a
name, ask whether calling it, with any arguments, can touch more than tensors.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

_C: Any = torch._C
_VARIABLE_FUNCTIONS = _C._VariableFunctions  # functions that torch generates from its operator list
_FILES_AND_MEMORY = frozenset({"from_file", "from_numpy", "frombuffer"})


def _public(module: Any, name: str) -> frozenset[str]:
    """Functions that were made in a module; what it imports besides is not among them."""
    functions = (type(operator.add), type(_public))
    made_there = {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == name}
    return frozenset(key for key, value in made_there.items() if isinstance(value, functions) and not key.startswith("_"))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# By the module under whose name a graph calls them. The tables are fixed when this is imported, and names have no dots, so that none leads
# from one thing to another.
FUNCTIONS: Mapping[str, frozenset[str]] = {
    "torch": frozenset(name for name in dir(_VARIABLE_FUNCTIONS) if not name.startswith("_") and hasattr(torch, name)) - _FILES_AND_MEMORY
    | _names("""
        Size sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt _assert_async _grouped_mm _shape_as_tensor _softmax _log_softmax
    """),
    "torch.functional": _names("""
        atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors cartesian_prod cdist einsum meshgrid norm split tensordot unique
        unique_consecutive
    """),
    "torch.nn.functional": _public(F, "torch.nn.functional"),
    "torch._C._nn": _public(_C._nn, "torch._C._nn"),
    "torch._C._special": _public(_C._special, "torch._C._special"),
    "torch._C._linalg": _public(_C._linalg, "torch._C._linalg"),
    "torch._C._fft": _public(_C._fft, "torch._C._fft"),
    "torch._C": frozenset({"_log_api_usage_once"}),
    "_operator": _names("""
        abs add and_ concat contains eq floordiv ge getitem gt iadd iand iconcat ifloordiv ilshift imatmul imod imul index inv invert ior
        ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift setitem sub truediv truth xor
    """),
    "math": frozenset(name for name in dir(math) if callable(getattr(math, name)) and not name.startswith("_")),
    "builtins": _names("getattr max min abs round pow int float bool len sum tuple slice"),
}
MODULES: Mapping[str, Any] = {
    "torch": torch, "torch.functional": torch.functional, "torch.nn.functional": F, "torch._C": _C, "torch._C._nn": _C._nn,
    "torch._C._special": _C._special, "torch._C._linalg": _C._linalg, "torch._C._fft": _C._fft,
    "_operator": operator, "math": math, "builtins": builtins,
}  # fmt: skip
# What `getattr` may read, of a result of the graph only.
ATTRIBUTES = _names("T mT H mH shape dtype device layout ndim real imag data is_cuda requires_grad itemsize nbytes")
# Methods are those of a tensor but these, which run what they are given, or get at memory, files, hooks or other processes.
_NO_METHODS = _names("""
    apply_ map_ map2_ as_subclass backward const_data_ptr data_ptr module_load numpy pin_memory record_stream register_hook
    register_post_accumulate_grad_hook reinforce requires_grad_ retain_grad set_ share_memory_ storage storage_type untyped_storage
""")
METHODS = frozenset(name for name in dir(torch.Tensor) if not name.startswith("_") and callable(getattr(torch.Tensor, name))) - _NO_METHODS
# Ops, anybody's: they take or give tensors, besides these only numbers and the like, and texts only under names of which it is known that
# they choose among ways to compute.
OP_TYPES = _names("Tensor int SymInt float bool number complex ScalarType Layout Device MemoryFormat Generator")
OP_TEXTS = _names("""
    approximate rounding_mode equation mode padding padding_side pad_mode reduce norm UPLO driver ord p side indexing interpolation
    reduce_op group_name assert_msg
""")
OPS_REFUSED = frozenset({"aten::from_file", "aten::save", "aten::_from_blob"})

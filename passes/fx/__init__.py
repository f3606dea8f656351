"""Tools on FX graphs that passes share: reading calls, slicing backwards, evaluating, the rows of tokens, tolerances."""

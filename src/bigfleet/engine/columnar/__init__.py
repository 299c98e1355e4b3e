"""Decides over columns of integers: the reference engine's answer at half a million machines.

`ColumnStore` keeps the machines, `ColumnarEngine` decides. This package must not mean anything that the reference
engine does not (docs/adr/0110-columnar-engine.md).
"""

"""The machine code of the kernels, compiled for a GPU that need not be present.

listing   disassembly: instruction classes, loops, spills
compiled  one kernel compiled for one target
report    the table of all default configurations (``bench --compile-only``)
"""

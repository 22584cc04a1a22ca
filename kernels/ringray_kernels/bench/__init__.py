"""``python -m ringray_kernels.bench``: what the kernels compile to, and how fast they are.

``problems`` says what is measured, ``contenders`` who takes part, ``checks`` what is right,
``timing`` how long it takes, ``measure`` joins these for one point, ``virtual`` for a ring on one
device, ``session`` for all. ``compiled``, ``listing`` and ``compile_report`` need no GPU.
"""

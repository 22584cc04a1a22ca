"""What a person sees of a plan, a running sweep and its results.

``words`` turns numbers and configurations into text, ``board`` keeps the state of a running sweep;
both print nothing. ``tables`` builds tables from them, ``live`` shows a sweep while it runs: as one
table that is redrawn on a terminal, as one line per event otherwise. The views import rich, and
only when something is shown.
"""

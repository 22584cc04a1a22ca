"""The experiment platform: specs, plans, rings of Ray actors, the store and MLflow.

trial     what a trial is and what came of it
search    which point to measure next
kinds     what a rank runs
predict   what a rank computes, links carry and a trial costs
calibrate what this machine computes and sends, measured
spec      the YAML file, checked
plan      the points of a spec, predicted and pruned
store     the durable record
cluster   where Ray runs and what it offers
ring      Ray actors as one ring
driver    measures a plan
report    tables, the live view and figures
tracking  the store projected into MLflow
opening   opens stores
listeners what follows a sweep, as its spec asks
sweeps    runs, tunes, resumes and watches sweeps, and reads their results
cli       the command line

``run`` and ``results`` are those of ``sweeps``, imported when they are asked for.
"""

import importlib

__all__ = ["results", "run"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("ringray.lab.sweeps"), name)
    raise AttributeError(f"module 'ringray.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Adapters: ways to run a plain model on several ranks, one file each.

A file has the functions and constants of a target (``ringray.verification.target``) that differ
from the defaults. To add one, write it and name it in ``target.ADAPTERS``; the contract suite runs
over all.
"""

"""Tuned choices: kept, found and applied.

table   the file of tuned choices
lookup  the choice for one call
"""

"""Tuned choices: kept, found and applied.

table   entries, and the files that hold them
check   fields and limits of such a file
lookup  the choice for one call
"""

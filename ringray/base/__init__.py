"""Tools for all other packages; imports nothing of ringray.

errors         errors that users meet
units          numbers with units, read and written
redaction      text without secrets
private_files  files that only their owner reads; the home folder
leftovers      folders and processes that end with their maker, or with the next command
signals        interruption
source_digest  digests of the source, and the part of it that is measured
cgroups        limits of control groups
provenance     hardware, versions, source of a measurement
"""

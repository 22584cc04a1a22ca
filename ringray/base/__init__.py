"""Tools for all other packages; imports nothing of ringray.

errors         errors that users meet
units          numbers with units, read and written
redaction      text without secrets
private_files  files that only their owner reads; the home folder
output_files   files that a user names for output
locks          locks that end with their process; what a killed process leaves
signals        interruption
source_digest  digests of the source, and the part of it that is measured
cgroups        limits of control groups
provenance     hardware, versions, source of a measurement
"""

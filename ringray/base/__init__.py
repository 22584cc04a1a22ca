"""What every other package may use; imports nothing of ringray.

errors         errors that users meet
units          numbers with units, read and written
redaction      text without secrets
private_files  files that only their owner reads
provenance     hardware, versions and digests of the source
"""

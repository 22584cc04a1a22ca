"""Ray clusters: connection, capacity, waiting and jobs.

connect         a connection to a cluster, or a local one
access          tokens, and why a cluster refuses
capacity        what a cluster offers
autoscaler      what a cluster may grow to
placement_wait  waiting for a placement group
jobs            a sweep as a Ray job
job_server      the job server's HTTP API
job_package     the files that a job needs
"""

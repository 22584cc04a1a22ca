"""Ray clusters: connection, capacity, waiting and jobs.

capacity        the nodes that a cluster has or can grow to
fit             the rings that fit on them
connect         the connection to a cluster, or a local Ray
access          tokens and versions: why a cluster refuses
autoscaler      the nodes that Ray's autoscaler can start
machines        the machines that rings side by side hold
placement_wait  waiting for a placement group
jobs            a sweep as a Ray job
head_command    a command of ringray as a job on the head
job_server      the job server's HTTP API
job_folder      the working directory of a job, which Ray empties
job_package     the files of a job
ray_private     every use of Ray's private API
"""

"""Text, tables and figures of a plan, a running sweep and its results.

words         configurations and metrics as text
replicas      replicas of one point as one
verdict       the fastest of each problem, where it is decided
noise         changes of points that are beyond the noise
comparison    two sweeps compared
comparison_views  a comparison as text, JSON and a page
board         state of a running sweep; prints nothing
tables        tables of plans, results, hops and sweeps
history       all measurements of each trial
live          views of a running sweep: a table on a terminal, lines elsewhere
studies       results of searches
trace_figure  picture of a trace
palette       colours of figures and pages
figures       charts of a sweep
page          self-contained HTML pages
sweep_report  sweeps as such a page

tables, history, live and studies import rich, the figures altair.
"""

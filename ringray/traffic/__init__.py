"""Traffic of a ring: the rows that each rank needs, and the messages that carry them. No torch.

mask       the keys that a query sees
areas      rectangles that all visible pairs lie in
bands      visible pairs of two pieces in closed form
by_area    visible pairs and needed rows of packed sequences, area by area
geometry   visible pairs and needed rows of all pairs of ranks
dealer     the ranks that hold the rows of packed documents
deal       the result of dealing, and its figures
routes     the ranks that a chunk visits, and the steps of these visits
hulls      the rows of the messages along a route
walk       the cheapest routes of both passes
script     transfers and computations of one rank, step by step
occupancy  rows held at each step
tree       a tree of merges over the ranks
"""
